"""What one case of the fuzzer may do, and how it is watched: no traceback, no hang, bounded memory, no way out.

A case may return or raise a `QuantkitError`. A finding is anything else: another exception, more seconds of this
process' own computing or of waiting than a limit, more memory than a limit, a file opened in the bait folder or
written outside the case's own folder, code of the case's files executed, a pickle loaded, a process or a connection
started.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from tests.fuzz.mutate import BAIT

GIB = 2**30
MAX_ADDRESS_SPACE = 8 * GIB
"""Beyond what the process has mapped when a case begins: what is asked for beyond it is refused, not merely counted."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NEVER = ("/etc/passwd", "/etc/shadow", "/dev/zero")
_MAY_BE_WRITTEN = (
    "/dev/null",
    "/proc/self/",
    str(Path.home() / ".cache/huggingface"),
    f"{tempfile.gettempdir()}/quantkit-",
)
"""The last two: where the `datasets` library notes what it reads."""
_CHANGES = frozenset({"os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.symlink", "os.link", "os.truncate"})
_FORBIDDEN = frozenset({"pickle.find_class", "marshal.load", "os.system", "os.exec", "os.posix_spawn"})
_PROCESSES = frozenset({"subprocess.Popen", "os.fork"})


@dataclass(frozen=True)
class Limits:
    """Of one case: seconds of computing, seconds in all without those for which others had the processor, bytes of
    memory beyond what was there before."""

    cpu_s: float = 20.0
    wall_s: float = 120.0
    memory: int = 1 * GIB


@dataclass(frozen=True)
class Finding:
    """A case that went wrong. `python -m tests.fuzz PARSER --seed SEED` runs it again."""

    parser: str
    seed: int
    kind: str
    detail: str


class TooSlow(BaseException):
    """Not an Exception: code under test catches those."""


@dataclass
class _Watch:
    """What the audit hook compares with while a case runs."""

    folder: str = ""
    bait: str = ""
    may_spawn: bool = False
    seen: list[str] = field(default_factory=list)


_watch: _Watch | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is None or len(watch.seen) > 8:
        return
    if event == "open":
        path, _, flags = arguments
        written = isinstance(flags, int) and bool(flags & _WRITES)
        _opened(watch, path, written)
    elif event in _CHANGES and isinstance(arguments[-1], int) and arguments[-1] != -1:
        pass  # relative to a folder that was opened before
    elif event in ("os.listdir", "os.scandir") or event in _CHANGES:
        for path in arguments[:2] if event in ("os.rename", "os.symlink", "os.link") else arguments[:1]:
            _opened(watch, path, event in _CHANGES)
    elif event == "exec":
        name = getattr(arguments[0], "co_filename", "")
        if isinstance(name, str) and name.startswith(watch.folder):
            watch.seen.append(f"ran code of {name}")
    elif event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] != "127.0.0.1":
        watch.seen.append(f"connected to {arguments[1]}")
    elif event == "subprocess.Popen" and "quantkit.templates" in str(arguments[1]):
        pass  # renders chat templates, within bounds
    elif event in _FORBIDDEN or (event in _PROCESSES and not watch.may_spawn):
        watch.seen.append(f"{event}{arguments!r}"[:200])


def _opened(watch: _Watch, name: Any, written: bool) -> None:
    if not isinstance(name, str | bytes):  # a descriptor
        return
    path = os.fsdecode(name)
    place = os.path.normpath(path if path.startswith("/") else f"{Path.cwd()}/{path}")
    if place.startswith(watch.bait) or place in _NEVER:
        watch.seen.append(f"opened {place}")
    elif written and not place.startswith((watch.folder, *_MAY_BE_WRITTEN)) and "__pycache__" not in place:
        watch.seen.append(f"wrote {place}")


@contextmanager
def _watching(folder: Path, *, may_spawn: bool) -> Iterator[list[str]]:
    global _watch, _hooked
    if not _hooked:  # a hook stays for the life of the process
        sys.addaudithook(_audit)
        _hooked = True
    own = str(folder.resolve())
    _watch = _Watch(own, str(folder.resolve().parent / BAIT), may_spawn)
    try:
        yield _watch.seen
    finally:
        _watch = None


@contextmanager
def _timed(limits: Limits) -> Iterator[None]:
    begun, queued = time.monotonic(), queued_s()

    def late(number: int, _: Any) -> None:
        left = limits.wall_s - (time.monotonic() - begun - (queued_s() - queued))
        if number == signal.SIGALRM and left > 0:  # other processes had the processor
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
            return
        raise TooSlow("computed" if number == signal.SIGPROF else "waited")

    old = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in old.items():
            signal.signal(number, handler)


def queued_s(process: int | str = "self") -> float:
    """Seconds for which a process was ready to run and others had the processor (proc(5), schedstat); 0 if unknown."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _status(name: str) -> int:
    """A size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = _status("VmSize") + MAX_ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak() -> int:
    """Forget the peak of resident memory (proc(5), clear_refs); what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def run_case(
    parser: str, seed: int, folder: Path, case: Callable[[], object], limits: Limits, *, may_spawn: bool = False
) -> Finding | None:
    """Run one case in this process; what went wrong, None when nothing did.

    Args:
        folder: the case's own; a folder `BAIT` stands beside it.
        may_spawn: the code under test starts a process of its own for foreign code.
    """
    before = _reset_peak()
    kind, detail = "", ""
    with _watching(folder, may_spawn=may_spawn) as seen:
        try:
            with _bounded_memory(), _timed(limits):
                case()
        except QuantkitError as error:
            if not error.message.strip() or len(str(error)) > 2**20:
                kind, detail = "message", f"of {len(str(error))} characters"
        except TooSlow as late:
            kind, detail = "time", f"{late} too long\n{_where(late)}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            said = str(error).replace(str(folder), folder.name)[:300]
            kind, detail = "exception", f"{type(error).__name__}: {said}\n{_where(error)}"
    if not kind and seen:
        kind, detail = "escape", "; ".join(seen)
    grown = _status("VmHWM") - before
    if not kind and grown > limits.memory:
        kind, detail = "memory", f"{grown / GIB:.2f} GiB"
    return Finding(parser, seed, kind, detail) if kind else None


def _where(error: BaseException) -> str:
    """The last frames, by the ends of their files' names: results hold no absolute paths."""
    frames = traceback.extract_tb(error.__traceback__)[-7:]
    return "\n".join(f"  {'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in frames)


faulthandler.enable()
