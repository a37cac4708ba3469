"""`quantkit calibrate`: plan, check everything, then pass after pass over the layers, then the artifact.

The passes (`passes.py`), each of them only where the recipe asks for it:
1. the weights as methods without data transform them (`Plan.view`);
2. methods that look for their vectors in text, one pass each (`search.py`);
3. methods that round weights by what enters them, or make up for that (`search.py` too);
4. decisions on the weights as they are rounded then: which GEMMs are kept or grouped (`trials.py`);
5. statistics and scales of all GEMMs (`final.py`);
6. a check on held-out text of what will be written (`trials.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibrate.activations import MEMORY_BUDGET
from quantkit.calibrate.artifact import write_artifact
from quantkit.calibrate.fake_quant import Rounding
from quantkit.calibrate.final import StatisticsPass
from quantkit.calibrate.methods import method
from quantkit.calibrate.passes import Pass, Walk
from quantkit.calibrate.plan import Plan, make_plan
from quantkit.calibrate.ranks import Ranks, started
from quantkit.calibrate.rounding import rounds_as_found, rounds_to_nearest
from quantkit.calibrate.search import SearchPass
from quantkit.calibrate.trials import CheckPass, DecisionPass
from quantkit.errors import UsageError
from quantkit.outdir import WORK_NAME, OutputFolder, check_place, exclusive, prepare_output
from quantkit.recipe import Recipe
from quantkit.spec.calibration import ARTIFACT_NAMES, SUMMARY_NAME, CalibrationSummary, read_summary
from quantkit.spec.files import is_file

__all__ = ["Plan", "Result", "calibrate", "make_plan", "passes_of", "run_plan"]


def calibrate(
    root: Path, out: Path, recipe: Recipe, *, device: str = "auto", memory_budget: int = MEMORY_BUDGET, jobs: int = 0
) -> CalibrationSummary:
    """Calibrate the checkpoint `root` into the folder `out`; see `run_plan`."""
    check_place(out, root)
    return run_plan(make_plan(root, recipe, device=device, memory_budget=memory_budget), out, jobs).summary


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        summary: the artifact's.
        already: the folder held it before, nothing was done.
        reports: this process is the one, of those that share the work, that tells the user.
    """

    summary: CalibrationSummary
    already: bool
    reports: bool


def run_plan(plan: Plan, out: Path, jobs: int = 0) -> Result:
    """Run a plan to its end, or continue it, or read the result of a finished one.

    Args:
        jobs: batches at a time, which changes no byte of the result; 0 means `Plan.default_jobs`.

    Raises:
        UsageError: `out` is not usable, or holds the work of other options.
        InputError: something is not finite, or a GEMM was not observed; all of them are named.
    """
    with started() as ranks:
        already = _run_shared(plan, out, jobs, ranks)
        return Result(read_summary(out), already, ranks.is_first)


def _run_shared(plan: Plan, out: Path, jobs: int, ranks: Ranks) -> bool:
    """Run a plan in all processes that share it; whether it was finished before. Only the first one writes."""
    with _prepared(plan, out, ranks) as folder:
        (already,) = {bool(finished) for finished in ranks.shared([folder and folder.finished]) if finished is not None}
        if not already:
            for index, job in enumerate(passes_of(plan, out)):
                walk = Walk(job, out / WORK_NAME, jobs or plan.default_jobs, ranks, checks=index == 0)
                walk.run()
                if ranks.is_first:
                    job.finish(walk.records, out)
                ranks.wait()
        if folder is not None:
            if not already:
                write_artifact(out, folder.work, plan.source, plan.recipe, plan.samples)
            _check_complete(out)
            folder.clear_work()
        ranks.wait()
    return already


@contextmanager
def _prepared(plan: Plan, out: Path, ranks: Ranks) -> Iterator[OutputFolder | None]:
    """The output folder, held for the first process; None for the others."""
    if not ranks.is_first:
        yield None
        return
    folder = prepare_output(
        out, plan.options, sources=[plan.source.root], final=SUMMARY_NAME, command="quantkit calibrate"
    )
    with exclusive(folder):
        yield folder


def passes_of(plan: Plan, out: Path) -> Iterator[Pass]:
    """Passes in their order; each is made when those before it have finished and left their results in `out`."""
    work, methods = out / WORK_NAME, plan.recipe.methods
    rows = [method(options.name) for options in methods]
    for index, (options, row) in enumerate(zip(methods, rows, strict=True)):
        if row.learns and not row.rounds and not row.corrects:
            yield SearchPass(plan, plan.view(index, out), options, row.learns)
    source = plan.view(len(methods), out)
    rounded: Callable[[int], Rounding] = rounds_to_nearest
    codes: Path | None = None
    for index, (options, row) in enumerate(zip(methods, rows, strict=True)):
        if row.learns and (row.rounds or row.corrects):
            yield SearchPass(plan, source, options, row.learns, codes)
            codes = out if row.rounds else codes
            rounded = rounds_as_found(source, out, methods[: index + 1])
    if plan.recipe.decides:
        yield DecisionPass(plan, source, rounded)
    yield StatisticsPass(plan, source)
    if plan.held_out.samples and any(gemm.quantized for gemm in plan.gemms.values()):
        yield CheckPass(plan, source, work, rounded)


def _check_complete(out: Path) -> None:
    """All files are there, also when they were written by an earlier run."""
    names = dict.fromkeys((*ARTIFACT_NAMES, *read_summary(out).files))
    lost = [name for name in names if not is_file(out / name)]
    if lost:
        raise UsageError(
            f"files of the finished calibration {out} were removed", "calibrate into a new folder", items=lost
        )
