"""One request as the checks see it: an answer whose form was checked, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.acceptance.endpoint import BAD_FORM, Endpoint
from quantkit.acceptance.outcome import failed

Message = Mapping[str, Any]

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Of the API reference of chat completions."""

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Options of a request for a stream that counts its tokens."""


@dataclass
class Answer:
    """Attributes:
    text: content.
    reasoning: what a model says to itself first, where the server tells it apart.
    finish: reason.
    prompt_tokens, completion_tokens: as the server counted; -1 when a stream did not say.
    tool_calls: (name, arguments as JSON text).
    """

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1
    tool_calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def everything(self) -> str:
        """Reasoning and content."""
        return self.reasoning + self.text


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Reasoning in a message or a piece of one, under the names that vLLM and SGLang use; raises as `_text`."""
    return _text(message.get("reasoning_content") or message.get("reasoning"))


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def request(endpoint: Endpoint, messages: Sequence[Message], *, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Arguments of the client for a greedy answer to a chat; an option replaces what stands here."""
    return {
        "model": endpoint.model,
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "extra_body": endpoint.extra_body,
        **options,
    }


def ask(endpoint: Endpoint, messages: Sequence[Message], *, max_tokens: int, **options: Any) -> Answer:
    """Greedy answer to a chat.

    Raises:
        Stopped: the answer has not the form of the API.
        openai.APIError: the server refused or failed.
    """
    create = endpoint.client.chat.completions.with_raw_response.create
    raw = create(**request(endpoint, messages, max_tokens=max_tokens, **options))
    body = _json(raw.text)
    try:
        choice = body["choices"][0]
        message = choice["message"]
        usage = body["usage"]
        answer = Answer(
            text=_text(message.get("content")),
            reasoning=reasoning_of(message),
            finish=_text(choice["finish_reason"]),
            prompt_tokens=int(usage["prompt_tokens"]),
            completion_tokens=int(usage["completion_tokens"]),
            tool_calls=[
                (_text(call["function"]["name"]), _text(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            ],
        )
    except BAD_FORM as error:
        raise failed("malformed_answer", raw.text, what=repr(error)) from error
    _check(answer, max_tokens, raw.text)
    return answer


def ask_streamed(endpoint: Endpoint, messages: Sequence[Message], *, max_tokens: int, **options: Any) -> Answer:
    """The same as `ask`, as a stream of server-sent events whose protocol is checked line by line."""
    create = endpoint.client.chat.completions.with_streaming_response.create
    asked = request(endpoint, messages, max_tokens=max_tokens, **STREAMED, **options)
    with create(**asked) as response:
        return parse_stream(response.iter_lines(), max_tokens)


def parse_stream(lines: Iterable[str], max_tokens: int) -> Answer:
    """Answer of an event stream.

    Raises:
        Stopped: an event that is no JSON, no or several finish reasons, content after the end, no `[DONE]`.
    """
    answer, seen, done = Answer(), [], False
    for line in lines:
        if not line or line.startswith(":"):
            continue
        seen.append(line)
        if done:
            raise failed("stream_after_done", *seen[-2:])
        if not line.startswith("data:"):
            if line.partition(":")[0] in ("event", "id", "retry"):
                continue
            raise failed("stream_no_event", line)
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            done = True
        else:
            _add_event(answer, _json(payload), line)
    if not answer.finish:
        raise failed("stream_truncated", *seen[-2:])
    if not done:
        raise failed("stream_no_done", *seen[-2:])
    _check(answer, max_tokens, "\n".join(seen[-3:]))
    return answer


def _add_event(answer: Answer, event: Any, line: str) -> None:
    try:
        if usage := event.get("usage"):
            answer.prompt_tokens = int(usage["prompt_tokens"])
            answer.completion_tokens = int(usage["completion_tokens"])
        for choice in event["choices"]:
            content, reasoning = _text(choice["delta"].get("content")), reasoning_of(choice["delta"])
            if answer.finish and (content or reasoning or choice.get("finish_reason")):
                raise failed("stream_after_finish", line)
            answer.text += content
            answer.reasoning += reasoning
            answer.finish = _text(choice.get("finish_reason")) or answer.finish
    except BAD_FORM as error:
        raise failed("malformed_answer", line, what=repr(error)) from error


def _text(value: object) -> str:
    """A string of an answer, or "" for none.

    Raises:
        TypeError: something else stands there.
        ValueError: half of a character, which no report can hold.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    value.encode()
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise failed("no_json", text) from error


def _check(answer: Answer, max_tokens: int, evidence: str) -> None:
    if answer.finish not in FINISH_REASONS:
        raise failed("finish_unknown", evidence, got=str(answer.finish))
    if answer.completion_tokens > max_tokens:
        raise failed("too_many_tokens", evidence, got=answer.completion_tokens, wanted=max_tokens)
    if answer.completion_tokens >= 0 and (answer.finish == "length") != (answer.completion_tokens == max_tokens):
        # A stop token may be the last one that was allowed, so `stop` at the bound is right as well.
        if answer.finish in ("stop", "tool_calls") and answer.completion_tokens == max_tokens:
            return
        raise failed("finish_wrong", evidence, got=answer.finish, tokens=answer.completion_tokens, wanted=max_tokens)
