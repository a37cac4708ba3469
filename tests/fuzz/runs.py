"""Many cases in processes of their own: one that dies or hangs beyond Python's reach is a finding, not the end.

A worker writes the case that it begins into its log; who watches it ends a worker whose case takes too long, notes it,
and starts another one with the next seed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from tests.bench.common import commit
from tests.fuzz import corpus as files
from tests.fuzz.guard import Finding, queued_s, run_case
from tests.fuzz.targets import PARSERS as FILE_PARSERS
from tests.fuzz.targets import Case, Parser

GRACE_S = 60
"""Beyond a case's own limit until its process is ended."""


def parsers() -> dict[str, Parser]:
    """All parsers by name."""
    from tests.fuzz.server import PARSERS as SERVER_PARSERS

    return {**FILE_PARSERS, **SERVER_PARSERS}


def _named(names: Sequence[str]) -> dict[str, Parser]:
    """The parsers of these names, those of the fuzzer's own test among them."""
    from tests.fuzz.fatal import PARSERS as FATAL_PARSERS

    known = {**parsers(), **FATAL_PARSERS}
    return {name: known[name] for name in names}


def case(name: str, parser: Parser, seed: int, workspace: Path, corpus: Path) -> Finding | None:
    """Prepare and run one case in this process."""
    folder = workspace / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        try:
            read = parser.prepare(Case(Random(f"{name} {seed}"), folder, corpus))
        except Exception:  # a fault of the fuzzer itself
            return Finding(name, seed, "fuzzer", traceback.format_exc()[-600:])
        return run_case(name, seed, folder, read, parser.limits, may_spawn=parser.may_spawn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def be_quiet() -> None:
    """Libraries warn about damaged files on stderr, thousands of times."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def one(name: str, seed: int, folder: Path) -> int:
    """Run a case again without its watch; 1 if it raises something else than an expected error."""
    from quantkit.errors import QuantkitError

    corpus = files.make(folder / "corpus")
    own = files.workspace(folder / f"again-{os.getpid()}", corpus) / f"{name}-{seed}"
    own.mkdir()
    parser = parsers()[name]
    read = parser.prepare(Case(Random(f"{name} {seed}"), own, corpus))
    print(f"files: {own}", file=sys.stderr)
    try:
        read()
    except QuantkitError as error:
        print(f"{type(error).__name__}: {error}")
    except Exception:
        traceback.print_exc()
        return 1
    found = case(name, parser, seed, own.parent, corpus)
    if found:
        print(f"{found.kind}: {found.detail}")
    return int(found is not None)


def _work(pipe: Connection, names: Sequence[str], numbers: range, workspace: Path, corpus: Path, until: float) -> None:
    """A worker: cases by turns of the parsers until the time or the numbers are over."""
    import torch

    be_quiet()
    torch.set_num_threads(1)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        known = _named(names)
        turns = _turns(names, known, by_share=bool(until))
        for number in numbers:
            if until and time.time() > until:
                break
            name, seed = turns[number % len(turns)], number // len(turns) if not until else number
            pipe.send(("begin", name, seed))
            begun = time.monotonic()
            found = case(name, known[name], seed, workspace, corpus)
            pipe.send(("end", name, time.monotonic() - begun, found and asdict(found)))
    pipe.close()


def _turns(names: Sequence[str], known: dict[str, Parser], *, by_share: bool) -> list[str]:
    """The order in which parsers take their turns."""
    turns = [name for name in names for _ in range(known[name].share if by_share else 1)]
    Random(0).shuffle(turns)
    return turns


class _Worker:
    """A process and what it said last."""

    def __init__(self, number: int, names: Sequence[str], numbers: range, folder: Path, until: float) -> None:
        corpus, self.workspace = folder / "corpus", files.workspace(folder / f"worker-{number}", folder / "corpus")
        self.number, self.names, self.numbers, self.folder, self.until = number, names, numbers, folder, until
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        arguments = (theirs, names, numbers, self.workspace, corpus, until)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.current: tuple[str, int] | None = None
        self.since = self._clock()
        self.cases = 0

    def _clock(self) -> float:
        """Seconds, without those in which the process waited for a processor."""
        return time.monotonic() - queued_s(self.process.pid or 0)

    def begins(self, name: str, seed: int) -> None:
        self.current, self.since = (name, seed), self._clock()

    def late(self, limit: float) -> bool:
        return self.current is not None and self._clock() - self.since > limit + GRACE_S


def session(
    names: Sequence[str],
    folder: Path,
    *,
    minutes: float = 0,
    cases: int = 200,
    workers: int = 1,
    first_seed: int = 0,
    result: Path | None = None,
) -> int:
    """Run many cases; 1 if there were findings.

    Args:
        names: of the parsers; empty: all.
        folder: for the corpus and the cases.
        minutes: 0: `cases` of each parser.
        result: JSON file for what was run and found.
    """
    names = list(names) or list(parsers())
    known = _named(names)
    files.make(folder / "corpus")
    about: dict[str, Any] = {"commit": commit(), "first_seed": first_seed, "workers": workers}
    begun, used = time.time(), _cpu_s()
    until = begun + 60 * minutes if minutes else 0.0
    totals, seconds, findings = Counter[str](), Counter[str](), list[dict[str, Any]]()
    each = 1 if minutes else len(names)
    block = 10**9 if minutes else -(-cases // workers) * each
    starts = [first_seed * each + number * block for number in range(workers)]
    running = [_Worker(n, names, range(start, start + block), folder, until) for n, start in enumerate(starts)]
    while running:
        wait([worker.pipe for worker in running], timeout=5)
        for worker in list(running):
            lost = _listen(worker, totals, seconds, findings)
            name = worker.current[0] if worker.current else ""
            if not lost and name and worker.late(known[name].limits.wall_s):
                worker.process.kill()
                lost = "hangs beyond the reach of a signal"
            if lost is None:
                continue
            running.remove(worker)
            worker.process.join()
            if lost:  # it died, or was ended, in the middle of a case
                row = Finding(name, worker.current[1] if worker.current else -1, "process", lost)
                _note(findings, asdict(row))
                left = range(worker.numbers.start + worker.cases + 1, worker.numbers.stop)
                running.append(_Worker(worker.number, names, left, folder, until))
    took = time.time() - begun
    about["cpu_minutes"] = round((_cpu_s() - used) / 60, 1)
    _report(totals, seconds, findings, took, about, result)
    return int(bool(findings))


def _cpu_s() -> float:
    """Seconds of computing of all processes that ended: on a loaded machine they have less of it than minutes ran."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _listen(worker: _Worker, totals: Counter[str], seconds: Counter[str], findings: list[dict[str, Any]]) -> str | None:
    """Take in what a worker said; "" when it is done, a reason when it died, None while it works."""
    try:
        while worker.pipe.poll():
            kind, name, value, *rest = worker.pipe.recv()
            if kind == "begin":
                worker.begins(name, value)
                continue
            worker.current = None
            worker.cases += 1
            totals[name] += 1
            seconds[name] += value
            if rest[0]:
                _note(findings, rest[0])
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        return "" if code == 0 and worker.current is None else f"ended with exit code {code}"
    return None


def _note(findings: list[dict[str, Any]], row: dict[str, Any]) -> None:
    findings.append(row)
    print(f"FOUND {row['parser']} --seed {row['seed']}: {row['kind']}: {row['detail']}", flush=True)


def _report(
    totals: Counter[str],
    seconds: Counter[str],
    findings: Sequence[dict[str, Any]],
    took: float,
    about: Mapping[str, Any],
    result: Path | None,
) -> None:
    by_parser = {
        name: {
            "cases": totals[name],
            "seconds": round(seconds[name], 1),
            "findings": sum(row["parser"] == name for row in findings),
        }
        for name in sorted(totals)
    }
    for name, row in by_parser.items():
        print(f"{name:16} {row['cases']:7} cases {row['seconds']:8} s  {row['findings']} findings")
    print(
        f"{sum(totals.values())} cases in {took / 60:.1f} minutes, {about['cpu_minutes']} of computing, "
        f"{len(findings)} findings"
    )
    if result is not None:
        document = {
            "minutes": round(took / 60, 1),
            **about,
            "cases": sum(totals.values()),
            "parsers": by_parser,
            "findings": list(findings),
            "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        }
        _write(result, document)


def _write(result: Path, document: dict[str, Any]) -> None:
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


_OF_A_SESSION = ("minutes", "cpu_minutes", "commit", "first_seed", "workers", "cases")


def add_up(paths: Sequence[Path], result: Path) -> None:
    """Results of sessions that ran one after the other on one machine, as one result; each is listed in `sessions`.

    Raises:
        ValueError: they are of several machines.
    """
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    machine = documents[0]["machine"]
    if any(document["machine"] != machine for document in documents):
        raise ValueError("results of several machines are not added up")
    parsers: dict[str, Counter[str]] = {}
    for document in documents:
        for name, row in document["parsers"].items():
            parsers.setdefault(name, Counter()).update(row)
    _write(
        result,
        {
            "minutes": round(sum(document["minutes"] for document in documents), 1),
            "cpu_minutes": round(sum(document["cpu_minutes"] for document in documents), 1),
            "cases": sum(document["cases"] for document in documents),
            "parsers": {name: {**row, "seconds": round(row["seconds"], 1)} for name, row in parsers.items()},
            "findings": [row for document in documents for row in document["findings"]],
            "machine": machine,
            "sessions": [{key: document.get(key, "unknown") for key in _OF_A_SESSION} for document in documents],
        },
    )
