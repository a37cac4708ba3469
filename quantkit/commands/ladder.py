"""`quantkit ladder`: the same model with one change of arithmetic at a time, and what each step costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json, print_sizes

if TYPE_CHECKING:
    from quantkit.ladder.run import LadderReport
    from quantkit.ladder.speed import Speed

_WIDTH = 120
"""Columns that the table needs without speeds; a narrower terminal wraps lines instead of cutting cells."""

_PATH = click.Path(path_type=Path)

_EPILOG = """\b
Examples:
  quantkit ladder MODEL -o LADDER                      BF16, INT8 weights, activations, groups, rotation, keys, values
  quantkit ladder MODEL -o LADDER --rung w8 --rung w8a8
  quantkit ladder MODEL -o LADDER --calibration CAL    and what a calibrated recipe (smoothing, GPTQ, ...) reaches
  quantkit ladder MODEL -o LADDER --rungs mine.yaml    a list of your own, see quantkit/ladder/default.yaml
Every rung reads the weights once, a layer at a time. Killed: run the same command again, finished layers are kept.
"""


@click.command("ladder", epilog=_EPILOG)
@click.argument("model", type=_PATH)
@click.option("-o", "--out", type=_PATH, required=True, help="New or empty folder, outside MODEL.")
@click.option("--rungs", type=_PATH, help="YAML list of rungs; default: the shipped one.")
@click.option("--rung", "only", multiple=True, metavar="NAME", help="Only this one of the list; repeatable.")
@click.option(
    "--calibration", "calibrations", multiple=True, type=_PATH, help="One more rung: its recipe, found and decided."
)
@click.option("--data", multiple=True, metavar="SPEC", help="Source of text, as of `quantkit calibrate`; repeatable.")
@click.option("--samples", type=click.IntRange(1), default=24, show_default=True)
@click.option("--seq-len", type=click.IntRange(2), default=512, show_default=True, help="Longest sample in tokens.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the draw.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Batches at a time; default: the cores, at most 32.")
@click.option("--speed", is_flag=True, help="Also convert and measure what quantkit-runtime can run, on this device.")
@click.option("--dry-run", is_flag=True, help="Check everything, print sizes, write nothing.")
@json_option
def command(
    model: Path,
    out: Path,
    rungs: Path | None,
    only: tuple[str, ...],
    calibrations: tuple[Path, ...],
    data: tuple[str, ...],
    device: str,
    jobs: int | None,
    speed: bool,
    dry_run: bool,
    as_json: bool,
    **text: int,
) -> None:
    """Run MODEL in several precisions, one change at a time: accuracy and memory of each step."""
    from quantkit.ladder.run import HTML_NAME, plan_ladder, run_ladder
    from quantkit.ladder.rungs import load_rungs, with_calibrations
    from quantkit.outdir import check_place

    check_place(out, model)
    calibration: dict[str, Any] = {**text, "min_sources": 1}
    if data:
        from quantkit.calibrate.sources import parse_spec

        calibration["mix"] = tuple(parse_spec(spec).model_dump() for spec in data)
    listed = with_calibrations(load_rungs(rungs, only), calibrations)
    ladder = plan_ladder(model, listed, calibration, device=device, speed=speed)
    if dry_run:
        print_sizes(ladder.describe(), as_json)
        return
    report = run_ladder(ladder, out, jobs or 0)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        _show(report, out / HTML_NAME)


def _show(report: LadderReport, page: Path) -> None:
    from rich.table import Table

    from quantkit.memory import human_bytes

    table = Table(box=None, pad_edge=False, title="against the source in float32", title_justify="left")
    table.add_column("rung")
    table.add_column("differs from")
    measured = any(row.speed for row in report.rungs)
    speeds = ("prefill, tokens/s", "ms a token") if measured else ()
    for name in ("KL, 1e-3", "step", "perplexity, %", "same token", "weights", "cache per token", *speeds):
        table.add_column(name, justify="right")
    for row in report.rungs:
        score = row.scores.overall
        table.add_row(
            row.rung.name,
            row.rung.after or "source",
            f"{1e3 * score.kl:.2f} ± {1e3 * score.kl_error:.2f}",
            f"{1e3 * row.step_kl:+.2f} ± {1e3 * row.step_error:.2f}",
            f"{100 * score.change:+.2f} ± {100 * score.change_error:.2f}",
            f"{score.top1:.1%}",
            human_bytes(row.weight_bytes),
            human_bytes(row.kv_bytes),
            *(_speed(row.speed) if measured else ()),
        )
    shown = console()
    shown.width = max(shown.width, _WIDTH + 32 * measured)
    shown.print(table)
    if report.passed_over:
        shown.print(f"not for this source: {', '.join(report.passed_over)}", markup=False)
    shown.print(f"report: {page}", markup=False)


def _speed(speed: Speed | None) -> tuple[str, str]:
    return (f"{speed.prefill_per_s:,.0f}", f"{1e3 * speed.token_s:.2f}") if speed else ("-", "-")
