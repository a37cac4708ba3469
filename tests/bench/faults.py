"""Faults at scale: a conversion killed at random moments, and a converted folder damaged one bit at a time.

    python tests/bench/faults.py [--small] [--kills 100] [--flips 1000] [--seed 0]

kills: SIGKILL after a delay drawn from the measured duration of the conversion, then the same command again, and so on;
when one ends before its signal, the next starts in a new folder. Most run in a process forked from this one, so that
the delays fall into the work and not into the start of the interpreter; every fifth is the whole command with two
workers. After every kill all files under a final name must equal those of the undisturbed run; so must the folder at
its end.

flips: one bit of one file of a converted folder (weights, index, config, manifest, tokenizer, options), then `verify`,
which must name the file, and for a bit of a tensor's data the tensor, and no other file. Half of the bits are drawn
over all bytes, half over files first, so that small files get their share. Then every file truncated, with bytes
appended, and all pairs of equal size swapped.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch

from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.outdir import WORK_NAME
from quantkit.recipe import load_recipe
from quantkit.spec.manifest import manifest_path, read_manifest
from quantkit.spec.mesh import Mesh

MODEL = common.ROOT / "tests" / "models" / "tiny-minimax-m2"
SHARD_BYTES = 700_000
MESH = Mesh(tp=2, pp=2, ep=2)
FORMS = ("checkpoint", "sharded")
COMMAND_EVERY = 5


def make(form: str, out: Path) -> None:
    options: dict[str, Any] = {"form": "sharded", "mesh": MESH} if form == "sharded" else {}
    convert(MODEL, out, load_recipe("w8a8"), jobs=1, max_shard_bytes=SHARD_BYTES, **options)


def digests(folder: Path) -> dict[str, str]:
    """Final name -> sha256; neither the work folder nor temporary files are final."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith((WORK_NAME, ".")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


# --------------------------------------------------------------------------------------------------- kills


