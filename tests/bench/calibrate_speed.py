"""Time of `quantkit calibrate`: statistics against the bare forward, `w8a8-best` against llmcompressor.

    python tests/bench/calibrate_speed.py [--small] [--layers 4] [--without-peers]

The first layers of SmolLM2, in float32 on the CPU. Statistics: the pass of recipe w8a8 and one that only runs the
layers, over the same batches, as many at a time, in turns in one process; the median counts. Then whole commands
(calibrate and convert) of `w8a8-best` with its 512 samples against the whole command of the peer's SmoothQuant + GPTQ
with 128, whose call alone stands beside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import accuracy
import common
import peers
from convert_speed import fresh

from quantkit.calibrate.final import StatisticsPass
from quantkit.calibrate.passes import LayerRun, Pass, Walk
from quantkit.calibrate.plan import Plan, make_plan
from quantkit.recipe import load_recipe

PEER = "smoothquant-gptq"


class ForwardPass(Pass):
    """Runs the layers, and no more."""

    name = title = "forward"

    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        with run.stream.materialized(run.index):
            run.forward()
        return Path.touch


def timed(job: Pass, plan: Plan) -> float:
    """Seconds of a pass over all layers."""
    with tempfile.TemporaryDirectory() as work:
        start = time.perf_counter()
        Walk(job, Path(work), plan.default_jobs).run()
        return time.perf_counter() - start


def statistics(source: Path, repeats: int, text: dict[str, int]) -> dict[str, Any]:
    """Seconds of both passes in every repetition."""
    recipe = load_recipe("w8a8")
    recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=text)})
    plan = make_plan(source, recipe, device="cpu")
    found: dict[str, list[float]] = {"forward": [], "statistics": []}
    for _ in range(repeats):
        found["forward"].append(timed(ForwardPass(plan, plan.source), plan))
        found["statistics"].append(timed(StatisticsPass(plan, plan.source), plan))
    return {"tokens": plan.samples.tokens, "batches": len(plan.batches), "seconds": found}


def against_peer(report: common.Report, source: Path, work: Path, small: bool) -> None:
    samples = work / "peer_samples.jsonl"
    accuracy.write_samples(source, samples, *((8, 64) if small else (accuracy.PEER_SAMPLES, accuracy.PEER_LENGTH)))
    options = ["--device", "cpu", *(["--samples", "24", "--seq-len", "64"] if small else [])]
    mine = accuracy.ours(accuracy.BEST, source, work, True, options)
    theirs = accuracy.peer(PEER, source, work, samples, "cpu")
    report.data["made"] = {row.name: accuracy.noted(row) for row in (mine, theirs)}
    common.table(*accuracy.time_and_text((mine, theirs)))
    accuracy.time_targets(report, mine, theirs)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-peers", dest="peers", action="store_false")
    args = parser.parse_args()
    if args.peers and not peers.versions("llmcompressor"):
        raise SystemExit("error: there is no environment of llmcompressor\nnext: make peers, or give --without-peers")
    source = accuracy.MODELS / accuracy.DENSE
    if not (source / "config.json").is_file():
        raise SystemExit(f"error: {source} is missing\nnext: make smollm2")
    work = fresh(args.work / "calibrate-speed")
    source = accuracy.truncated(source, work / "model", args.layers)
    report = common.Report("calibrate_speed", args.small, {"layers": args.layers, "repeats": args.repeats})
    found = statistics(source, args.repeats, {"samples": 24, "seq_len": 64} if args.small else {})
    report.data["statistics"] = found
    seconds = {name: median(values) for name, values in found["seconds"].items()}
    common.table(["pass", "seconds"], [[name, f"{value:.1f}"] for name, value in seconds.items()])
    report.target("statistics against the bare forward", seconds["statistics"] / seconds["forward"], 1.15)
    if args.peers:
        report.data["peer_versions"] = peers.versions("llmcompressor")
        against_peer(report, source, work, args.small)
    report.write()


if __name__ == "__main__":
    main()
