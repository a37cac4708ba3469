"""What the benchmarks share: running a command and watching its memory, the page cache, results with their machine.

Scripts here run as `python tests/bench/NAME.py` from anywhere; each takes `--small` for a trial of minutes, whose
results go beside the scratch files and not to tests/bench/results. No absolute path and no host name reaches a result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
SCRATCH = ROOT / "build" / "bench"
QUANTKIT = (sys.executable, "-m", "quantkit")
MIB = 1 << 20
GB = 10**9

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries would tear the tables apart

_PACKAGES = ("torch", "transformers", "safetensors", "compressed-tensors", "numpy", "xxhash", "quantkit")
_SAMPLE_SECONDS = 0.02
_PSS_EVERY = 10
"""The proportional size is dearer to read than the resident one: every tenth sample."""


# ------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True)
class Measured:
    """A finished command.

    Attributes:
        seconds: wall clock, interpreter start and imports included.
        cpu_seconds: user and system time of all its processes.
        peak_rss: largest sum of the resident sizes of the process tree in bytes. Pages that processes share (libraries,
            mapped files) count once for each, so this is an upper bound.
        peak_pss: the same with shared pages divided among those that share them.
        peak_anon: largest sum of anonymous memory, so without mapped files.
        processes: most processes at one time.
        stdout: what it printed.
    """

    seconds: float
    cpu_seconds: float
    peak_rss: int
    peak_pss: int
    peak_anon: int
    processes: int
    stdout: str

    def row(self) -> dict[str, Any]:
        """For the results: everything but the output."""
        values = asdict(self)
        del values["stdout"]
        return values


def run(
    command: Sequence[str | os.PathLike[str]], *, env: dict[str, str] | None = None, check: bool = True
) -> Measured:
    """Run a command to its end while sampling the memory of its process tree.

    Raises:
        SystemExit: it failed and `check`; the end of its error output is in the message.
    """
    words = [os.fspath(word) for word in command]
    environment = {**os.environ, **OFFLINE, "PYTHONUNBUFFERED": "1", **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start, before = time.perf_counter(), os.times()
        process = subprocess.Popen(words, stdout=out, stderr=err, env=environment, start_new_session=True)
        watch = _Watch(process.pid)
        watch.start()
        code = process.wait()
        seconds, after = time.perf_counter() - start, os.times()
        watch.stop()
        out.seek(0)
        err.seek(0)
        if code and check:
            text = err.read()
            named = [line for line in text.splitlines() if "Error" in line][:5]  # a trace of C++ may bury them
            raise SystemExit(f"error: {' '.join(words)} exited with {code}:\n" + "\n".join([*named, text[-3000:]]))
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Measured(seconds, cpu, watch.rss, watch.pss, watch.anon, watch.processes, out.read())


class _Watch(threading.Thread):
    """Samples /proc for a process and all its descendants; all descendants stay in the session of the first."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self._session, self._end = session, threading.Event()
        self.rss = self.pss = self.anon = self.processes = 0

    def run(self) -> None:
        count = 0
        while not self._end.wait(_SAMPLE_SECONDS):
            members = _session_members(self._session)
            self.processes = max(self.processes, len(members))
            sizes = [_fields(f"/proc/{pid}/status", ("VmRSS", "RssAnon")) for pid in members]
            self.rss = max(self.rss, sum(row["VmRSS"] for row in sizes))
            self.anon = max(self.anon, sum(row["RssAnon"] for row in sizes))
            if count % _PSS_EVERY == 0:
                pss = sum(_fields(f"/proc/{pid}/smaps_rollup", ("Pss",))["Pss"] for pid in members)
                self.pss = max(self.pss, pss)
            count += 1

    def stop(self) -> None:
        self._end.set()
        self.join()


def _session_members(session: int) -> list[int]:
    members = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                stat = (process / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[3]) == session:
                members.append(int(process.name))
    return members


def _fields(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Values in bytes of `Name:  123 kB` lines; 0 where the process is gone."""
    values = dict.fromkeys(names, 0)
    try:
        text = Path(path).read_text()
    except OSError:
        return values
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in values:
            values[name] = int(rest.split()[0]) * 1024
    return values


# ---------------------------------------------------------------------------------------------- page cache


def files_under(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def drop_cache(*folders: Path) -> None:
    """Write everything back, then drop these folders' files from the page cache; needs no privileges."""
    os.sync()
    for path in files_under(folders):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill_cache(*folders: Path) -> None:
    """Read these folders' files once."""
    buffer = bytearray(4 * MIB)
    for path in files_under(folders):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def folder_bytes(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


# ------------------------------------------------------------------------------------------------- results


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the host."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * size / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def own_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found


def commit() -> str:
    """Short commit hash; `+` when tracked files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}{'+' if git('status', '--porcelain', '--untracked-files=no') else ''}" if head else "unknown"


class Report:
    """Numbers of one benchmark: printed as they come, written as JSON at the end."""

    def __init__(self, name: str, small: bool, settings: dict[str, Any]) -> None:
        self._name, self._small = name, small
        self.data: dict[str, Any] = {
            "benchmark": name,
            "small": small,
            "machine": machine(),
            "versions": own_versions(),
            "commit": commit(),
            "settings": settings,
            "targets": [],
        }
        machine_row = self.data["machine"]
        print(
            f"# {name}{' (small)' if small else ''}: {machine_row['cpu']}, {machine_row['cores']} cores, "
            f"{machine_row['memory_gib']} GiB, load {machine_row['load_at_start']}; commit {self.data['commit']}"
        )

    def target(self, what: str, value: float, bound: float, *, at_most: bool = True) -> None:
        """A claim and whether it holds here."""
        met = value <= bound if at_most else value >= bound
        row = {"what": what, "value": value, "bound": bound, "at_most": at_most, "met": met}
        self.data["targets"].append(row)
        sign = "<=" if at_most else ">="
        print(f"{'met   ' if met else 'MISSED'}  {what}: {value:.4g} (target {sign} {bound:g})", flush=True)

    def write(self) -> Path:
        folder = SCRATCH / "results" if self._small else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._name}.json"
        text = json.dumps(self.data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        for absolute in {str(ROOT), str(Path.home()), platform.node()} - {"", "/"}:
            if absolute in text:
                raise SystemExit(
                    f"error: {path} would hold {absolute!r}; results name neither hosts nor absolute paths"
                )
        path.write_text(text + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}", flush=True)
        return path


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table: first column left, all others right."""
    cells = [list(map(str, headings)), *[list(map(str, row)) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        first, rest = (
            row[0].ljust(widths[0]),
            [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)],
        )
        print("  ".join([first, *rest]), flush=True)


def show(commands: Mapping[str, Measured]) -> None:
    """Print a table of finished commands."""
    rows = [[name, f"{run.seconds:.1f}", f"{run.cpu_seconds:.1f}", mib(run.peak_rss)] for name, run in commands.items()]
    table(["command", "seconds", "cpu s", "peak RSS MiB"], rows)


def mib(count: float) -> str:
    return f"{count / MIB:,.0f}"


def summarize(runs: Sequence[Measured]) -> dict[str, Any]:
    """Median time and largest memory of repetitions, and each of them."""
    return {
        "seconds_median": median(run.seconds for run in runs),
        "peak_rss": max(run.peak_rss for run in runs),
        "peak_pss": max(run.peak_pss for run in runs),
        "peak_anon": max(run.peak_anon for run in runs),
        "runs": [run.row() for run in runs],
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a trial of minutes; results go to build/bench/results")
    parser.add_argument("--work", type=Path, default=SCRATCH, help="scratch folder on the disk that is measured")
    return parser
