"""Carry out a plan: one file is one unit of work, done by N threads, each finished one noted in a journal.

Threads do it: reading, arithmetic, hashing and writing release the interpreter lock, which is held for about a tenth of
the time, and they share one torch and one plan. Where more than about eight are to work, `--part` adds processes.

The journal entry of a file is written after the file itself has its final name, so a crash at any moment repeats at
most the files in hand. Source files are hashed by the same workers right after the files that read them, when their
bytes are still cached.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from quantkit.archs import Key
from quantkit.archs.assemble import Location
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import read_note, write_note
from quantkit.checkpoint.writer import WrittenTensor, file_sha256, read_chunks, write_atomic, write_tensors
from quantkit.console import Progress
from quantkit.convert.compute import Calibrated, Producer
from quantkit.convert.packing import packed
from quantkit.convert.transforms import open_transformed
from quantkit.convert.units import Plan, PlannedFile
from quantkit.errors import QuantkitError
from quantkit.host import versions
from quantkit.outdir import OutputFolder
from quantkit.recipe import Recipe
from quantkit.spec.files import is_file
from quantkit.threads import one_thread_per_operation

_JOURNAL = "journal"


@dataclass(frozen=True)
class SourceSpec:
    """What a worker needs to open the source as the recipe transforms it."""

    root: Path
    ignore_index: bool
    recipe: Recipe
    calibration: Path | None

    def open(self) -> Source:
        return open_transformed(self.root, self.recipe, ignore_index=self.ignore_index, artifact=self.calibration)


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a unit of work, as it stands in the journal; `versions` of the machine that computed its tensors."""

    name: str
    size: int
    sha256: str
    tensors: tuple[WrittenTensor, ...] = ()
    versions: dict[str, str] | None = None


_DONE = TypeAdapter(Done)


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of work: write `planned`, copy `copy`, or hash the source file `hashed`. `size` is for the progress."""

    label: str
    size: int
    planned: PlannedFile | None = None
    copy: str = ""
    hashed: str = ""


Runner = Callable[[list[Job], SourceSpec, Source, OutputFolder], Iterator[tuple[Job, Done]]]
"""Does units of work in any order, on this machine or on several, and yields each when its output is in place."""


def local(jobs: int) -> Runner:
    """The runner of this machine, with N threads."""
    return lambda rest, spec, source, out: _run_all(rest, spec, source, out.path, jobs)


def execute(plan: Plan, source: Source, spec: SourceSpec, out: OutputFolder, runner: Runner) -> dict[str, Done]:
    """Write all files of a plan except the manifest; the results by label ("file:NAME", "source:NAME").

    Raises:
        QuantkitError: not enough space, read and write errors, a worker that died.
    """
    done = execute_units(list(units(plan, source)), source, spec, out, runner)
    for name, text in plan.texts.items():
        written = write_atomic(out.path / name, [text])
        done[f"file:{name}"] = Done(name, written.size, written.sha256)
    return done


def finished_units(todo: Iterable[Job], out: OutputFolder) -> dict[str, Done]:
    """The results, by label, of those units that earlier runs finished."""
    journal = out.work / _JOURNAL
    return {job.label: found for job in todo if (found := _recall(journal, out.path, job))}


def execute_units(
    todo: list[Job], source: Source, spec: SourceSpec, out: OutputFolder, runner: Runner
) -> dict[str, Done]:
    """Do those units of work that are not done yet; the results of all by label."""
    journal = out.work / _JOURNAL
    journal.mkdir(exist_ok=True)
    done = finished_units(todo, out)
    rest = [job for job in todo if job.label not in done]
    _check_space(rest, out.path)
    for job in rest:
        if job.copy:
            (out.path / job.copy).parent.mkdir(parents=True, exist_ok=True)
    with Progress("convert", sum(job.size for job in todo)) as progress:
        progress.advance(sum(job.size for job in todo) - sum(job.size for job in rest))
        for job, result in runner(rest, spec, source, out):
            _note(journal, job, result)
            done[job.label] = result
            progress.advance(job.size)
    return done


def units(plan: Plan, source: Source) -> Iterator[Job]:
    """Units in the order in which they run; a source file is hashed after the first output that reads it."""
    hashed: set[str] = set()

    def hash_job(name: str) -> Job:
        hashed.add(name)
        return Job(f"source:{name}", source.index.headers[name].file_size, hashed=name)

    for name in plan.copies:
        yield Job(f"file:{name}", (source.root / name).stat().st_size, copy=name)
    for file in plan.files:
        yield Job(f"file:{file.name}", file.nbytes, planned=file)
        used = set[str]().union(*(source.files_of(key) for key in _keys(file)))
        for name in sorted(used - hashed):
            yield hash_job(name)
    for name in source.index.headers:
        if name not in hashed:
            yield hash_job(name)


def _keys(file: PlannedFile) -> set[Key]:
    return {piece.key for tensor in file.tensors for piece in tensor.pieces if isinstance(piece, Location)}


def _check_space(rest: list[Job], out: Path) -> None:
    needed, free = sum(job.size for job in rest if not job.hashed), shutil.disk_usage(out).free
    if needed > free:
        raise QuantkitError(
            f"{out}: the output needs {needed:,} bytes, {free:,} are free",
            "make room, or give a folder on another disk; nothing more was written",
        )


# ------------------------------------------------------------------------------------------------ journal


def _recall(journal: Path, out: Path, job: Job) -> Done | None:
    """The result of a unit that an earlier run finished."""
    note = read_note(journal / _entry_name(job))
    if note is None:
        return None
    done = _DONE.validate_json(note)
    path = out / done.name
    return done if job.hashed or (is_file(path) and path.stat().st_size == done.size) else None


def _note(journal: Path, job: Job, done: Done) -> None:
    write_note(journal / _entry_name(job), json.dumps(asdict(done)), durable=False)


def _entry_name(job: Job) -> str:
    import hashlib

    return f"{hashlib.sha256(job.label.encode()).hexdigest()[:32]}.json"


# ------------------------------------------------------------------------------------------------ workers


def run_job(job: Job, source: Source, scales: Calibrated | None, out: Path, on_bytes: Callable[[int], None]) -> Done:
    """Do one unit of work in this process."""
    if job.hashed:
        result = file_sha256(source.root / job.hashed, on_bytes)
        return Done(job.hashed, result.size, result.sha256)
    if job.copy:
        result = write_atomic(out / job.copy, read_chunks(source.root / job.copy))
        return Done(job.copy, result.size, result.sha256)
    assert job.planned is not None
    producer = Producer(source, scales)
    tensors = {tensor.name: tensor for tensor in job.planned.stored}
    result, written = write_tensors(
        out / job.planned.name,
        [(tensor.name, tensor.dtype, tensor.stored_shape) for tensor in job.planned.stored],
        lambda name: packed(tensors[name], producer.produce(tensors[name])),
        on_bytes,
    )
    return Done(job.planned.name, result.size, result.sha256, tuple(written), versions())


def _run_all(jobs: list[Job], spec: SourceSpec, source: Source, out: Path, workers: int) -> Iterator[tuple[Job, Done]]:
    scales = Calibrated(spec.calibration, source) if spec.calibration else None
    stop = threading.Event()

    def go_on(_: int) -> None:
        if stop.is_set():
            raise CancelledError

    with one_thread_per_operation(), ThreadPoolExecutor(max(1, workers), "convert") as pool:
        futures: dict[Future[Done], Job] = {pool.submit(run_job, job, source, scales, out, go_on): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # a unit failed, or the caller was interrupted: the units in hand end at once
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
