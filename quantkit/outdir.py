"""The output folder of a long command: never the source, never somebody else's, always resumable.

`.quantkit-work/options.json` says what the folder is being filled with. The same options continue or, once the
command's last file is there, do nothing; other options are refused with the difference. Nothing that stands in the
folder beforehand is deleted. Several machines may start at the same moment: one of them records its options, all
compare theirs with what is recorded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError
from quantkit.spec.files import exists, is_file, is_folder, read_whole

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
                shutil.rmtree(item) if is_folder(item) else item.unlink()


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
    for place in (out, *out.parents):
        if os.path.islink(place) and not exists(place):  # noqa: PTH114  # as `exists`, for any name
            raise UsageError(
                f"{place} is a symbolic link to {place.readlink()}, which is not there",
                "make the folder that it points to, mount its disk, or give another folder",
            )
    if exists(out) and not is_folder(out):
        raise UsageError(f"{out} is a file", "give a folder that does not exist yet")
    recorded = recorded_options(out)
    if recorded is None:
        foreign = sorted(path.name for path in out.iterdir() if path.name != WORK_NAME) if exists(out) else []
        if foreign and recorded_options(out) is None:  # else another machine has just begun here
            raise UsageError(
                f"the output folder {out} is not empty and was not made by {command}",
                "give an empty or a new folder; quantkit deletes nothing",
                items=foreign,
            )
        _create(out, options)
        recorded = recorded_options(out)
    if recorded != json.loads(_canonical(options)):
        raise UsageError(
            f"{out} holds the work of {command} with other options",
            "use the same options again, or give another folder",
            items=_differences(recorded, json.loads(_canonical(options))),
        )
    return OutputFolder(out, options_digest(options), is_file(out / final))


@contextlib.contextmanager
def exclusive(out: OutputFolder) -> Iterator[None]:
    """Hold the folder for one process; the lock ends with the process, however it ends.

    Raises:
        UsageError: another process holds it, or parts of it.
    """
    with _locked(out, _LOCK, fcntl.LOCK_EX, f"another process is writing to {out.path}"):
        yield


@contextlib.contextmanager
def exclusive_part(out: OutputFolder, part: str) -> Iterator[None]:
    """Hold one part of the folder: other parts may be held at the same time, the whole folder may not.

    Raises:
        UsageError: another process holds this part or the whole folder.
    """
    with (
        _locked(out, _LOCK, fcntl.LOCK_SH, f"another process is writing to the whole of {out.path}"),
        _locked(out, f"{part}.{_LOCK}", fcntl.LOCK_EX, f"another process is writing {part} of {out.path}"),
    ):
        yield


@contextlib.contextmanager
def _locked(out: OutputFolder, name: str, how: int, busy: str) -> Iterator[None]:
    fd = os.open(out.work / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(busy, "wait until it has ended") from error
        except OSError as error:
            raise UsageError(
                f"{out.path} cannot be locked: {error.strerror or error}",
                "mount its file system with support for flock (Lustre: -o flock), or give a folder elsewhere",
            ) from error
        yield
    finally:
        os.close(fd)


def _create(out: Path, options: Mapping[str, Any]) -> None:
    try:
        (out / WORK_NAME).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be created: {error.strerror}", "check the path and its permissions") from error
    create_once(out / WORK_NAME / _OPTIONS, _canonical(options))


def create_once(path: Path, content: bytes) -> None:
    """Write a file that appears whole, unless it is there: of several processes at once, one wins."""
    from quantkit.checkpoint.writer import fsync_folder, write_atomic

    own = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    write_atomic(own, [content])
    try:
        path.hardlink_to(own)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        own.replace(path)
    own.unlink(missing_ok=True)
    fsync_folder(path.parent)


def recorded_options(out: Path) -> Any:
    """Options that `out` is being filled with, None when nothing has begun there.

    Raises:
        UsageError: the record is damaged.
    """
    try:
        return json.loads(read_whole(out / WORK_NAME / _OPTIONS))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{out / WORK_NAME / _OPTIONS} is unreadable: {error}", "give another folder") from error


def recorded_digest(out: Path) -> str:
    """`OutputFolder.options_digest` of what is recorded in `out`, "" when nothing is."""
    try:
        return hashlib.sha256(read_whole(out / WORK_NAME / _OPTIONS)).hexdigest()
    except OSError:
        return ""


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
