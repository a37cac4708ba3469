"""The output folder of a long command: never the source, never somebody else's, always resumable.

`.quantkit-work/options.json` says what the folder is being filled with. The same options continue or, once the
command's last file is there, do nothing; other options are refused with the difference. Nothing that stands in the
folder beforehand is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError

WORK_NAME = ".quantkit-work"
_OPTIONS = "options.json"
_LOCK = "lock"


@dataclass(frozen=True)
class OutputFolder:
    """A prepared output folder.

    Attributes:
        path: the folder.
        options_digest: sha256 of the options as canonical JSON.
        finished: the command's last file was already there; there is nothing to do.
    """

    path: Path
    options_digest: str
    finished: bool

    @property
    def work(self) -> Path:
        """Scratch folder for journals and partial results."""
        return self.path / WORK_NAME

    def clear_work(self) -> None:
        """Drop the scratch data of a finished command; the options stay, so that other ones are still refused."""
        for item in self.work.iterdir():
            if item.name not in (_OPTIONS, _LOCK):
                shutil.rmtree(item) if item.is_dir() else item.unlink()


def options_digest(options: Mapping[str, Any]) -> str:
    """sha256 over the canonical JSON of `options`."""
    return hashlib.sha256(_canonical(options)).hexdigest()


def check_place(out: Path, source: Path) -> None:
    """Refuse an output that is the source, or lies inside it, or around it; symbolic links are resolved.

    Raises:
        UsageError: it does.
    """
    here, there = out.resolve(), source.resolve()
    where = {here == there: "is", there in here.parents: "lies inside", here in there.parents: "contains"}.get(True)
    if where:
        raise UsageError(f"the output folder {out} {where} the source {source}", "choose a folder outside the source")


def prepare_output(
    out: Path, options: Mapping[str, Any], *, sources: Sequence[Path] = (), final: str, command: str = "this command"
) -> OutputFolder:
    """Create or continue an output folder.

    Args:
        options: everything that decides the bytes of the output, JSON values; no absolute paths.
        sources: folders that are read.
        final: name of the file that the command writes last.
        command: for messages.

    Raises:
        UsageError: the place is illegal, the folder holds foreign files or the work of other options.
    """
    for source in sources:
        check_place(out, source)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "give a folder that does not exist yet")
    recorded = _recorded_options(out)
    if recorded is None:
        foreign = sorted(path.name for path in out.iterdir() if path.name != WORK_NAME) if out.exists() else []
        if foreign:
            raise UsageError(
                f"the output folder {out} is not empty and was not made by {command}",
                "give an empty or a new folder; quantkit deletes nothing",
                items=foreign,
            )
        _create(out, options)
    elif recorded != json.loads(_canonical(options)):
        raise UsageError(
            f"{out} holds the work of {command} with other options",
            "use the same options again, or give another folder",
            items=_differences(recorded, json.loads(_canonical(options))),
        )
    return OutputFolder(out, options_digest(options), (out / final).is_file())


@contextlib.contextmanager
def exclusive(out: OutputFolder) -> Iterator[None]:
    """Hold the folder for one process; the lock ends with the process, however it ends.

    Raises:
        UsageError: another process holds it.
    """
    fd = os.open(out.work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another process is writing to {out.path}", "wait until it has ended") from error
        yield
    finally:
        os.close(fd)


def _create(out: Path, options: Mapping[str, Any]) -> None:
    from quantkit.checkpoint.writer import write_atomic

    try:
        (out / WORK_NAME).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be created: {error.strerror}", "check the path and its permissions") from error
    write_atomic(out / WORK_NAME / _OPTIONS, [_canonical(options)])


def _recorded_options(out: Path) -> Any:
    try:
        return json.loads((out / WORK_NAME / _OPTIONS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{out / WORK_NAME / _OPTIONS} is unreadable: {error}", "give another folder") from error


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """One line per key whose value differs, nested keys joined by dots."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in sorted(old.keys() | new.keys()):
            lines += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if old == new else [f"{path}: {json.dumps(old)} there, {json.dumps(new)} now"]


def _canonical(options: Mapping[str, Any]) -> bytes:
    return (json.dumps(options, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
