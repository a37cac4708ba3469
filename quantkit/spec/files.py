"""Files that others wrote: read whole within a bound, and named only inside their folder.

What a file names (an index, a manifest, an artifact's summary) never leads out of its folder: no absolute name, no
`..`. Links are another matter, since whoever made the folder on this machine made them: they are followed for
reading, as the Hub's cache is nothing but links, while `leads_out` says which ones nothing is copied through.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from quantkit.errors import InputError

MAX_JSON_BYTES = 512 * 2**20
"""Bound on what a machine wrote, config, index or record: an index of 500,000 tensors takes about 60 MB."""

MAX_SETTINGS_BYTES = 2**20
"""Bound on what a person wrote: recipes, limits, a chat template."""


def open_bounded(path: Path, most: int = MAX_JSON_BYTES, *, pipes: bool = False) -> BinaryIO:
    """A file, to be read from its start.

    Args:
        most: bytes that it may have.
        pipes: it may be a pipe, as a shell makes of `<(...)`, of any length: for files that a user names.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    found = os.fstat(fd)
    problem, why = 0, ""
    if stat.S_ISDIR(found.st_mode):
        problem, why = errno.EISDIR, os.strerror(errno.EISDIR)
    elif not stat.S_ISREG(found.st_mode) and not (pipes and stat.S_ISFIFO(found.st_mode)):
        problem, why = errno.EINVAL, "It is a pipe or device, not a file"
    elif found.st_size > most:
        problem, why = errno.EFBIG, f"It has {found.st_size:,} bytes, more than {most:,}"
    if problem:
        os.close(fd)
        raise OSError(problem, why, str(path))
    return os.fdopen(fd, "rb")


def read_whole(path: Path, most: int = MAX_JSON_BYTES, *, pipes: bool = False) -> bytes:
    """The bytes of a file; arguments and errors as of `open_bounded`, whose bound holds for a pipe too."""
    with open_bounded(path, most, pipes=pipes) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"It has more than {most:,} bytes", str(path))
    return raw


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, for reading; a pipe or a device is refused without waiting for it.

    Raises:
        InputError: it is missing, may not be read, or is not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path}: {reason}", "check the path, its permissions and that the copy is complete"
        ) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise InputError(f"{path} is {what}, not a file", "check that the copy is complete")
    return fd


def file_sha256(path: Path) -> str:
    """sha256 of a file, hex.

    Raises:
        InputError: it cannot be read.
    """
    fd = open_regular(path)
    try:
        with os.fdopen(fd, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", "copy the file again") from error


def is_file(path: Path) -> bool:
    """Whether a file is there. A name that no file can have is that of none, be it too long or not text: methods of
    `Path` raise for some of these before Python 3.14, and whoever names a file may name anything."""
    return os.path.isfile(path)  # noqa: PTH113  # see above


def is_folder(path: Path) -> bool:
    """Whether a folder is there; names as for `is_file`."""
    return os.path.isdir(path)  # noqa: PTH112  # see above


def exists(path: Path) -> bool:
    """Whether anything is there; names as for `is_file`."""
    return os.path.exists(path)  # noqa: PTH110  # see above


def is_inside(name: str) -> bool:
    """Whether a name that a file gives, `/` between folders, stays inside the folder and can be that of a file."""
    path = PurePosixPath(name)
    return bool(path.name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def leads_out(root: Path, path: Path) -> bool:
    """Whether a file of the folder `root` lies elsewhere, by its own link or that of a folder above it.

    A snapshot of the Hub's cache (`models--NAME/snapshots/REVISION`) consists of links to `models--NAME/blobs`, which
    count as inside.
    """
    home, found = root.resolve(), path.resolve()
    inside = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    return not any(folder in found.parents for folder in inside)
