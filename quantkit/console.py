"""What every command line of this project shares: lazy commands, errors without traceback, progress, JSON output.

Human text goes to stderr when `--json` is given, so that stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from quantkit.errors import QuantkitError, printable

if TYPE_CHECKING:
    from rich.console import Console


INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells have it; after another signal 128 and its number."""

_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What schedulers, `kill` and a lost terminal send."""

_NO_WIDTH = 10_000
"""Columns of what is not a terminal: more than any row has."""

_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""A full or broken disk under anything that is written, stdout included."""


_C1 = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""Control characters, and halves of characters, that JSON leaves as they are."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command runs or its help is asked for."""

    def __init__(self, *, commands_by_module: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._modules = commands_by_module

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with expected_failures():
            return super().invoke(ctx)


class Ended(KeyboardInterrupt):
    """A signal that ends the process arrived: whatever cleans up after Ctrl-C does so after it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _ends_orderly() -> Iterator[None]:
    """Raise `Ended` on the signals of `_ENDING`, in the main thread; those that somebody handles or ignores stay so."""

    def end(number: int, _: FrameType | None) -> None:
        for other in ours:
            signal.signal(other, signal.SIG_DFL)  # a second one ends at once
        raise Ended(number)

    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDING if in_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def expected_failures() -> Iterator[None]:
    """Print an expected failure, or that a signal ended the command, without a traceback; exit with its code."""
    try:
        with _ends_orderly():
            yield
    except QuantkitError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Ended) else signal.SIGINT
        with suppress(OSError):  # after SIGHUP the terminal may be gone
            say("interrupted: what is finished is kept; run the same command again to continue")
        sys.exit(128 + number)
    except OSError as error:
        if error.errno not in _OUTPUT_FAILS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        say(f"error: {where}{error.strerror}\nnext: make room, then run the same command again")
        sys.exit(QuantkitError.exit_code)


def say(text: str) -> None:
    """Print text for a person on stderr."""
    click.echo(printable(text), err=True)


def quoted(path: object) -> str:
    """A path as a shell takes it, for commands that are shown to be copied."""
    return shlex.quote(str(path))


class FiniteRange(click.FloatRange):
    """A range that "nan" and "inf" do not slip through: comparisons with them are false, or true without a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def version_option(program: str, version: str) -> click.Option:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(f"{program} {version}")
            ctx.exit()

    return click.Option(
        ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=show, help="Show the version."
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def speaks() -> bool:
    """Whether this process prints: of several that `torchrun` started, the first does."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def console(as_json: bool = False) -> Console:
    """Console for human text: stdout, or stderr when stdout belongs to a JSON document; quiet unless it `speaks`.

    Tables fit a terminal; into a pipe or file each row is one line, however long, for grep and for logs.
    """
    found = _terminal()(stderr=as_json, highlight=False, soft_wrap=True, quiet=not speaks())
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _NO_WIDTH
    return found


@cache
def _terminal() -> type[Console]:
    """rich's Console for text that may hold anything: no markup, no emoji, control characters as escapes."""
    from rich.console import Console
    from rich.text import Text

    class Terminal(Console):
        def __init__(self, **options: Any) -> None:
            super().__init__(markup=False, emoji=False, **options)

        def render_str(self, text: str, **options: Any) -> Text:  # every string goes through here, of tables too
            return super().render_str(printable(text), **options)

    return Terminal


def print_json(value: Any) -> None:
    """The one JSON document of a command, with sorted keys; nothing unless this process `speaks`."""
    if not speaks():
        return
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    click.echo(_C1.sub(lambda found: f"\\u{ord(found[0]):04x}", text))  # JSON itself escapes only what is below a space


def print_sizes(sizes: Mapping[str, Any], as_json: bool, width: int = 14) -> None:
    """What a dry run found: JSON, or a line for each name, padded to `width`; names in `_bytes` count bytes."""
    from quantkit.memory import human_bytes

    if as_json:
        print_json(sizes)
        return
    out = console()
    for name, value in sizes.items():
        shown = human_bytes(value) if name.endswith("_bytes") else value
        if isinstance(value, Mapping):
            shown = ", ".join(f"{count} {what}" for what, count in value.items())
        shown = ", ".join(shown) if isinstance(shown, list) else shown
        out.print(f"{name.removesuffix('_bytes').replace('_', ' '):{width}} {shown}", markup=False)


class Progress:
    """A progress bar with rate and time left on stderr; silent when that is not a terminal.

    Long steps take one as a parameter and call `advance`; `unit` is "bytes" or a plural noun. Of several processes that
    do the same, all but one are `silent`.
    """

    def __init__(self, what: str, total: float, unit: str = "bytes", *, silent: bool = False) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and speaks() and not self._silent:
            from rich import progress

            is_bytes = self._unit == "bytes"
            amount = progress.DownloadColumn() if is_bytes else progress.MofNCompleteColumn()
            rate = progress.TransferSpeedColumn() if is_bytes else _rate_column(self._unit)
            columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), amount, rate)
            self._bar = progress.Progress(*columns, progress.TimeRemainingColumn(), console=_terminal()(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=amount)

    def describe(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what)


def _rate_column(unit: str) -> Any:
    """A column class made on use, so that rich is imported lazily."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f} {unit}/s" if task.speed else f"- {unit}/s")

    return Rate()