class Forked:
    """The conversion in a child of this process."""

    def __init__(self, out: Path) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            try:
                make("checkpoint", out)
            except BaseException:
                os._exit(1)
            os._exit(0)

    def kill_after(self, delay: float) -> bool:
        """Whether it was killed; else it had ended by itself."""
        time.sleep(delay)
        os.kill(self._pid, signal.SIGKILL)
        return was_killed(self._code())

    def wait(self) -> None:
        if code := self._code():
            raise SystemExit(f"error: the conversion ended with {code}")

    def _code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class Command:
    """`quantkit convert` with two workers."""

    def __init__(self, out: Path) -> None:
        words = [*common.QUANTKIT, "convert", str(MODEL), "-o", str(out), "--jobs", "2"]
        words += ["--max-shard-size", str(SHARD_BYTES)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(words, stdout=quiet, stderr=quiet, env={**os.environ, **common.OFFLINE})

    def kill_after(self, delay: float) -> bool:
        time.sleep(delay)
        self._process.kill()
        return was_killed(self._process.wait())

    def wait(self) -> None:
        if code := self._process.wait():
            raise SystemExit(f"error: the command ended with {code}")


def was_killed(code: int) -> bool:
    """Of an exit code; a conversion that fails on its own is a result that nobody may count as an end."""
    if code > 0:
        raise SystemExit(f"error: a conversion that was killed before ended with {code}")
    return code < 0


def stage(out: Path) -> str:
    """How far a killed conversion had come."""
    if manifest_path(out):
        return "after the manifest"
    if list(out.glob(".*tmp")):
        return "while a file was written"
    return "between files" if digests(out) else "before the first file"


def duration(kind: type[Forked] | type[Command], out: Path) -> float:
    start = time.perf_counter()
    kind(out).wait()
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def kills(work: Path, count: int, draw: random.Random) -> dict[str, Any]:
    make("checkpoint", fresh(work / "undisturbed"))
    whole = digests(work / "undisturbed")
    kinds: list[type[Forked] | type[Command]] = [Forked, Command]
    seconds = {kind: duration(kind, fresh(work / "timed")) for kind in kinds}
    out, number = fresh(work / "killed-0"), 0
    stages: Counter[str] = Counter()
    half_written, wrong_ends, ends = [], [], 0
    while sum(stages.values()) < count:
        kind = Command if sum(stages.values()) % COMMAND_EVERY == COMMAND_EVERY - 1 else Forked
        if kind(out).kill_after(draw.uniform(0, seconds[kind])):
            stages[stage(out) if out.exists() else "before the first file"] += 1
            half_written += [f"{out.name}: {n}" for n, digest in digests(out).items() if whole.get(n) != digest]
            continue
        ends += 1
        wrong_ends += [] if digests(out) == whole else [out.name]
        shutil.rmtree(out)
        number += 1
        out = fresh(work / f"killed-{number}")
    Forked(out).wait()
    wrong_ends += [] if digests(out) == whole and not list(out.rglob(".*tmp")) else [out.name]
    return {
        "kills": count,
        "seconds_undisturbed": {kind.__name__.lower(): value for kind, value in seconds.items()},
        "killed": dict(stages),
        "ran_to_the_end": ends + 1,
        "files_half_written": half_written,
        "ends_that_differ": wrong_ends,
    }


# ----------------------------------------------------------------------------------------------- damage


class Damaged:
    """A converted folder to damage and restore, and what `verify` should say about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        path = manifest_path(folder)
        assert path is not None
        self._manifest, self._tensors = path, read_manifest(path).tensors

    def spots(self, count: int, draw: random.Random) -> Iterator[tuple[Path, int, int]]:
        """(file, position, bit)."""
        sizes = [path.stat().st_size for path in self.files]
        ends = list(itertools.accumulate(sizes))
        for index in range(count):
            if index % 2:
                at = draw.randrange(ends[-1])
                chosen = bisect.bisect_right(ends, at)
                yield self.files[chosen], at - (ends[chosen] - sizes[chosen]), draw.randrange(8)
            else:
                chosen = draw.randrange(len(sizes))
                yield self.files[chosen], draw.randrange(sizes[chosen]), draw.randrange(8)

    def tensor_at(self, path: Path, position: int) -> str:
        name = path.relative_to(self.folder).as_posix()
        for row in self._tensors:
            if row.file == name and not row.alias and row.offset <= position < row.offset + row.nbytes:
                return row.name
        return ""

    def missed(self, path: Path, tensor: str = "", others: tuple[Path, ...] = ()) -> str:
        """What `verify` fails to say now; "" when it names the file (and tensor), and no sound file as changed."""
        failures = verify(self.folder, jobs=1).failures
        name = path.relative_to(self.folder).as_posix()
        if not failures:
            return "nothing found"
        if not any(name in failure for failure in failures):
            return f"file not named: {failures[0]}"
        if tensor and not any(f"{name}: {tensor}: its bytes changed" in failure for failure in failures):
            return f"tensor {tensor} not named: {failures[0]}"
        damaged = {name, *(other.relative_to(self.folder).as_posix() for other in others)}
        for failure in failures:
            accused = failure.partition(": ")[2].partition(":")[0] if "its bytes changed" in failure else ""
            if accused and accused not in damaged:
                return f"a sound file is accused: {failure}"
        return ""

    def row(self, path: Path, what: str, missed: str) -> dict[str, str]:
        return {"file": path.relative_to(self.folder).as_posix(), "what": what, "missed": missed}

    def flips(self, count: int, draw: random.Random) -> Iterator[dict[str, str]]:
        for path, position, bit in self.spots(count, draw):
            flip(path, position, bit)
            tensor = self.tensor_at(path, position)
            yield self.row(path, f"bit {bit} of byte {position} {tensor}".rstrip(), self.missed(path, tensor))
            flip(path, position, bit)

    def cuts_and_tails(self) -> Iterator[dict[str, str]]:
        for path in self.files:
            whole = path.read_bytes()
            for what, changed in (
                ("last byte lost", whole[:-1]),
                ("half lost", whole[: len(whole) // 2]),
                ("empty", b""),
                ("a zero byte appended", whole + b"\0"),
                ("a newline appended", whole + b"\n"),
                ("a block of zeros appended", whole + bytes(4096)),
            ):
                path.write_bytes(changed)
                yield self.row(path, what, self.missed(path))
            path.write_bytes(whole)

    def swaps(self) -> Iterator[dict[str, str]]:
        for one, two in itertools.combinations(self.files, 2):
            first, second = one.read_bytes(), two.read_bytes()
            if len(first) != len(second) or first == second:
                continue
            for contents in ((second, first), (first, second)):
                one.write_bytes(contents[0])
                two.write_bytes(contents[1])
                if contents[0] is second:
                    missed = self.missed(one, others=(two,)) or self.missed(two, others=(one,))
                    yield self.row(one, f"swapped with {two.name}", missed)


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def damage(work: Path, form: str, flips: int, draw: random.Random) -> dict[str, Any]:
    folder = fresh(work / form)
    make(form, folder)
    target = Damaged(folder)
    found: dict[str, Any] = {"files": len(target.files)}
    for kind, rows in (
        ("bit flips", target.flips(flips, draw)),
        ("cuts and tails", target.cuts_and_tails()),
        ("swaps", target.swaps()),
    ):
        tried = list(rows)
        suffixes = Counter(Path(row["file"]).suffix or row["file"] for row in tried)
        found[kind] = {
            "tried": len(tried),
            "by_suffix": dict(suffixes),
            "missed": [row for row in tried if row["missed"]],
        }
    found["sound_at_the_end"] = verify(folder, jobs=1).passed
    return found


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--kills", type=int, help="SIGKILLs (100; small: 20)")
    parser.add_argument("--flips", type=int, help="bit flips, half of them in each form (1000; small: 200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.kills = (20 if args.small else 100) if args.kills is None else args.kills
    args.flips = (200 if args.small else 1000) if args.flips is None else args.flips
    report = common.Report("faults", args.small, {key: getattr(args, key) for key in ("kills", "flips", "seed")})
    work = args.work / "faults"
    table: list[list[Any]] = []
    if args.kills:
        outcome = report.data["kills"] = kills(work, args.kills, random.Random(args.seed))
        wrong = len(outcome["files_half_written"]) + len(outcome["ends_that_differ"])
        table += [[f"killed {when}", times, ""] for when, times in sorted(outcome["killed"].items())]
        table.append(["ran to the end, byte-identical", outcome["ran_to_the_end"], len(outcome["ends_that_differ"])])
        report.target("half-written files and ends that differ", wrong, 0)
    for form in FORMS:
        outcome = report.data[form] = damage(work, form, args.flips // 2, random.Random(args.seed))
        for kind in ("bit flips", "cuts and tails", "swaps"):
            table.append([f"{form}: {kind}", outcome[kind]["tried"], len(outcome[kind]["missed"])])
            report.target(f"{form}: {kind} not found or not named", len(outcome[kind]["missed"]), 0)
            for row in outcome[kind]["missed"]:
                print(f"  missed: {row['file']}, {row['what']}: {row['missed']}")
        if not outcome["sound_at_the_end"]:
            raise SystemExit(f"error: the {form} was not restored; its figures mean nothing")
    common.table(["fault", "times", "missed or wrong"], table)
    shutil.rmtree(work, ignore_errors=True)
    report.write()
    if any(not row["met"] for row in report.data["targets"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
