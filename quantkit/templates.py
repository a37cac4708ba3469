"""Chat templates, rendered: they are programs of whoever published the model.

transformers renders them in jinja2's sandbox, which keeps them from files and from Python's inside, but not from
running for ever or filling the memory. So a process of its own renders them, with a bound on both, and dies alone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 10
"""Of computing that one rendering may take; usual ones take a millisecond."""
MEMORY = 2**30
"""Bytes that renderings may take beyond what the process has at its start."""
MAX_TEXT = 16 * 2**20
"""Characters of a rendered conversation."""


class TemplateFailure(Exception):
    """A template that cannot be rendered; says why."""


def render(template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, Any], *, generate: bool) -> str:
    """The prompt of a conversation, as transformers renders it; the date that a template may ask for is fixed.

    Args:
        tokens: special tokens by name.
        generate: up to where the model begins to answer.

    Raises:
        TemplateFailure: it raises an error, takes too long or too much memory.
    """
    wanted = {"template": template, "messages": list(messages), "tokens": dict(tokens), "generate": generate}
    try:
        line = json.dumps(wanted, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise TemplateFailure(f"the conversation is no plain data: {error}") from error
    answer = _renderer.ask(line)
    if "text" not in answer:
        raise TemplateFailure(answer["error"])
    return str(answer["text"])


class _Renderer:
    """The process, started when it is needed first and again after each death."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, line: str) -> dict[str, Any]:
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                if answer := process.stdout.readline():
                    return dict(json.loads(answer))
            except BrokenPipeError:
                pass
            self._process = None
            code = process.wait()
        late = code == -signal.SIGPROF
        return {
            "error": f"it takes more than {self._seconds} seconds" if late else f"it ends its process (code {code})"
        }

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid():  # a fork shares the pipes of its parent
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from quantkit.templates import serve; serve({self._seconds})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
            )
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._process.kill()
                self._process.wait()


_renderer = _Renderer()
atexit.register(_renderer.close)


# ------------------------------------------------------------------------------------------ in its process


def serve(seconds: int) -> None:
    """Answer lines of JSON on stdin until it ends, each with so many seconds of computing."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the command decides what ends
    render_one = _transformers_rendering()
    with open("/proc/self/statm", encoding="ascii") as sizes:  # noqa: PTH123  # pathlib reads it no better
        mapped = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles SIGPROF: it ends the process, whatever that does
        try:
            answer = {"text": render_one(json.loads(line))}
            if len(answer["text"]) > MAX_TEXT:
                answer = {"error": f"it makes {len(answer['text']):,} characters of a short conversation"}
        except Exception as error:  # a template raises what its expressions raise
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _transformers_rendering() -> Any:
    from datetime import datetime

    import transformers.utils.chat_template_utils

    utils: Any = transformers.utils.chat_template_utils

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Fixed:
            return cls(2000, 1, 1)

    utils.datetime = Fixed  # templates that print the date would give other samples and prompts every day

    def render_one(wanted: Mapping[str, Any]) -> str:
        rendered = utils.render_jinja_template(
            conversations=[wanted["messages"]],
            chat_template=wanted["template"],
            add_generation_prompt=wanted["generate"],
            **wanted["tokens"],
        )
        return str(rendered[0][0])  # texts, and indices that nobody asked for

    return render_one
