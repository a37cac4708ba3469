"""Dimension "capability": a needle in long texts, and the user's own tasks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantkit.acceptance.endpoint import Endpoint
from quantkit.acceptance.outcome import Finding, Value, missed, skipped
from quantkit.acceptance.session import Found, Session
from quantkit.acceptance.talk import ask, user
from quantkit.errors import InputError
from quantkit.spec.files import read_whole

_TEMPLATE_TOKENS = 72
"""Room for the question and what a chat template adds."""
_QUESTION = "\n\nWhat is the access code of the blue lighthouse? Answer with the number only."


def needles(session: Session) -> Found:
    """A sentence at several depths of texts of several lengths is found again."""
    context = session.endpoint.context
    if context is None:
        raise skipped("context_unknown")
    settings = session.settings.capability
    per_line = _tokens_per_line(session.endpoint, session.settings.seed)
    rows, hits = [], 0
    for length in settings.lengths:
        lines = max(2, int((context * length - settings.answer_tokens - _TEMPLATE_TOKENS) / per_line))
        for depth in settings.depths:
            code = f"{random.Random(f'{session.settings.seed} {length} {depth}').randrange(10_000, 100_000)}"
            prompt = haystack(lines, depth, code, session.settings.seed) + _QUESTION
            answer = ask(session.endpoint, user(prompt), max_tokens=settings.answer_tokens)
            hit = code in answer.text
            hits += hit
            rows.append(
                f"{'found' if hit else 'MISSED'}: {answer.prompt_tokens} tokens, depth {depth:.0%}: {answer.text!r}"
            )
    return _judged(hits, len(rows), settings.min_needles, rows, "needles")


def haystack(lines: int, depth: float, code: str, seed: int) -> str:
    """Dull sentences with one that matters, at the share `depth` of the text; all as long as in short texts."""
    generator = random.Random(seed)
    text = [
        f"Note {index:06}: the harbour of {generator.choice(_PLACES)} has {generator.randrange(10, 99)} boats today."
        for index in range(1, lines)
    ]
    text.insert(round(depth * len(text)), f"Remember: the access code of the blue lighthouse is {code}.")
    return "\n".join(text)


_PLACES = ("Aberdeen", "Bergen", "Cadiz", "Dunkirk", "Esbjerg", "Falmouth", "Genoa", "Haifa", "Izmir", "Kobe")


def _tokens_per_line(endpoint: Endpoint, seed: int) -> float:
    """What a sentence of the text costs, by the server's own count of two texts."""
    few, many = (
        ask(endpoint, user(haystack(lines, 0.0, "10000", seed)), max_tokens=1).prompt_tokens for lines in (4, 12)
    )
    return max(1.0, (many - few) / 8)


class Task(BaseModel):
    """One line of a tasks file.

    Attributes:
        prompt, messages: one of both.
        contains: every string must stand in the answer.
        regex: must match somewhere in it.
        equals: must be the answer, spaces at its ends apart.
        max_tokens: of the answer.
        kind: for the summary.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    contains: tuple[str, ...] = ()
    regex: str = ""
    equals: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 128
    kind: str = "task"

    @model_validator(mode="after")
    def _one_of_each(self) -> Task:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("give `prompt` or `messages`")
        if not (self.contains or self.regex or self.equals is not None):
            raise ValueError("give `contains`, `regex` or `equals`")
        re.compile(self.regex)
        return self

    def solved(self, answer: str) -> bool:
        return (
            all(part in answer for part in self.contains)
            and (not self.regex or re.search(self.regex, answer) is not None)
            and (self.equals is None or self.equals.strip() == answer.strip())
        )


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a JSONL file.

    Raises:
        InputError: unreadable, empty, or lines that are no tasks (all listed).
    """
    try:
        lines = read_whole(path, pipes=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "give a JSONL file of tasks") from error
    tasks, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(Task.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            problems.append(f"line {number}: {'.'.join(map(str, first['loc'])) or 'task'}: {first['msg']}")
        except re.error as error:
            problems.append(f"line {number}: regex: {error}")
    if problems or not tasks:
        raise InputError(
            f"{path} holds {'lines that are no tasks' if problems else 'no tasks'}",
            'write one JSON object a line: {"prompt": "2+2=", "contains": ["4"]}',
            items=problems,
            choices=sorted(Task.model_fields),
        )
    return tasks


def tasks(session: Session) -> Found:
    """The user's tasks, judged by their own expectations."""
    if session.tasks is None:
        raise skipped("no_tasks")
    rows, hits = [], 0
    found = read_tasks(session.tasks)
    for task in found:
        messages = list(task.messages) or user(task.prompt)
        answer = ask(session.endpoint, messages, max_tokens=task.max_tokens)
        solved = task.solved(answer.text)
        hits += solved
        if not solved:
            rows.append(f"{task.kind}: {json.dumps(messages[-1], ensure_ascii=False)} -> {answer.text!r}")
    return _judged(hits, len(found), session.settings.capability.min_tasks, rows, "tasks")


def _judged(hits: int, total: int, least: float, rows: Sequence[str], what: str) -> Found:
    measured = {"solved": float(hits), "of": float(total)}
    if hits < least * total:
        values: dict[str, Value] = {"got": hits, "total": total, "wanted": f"{least:.0%}"}
        raise missed([Finding(key=f"{what}_missed", values=values)], measured, *rows)
    return Found(f"{what}_found", {"got": hits, "total": total}, tuple(rows), measured)
