"""`quantkit ladder`: plan, walk the source and every rung over the same text, score, report.

The folder holds `ladder.json` and `ladder.html`; finished layers and rungs are kept, so a killed run goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.calibrate import experts
from quantkit.calibrate.passes import Walk
from quantkit.calibrate.plan import Plan, make_plan
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.sealed import read_note, write_note
from quantkit.checkpoint.writer import write_atomic
from quantkit.ladder.arithmetic import Arithmetic, arithmetic_of
from quantkit.ladder.rungs import Rung
from quantkit.ladder.score import Scores, score
from quantkit.ladder.speed import Speed, measure, runs
from quantkit.ladder.walk import RungPass
from quantkit.outdir import exclusive, prepare_output
from quantkit.plan.cache import CacheFormat, per_token
from quantkit.plan.source import read_source
from quantkit.recipe import Calibration, load_recipe, validated
from quantkit.spec.document import Strict, read_finished
from quantkit.spec.tensorfile import torch_dtype

JSON_NAME, HTML_NAME = "ladder.json", "ladder.html"


class RungResult(Strict):
    """Attributes:
    rung: as listed.
    scores: against the source.
    step_kl, step_error: KL beyond that of the rung that `after` names (of the source: 0), and its standard error.
    weight_bytes: of all tensors, scales included.
    kv_bytes: of the cache for each token, one rank.
    speed: None where it was not asked for, or the runtime has no such arithmetic.
    """

    rung: Rung
    scores: Scores
    step_kl: float
    step_error: float
    weight_bytes: int
    kv_bytes: int
    speed: Speed | None = None


class LadderReport(Strict):
    """All of `ladder.json`.

    Attributes:
        tool_version: quantkit's.
        model_type: of the config.
        source_digest: `Source.digest`.
        compute: of the reference, dtype and device.
        samples, tokens: of the text.
        samples_sha256: over its token ids.
        weight_bytes, kv_bytes: of the source, the cache in BF16.
        rungs: in their order.
        passed_over: rungs that this source has no use for.
    """

    format_version: int = 1
    tool_version: str
    model_type: str
    source_digest: str
    compute: str
    samples: int
    tokens: int
    samples_sha256: str
    weight_bytes: int
    kv_bytes: int
    rungs: tuple[RungResult, ...]
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class LadderPlan:
    """Attributes:
    plan: of the source's own walk; its recipe converts nothing.
    rungs: that will run.
    arithmetic: of the rungs.
    passed_over: names of the others.
    speed: device whose speed is measured, "" for none.
    """

    plan: Plan
    rungs: tuple[Rung, ...]
    arithmetic: Mapping[str, Arithmetic]
    passed_over: tuple[str, ...]
    speed: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What decides the result."""
        return {
            "command": "ladder",
            "tool_version": __version__,
            "source_digest": self.plan.source.digest(),
            "config_sha256": hashlib.sha256((self.plan.source.root / "config.json").read_bytes()).hexdigest(),
            "samples_sha256": self.plan.samples.digest,
            "device": self.plan.device.type,
            "speed": self.speed,
            "rungs": [rung.model_dump(mode="json", exclude={"calibration"}) for rung in self.rungs],
            "recipes": {name: each.recipe.model_dump(mode="json") for name, each in self.arithmetic.items()},
            "calibrations": {name: each.digest for name, each in self.arithmetic.items() if each.digest},
        }

    def describe(self) -> dict[str, Any]:
        """Sizes for a dry run."""
        found = self.plan.describe()
        walks = 1 + len(self.rungs)
        kept = ("architecture", "layers", "samples", "kinds", "tokens", "jobs", "memory_bytes", "warnings")
        return {
            **{name: found[name] for name in kept},
            "rungs": [rung.name for rung in self.rungs],
            "passed_over": list(self.passed_over),
            "walks": walks,
            "read_bytes": walks * found["read_bytes"],
            "kept_bytes": walks * self.plan.hidden_bytes,
        }


def plan_ladder(
    root: Path, rungs: tuple[Rung, ...], calibration: Mapping[str, Any], *, device: str = "auto", speed: bool = False
) -> LadderPlan:
    """Check source, text and every rung; nothing is written.

    Args:
        calibration: keys of a recipe's calibration section: how the text is drawn.
        speed: also convert the rungs that the runtime can run, and measure them.

    Raises:
        InputError, UsageError: something cannot be used.
    """
    values = load_recipe("bf16").model_dump()
    text = Calibration().model_dump() | values["calibration"] | dict(calibration) | {"held_out": 0}
    plan = make_plan(root, validated({**values, "calibration": text}, "the ladder's text"), device=device)
    plan = replace(plan, dtype=torch.float32)
    kept = tuple(rung for rung in rungs if rung.applies(plan.source))
    arithmetic = arithmetic_of(kept, plan.source)
    passed_over = tuple(rung.name for rung in rungs if rung not in kept)
    return LadderPlan(plan, kept, arithmetic, passed_over, plan.device.type if speed else "")


