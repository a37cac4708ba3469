"""Dimension "function", optional parts: tools and answers in a given form.

A named tool and a JSON schema are enforced by the server's grammar, so even a small model must succeed; whether a model
chooses a tool by itself is its own ability, and only the form of what comes is judged.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.acceptance.outcome import failed
from quantkit.acceptance.session import Found, Session
from quantkit.acceptance.talk import Answer, Message, ask, user


class _Weather(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: Literal["Paris", "Beijing", "Cairo"]
    unit: Literal["celsius", "fahrenheit"]


class _Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    animal: Literal["cat", "dog", "horse"]
    tame: bool


QUESTION = "What is the weather in Paris, in degrees Celsius?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": _Weather.model_json_schema(),
        "strict": True,  # without it the reference promises no schema
    },
}


def tools_named(session: Session) -> Found:
    """The tool that the request names is called with arguments of its schema."""
    answer = _ask_with_tool(session, {"type": "function", "function": {"name": "get_weather"}})
    if not answer.tool_calls:
        raise failed("tool_not_called", answer.text)
    _check_calls(answer)
    return Found("tool_called", {}, (str(answer.tool_calls),))


def tools_auto(session: Session) -> Found:
    """The model may call the tool; what it calls has the right form."""
    answer = _ask_with_tool(session, "auto")
    if not answer.tool_calls:
        if answer.finish == "tool_calls":
            raise failed("tool_finish_without_call", answer.text)
        return Found("tool_not_chosen", {}, (answer.text,))
    _check_calls(answer)
    if answer.finish != "tool_calls":
        raise failed("tool_finish", str(answer.tool_calls), got=answer.finish)
    return Found("tool_called", {}, (str(answer.tool_calls),))


def _ask_with_tool(session: Session, choice: object) -> Answer:
    most = session.settings.function.structured_tokens
    return ask(session.endpoint, user(QUESTION), max_tokens=most, tools=[TOOL], tool_choice=choice)


def tool_result(session: Session) -> Found:
    """A chat that holds a call and its result is understood by the chat template."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    chat: list[Message] = [
        *user(QUESTION),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"},
    ]
    answer = ask(session.endpoint, chat, max_tokens=session.settings.function.max_tokens, tools=[TOOL])
    if not (answer.everything.strip() or answer.tool_calls):
        raise failed("empty_answer", str(chat))
    return Found("tool_result_taken", {}, (answer.text,))


def _check_calls(answer: Answer) -> None:
    for name, arguments in answer.tool_calls:
        if name != "get_weather":
            raise failed("tool_unknown", str(answer.tool_calls), name=name)
        try:
            _Weather.model_validate_json(arguments)
        except ValidationError as error:
            raise failed("tool_arguments", arguments, what=error.errors()[0]["msg"]) from error


def structured_output(session: Session) -> Found:
    """An answer under a JSON schema keeps it."""
    answer = ask(
        session.endpoint,
        user("Is a cat a tame animal? Answer in JSON."),
        max_tokens=session.settings.function.structured_tokens,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": _Verdict.model_json_schema()},
        },
    )
    try:
        _Verdict.model_validate(json.loads(answer.text))
    except (ValueError, RecursionError) as error:  # pydantic's is a ValueError as well
        what = str(error).splitlines()[0]
        raise failed("structure_broken", answer.text, what=what, finish=answer.finish) from error
    return Found("structure_kept", {}, (answer.text,))
