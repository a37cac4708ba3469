"""The yardstick: copy a folder with fsync, then hash the source and an output with hashlib, by a number of threads.

    python tests/bench/copy_and_hash.py SOURCE COPY --hash OUTPUT --threads 2

Any converter must read the source and write an output, and ours also says what it read and wrote. The last line is a
JSON object with the seconds of each step. Without COPY ("-") only hashing is timed. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 4 << 20


def copy(source: Path, target: Path) -> None:
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while count := reader.readinto(view):
            done = 0
            while done < count:
                done += writer.write(view[done:count])
        os.fsync(writer.fileno())


def digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256", _bufsize=CHUNK).hexdigest()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def timed(threads: int, function: Callable[..., object], *columns: Iterable[Path]) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, *columns))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("copy", help="new folder, or - to copy nothing")
    parser.add_argument("--hash", type=Path, nargs="*", default=[], help="further folders to hash")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    seconds: dict[str, float] = {}
    found = files(args.source)
    if args.copy != "-":
        target = Path(args.copy)
        target.mkdir(parents=True)
        seconds["copy"] = timed(args.threads, copy, found, [target / path.name for path in found])
    seconds["hash_source"] = timed(args.threads, digest, found)
    if args.hash:
        seconds["hash_output"] = timed(args.threads, digest, [path for folder in args.hash for path in files(folder)])
    print(json.dumps({"seconds": sum(seconds.values()), "steps": seconds}))


if __name__ == "__main__":
    main()