def run_ladder(ladder: LadderPlan, out: Path, jobs: int = 0) -> LadderReport:
    """Run a plan to its end, or continue it, or read the result of a finished one.

    Raises:
        UsageError: `out` is not usable, or holds the work of other options.
        InputError: the report of a finished one is damaged.
    """
    root = ladder.plan.source.root
    folder = prepare_output(out, ladder.options, sources=[root], final=JSON_NAME, command="quantkit ladder")
    with exclusive(folder):
        if not folder.finished:
            reference = _walk(ladder.plan, None, None, folder.work, jobs)
            results: list[RungResult] = []
            for rung in ladder.rungs:
                results.append(_result(ladder, rung, reference, folder.work, jobs, results))
            _write(out, _report(ladder, results))
        folder.clear_work()
    return read_finished(out / JSON_NAME, LadderReport, "ladder", "quantkit ladder")


def _walk(
    plan: Plan, rung: Rung | None, arithmetic: Arithmetic | None, work: Path, jobs: int
) -> tuple[LayerStream, Path]:
    """A model with one rung's arithmetic -> the model, and the record of its last layer."""
    source = arithmetic.view(plan.source) if arithmetic else plan.source
    plan = replace(plan, source=source, dtype=torch_dtype("BF16") if _is_bf16(rung) else torch.float32)
    job = RungPass(plan, source, rung, arithmetic)
    walk = Walk(job, work, jobs or plan.default_jobs)
    walk.run()
    stream = LayerStream(source, dtype=plan.dtype, device=plan.device, experts=experts.IMPLEMENTATION)
    return stream, walk.records[-1]


def _is_bf16(rung: Rung | None) -> bool:
    return rung is not None and rung.compute == "bfloat16"


def _result(
    ladder: LadderPlan,
    rung: Rung,
    reference: tuple[LayerStream, Path],
    work: Path,
    jobs: int,
    before: list[RungResult],
) -> RungResult:
    """A rung's walk and scores, or what is kept of them."""
    kept = work / f"result-{rung.name}.json"
    if (note := read_note(kept)) is not None:
        return RungResult.model_validate_json(note)
    plan, arithmetic = ladder.plan, ladder.arithmetic[rung.name]
    scores = score(plan.samples, plan.batches, reference, _walk(plan, rung, arithmetic, work, jobs))
    known = {row.rung.name: row.scores for row in before}
    step, step_error = scores.step(known.get(rung.after))
    sizes = read_source(plan.source.root, load_recipe("bf16") if rung.weights == "stored" else arithmetic.resolved)
    form = CacheFormat(*("int8" if dtype == "int8" else "bf16" for dtype in (rung.keys, rung.values)))
    found = RungResult(
        rung=rung.model_copy(update={"calibration": ""}),  # a place on this machine; its digest is in the options
        scores=scores,
        step_kl=step,
        step_error=step_error,
        weight_bytes=sizes.source_bytes if rung.weights == "stored" else sizes.output_bytes,
        kv_bytes=per_token(sizes.model.caches(form, 1)),
        speed=measure(plan.source.root, rung, arithmetic, work, device=ladder.speed)
        if ladder.speed and runs(rung)
        else None,
    )
    write_note(kept, found.model_dump_json())
    return found


def _report(ladder: LadderPlan, results: list[RungResult]) -> LadderReport:
    plan = ladder.plan
    sizes = read_source(plan.source.root, load_recipe("bf16"))
    return LadderReport(
        tool_version=__version__,
        model_type=str(plan.source.config.get("model_type", "")),
        source_digest=plan.source.digest(),
        compute=f"float32 on {plan.device.type}",
        samples=len(plan.samples.samples),
        tokens=plan.samples.tokens,
        samples_sha256=plan.samples.digest,
        weight_bytes=sizes.source_bytes,
        kv_bytes=per_token(sizes.model.caches(CacheFormat(), 1)),
        rungs=tuple(results),
        passed_over=ladder.passed_over,
    )


def _write(out: Path, report: LadderReport) -> None:
    from quantkit.report.ladder import render

    write_atomic(out / HTML_NAME, [render(report).encode()])
    text = json.dumps(report.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(out / JSON_NAME, [f"{text}\n".encode()])
