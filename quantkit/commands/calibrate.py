"""`quantkit calibrate`: real text through the model, statistics and scales of every GEMM, a report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json, print_sizes, quoted

if TYPE_CHECKING:
    from rich.table import Table

    from quantkit.recipe import Recipe
    from quantkit.spec.calibration import CalibrationSummary

_FOLDER = click.Path(path_type=Path)
_WORST = 8

_EPILOG = """\b
Examples:
  quantkit calibrate MODEL -o CALIBRATION             shipped text of six kinds
  quantkit calibrate MODEL -o CALIBRATION --data builtin:code --data chats.jsonl=2 --data builtin:math
  quantkit calibrate MODEL -o CALIBRATION --dry-run   sizes only, write nothing
  torchrun --nproc-per-node 4 -m quantkit calibrate MODEL -o CALIBRATION      four processes, the same bytes
Killed or out of space: run the same command again, finished layers are kept.
"""


@click.command(epilog=_EPILOG)
@click.argument("model", type=_FOLDER)
@click.option("-o", "--out", type=_FOLDER, required=True, help="New or empty folder, outside MODEL.")
@click.option("--recipe", default="w8a8", show_default=True, metavar="NAME|FILE", help="Shipped name or YAML file.")
@click.option(
    "--data",
    multiple=True,
    metavar="SPEC",
    help="Source of text, NAME_OR_PATH[=WEIGHT]; builtin:KIND, a JSONL, JSON, Parquet or text file, or a Hugging Face "
    "data set. Repeatable. Default: the recipe's, else all shipped kinds.",
)
@click.option(
    "--evaluation",
    multiple=True,
    metavar="FILE",
    help="Text that the result will be judged by; a warning tells where calibration has seen it. Repeatable.",
)
@click.option("--samples", type=click.IntRange(1), help="Number of samples.")
@click.option("--seq-len", type=click.IntRange(2), help="Longest sample in tokens.")
@click.option("--seed", type=int, help="Of the draw.")
@click.option("--force-sources", is_flag=True, help="Allow fewer kinds of text than the recipe's min_sources.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Batches at a time; default: the cores, at most 32.")
@click.option("--dry-run", is_flag=True, help="Check everything, try one layer, print memory, disk and time.")
@json_option
def command(
    model: Path,
    out: Path,
    recipe: str,
    data: tuple[str, ...],
    evaluation: tuple[str, ...],
    device: str,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
    force_sources: bool,
    **overrides: int | None,
) -> None:
    """Calibrate the checkpoint MODEL: stream it layer by layer and measure what enters every GEMM."""
    from quantkit.calibrate.run import make_plan, run_plan
    from quantkit.outdir import check_place
    from quantkit.recipe import load_recipe

    check_place(out, model)
    resolved = _override(load_recipe(recipe), data, evaluation, force_sources, overrides)
    plan = make_plan(model, resolved, device=device)
    if dry_run:
        from quantkit.calibrate.estimate import estimated_seconds, why_untried
        from quantkit.calibrate.methods import learning

        seconds = estimated_seconds(plan)
        unknown = f"unknown: {why_untried(plan)}"
        searching = ", ".join(learning(resolved.methods))
        beside = f", and what {searching} compute beside their passes" if searching else ""
        time = unknown if seconds is None else f"about {seconds / 60:.1f} minutes on this machine{beside}"
        print_sizes({**plan.describe(), **({"estimated_seconds": seconds} if as_json else {"time": time})}, as_json, 16)
        return
    run = run_plan(plan, out, jobs or 0)
    if not run.reports:
        return
    if as_json:
        print_json(run.summary.model_dump(mode="json"))
    else:
        _show_summary(run.summary, out, already=run.already)
        given = "" if recipe == "w8a8" else f" --recipe {quoted(recipe)}"
        console().print(
            f"next: quantkit convert {quoted(model)} -o OUT{given} --calibration {quoted(out)}",
            markup=False,
            soft_wrap=True,
        )


def _override(
    recipe: Recipe,
    data: tuple[str, ...],
    evaluation: tuple[str, ...],
    force_sources: bool,
    overrides: dict[str, int | None],
) -> Recipe:
    """The recipe with the options of the command line in its calibration section."""
    from quantkit.calibrate.sources import parse_spec
    from quantkit.recipe import validated

    changes: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    if data:
        changes["mix"] = tuple(parse_spec(spec).model_dump() for spec in data)
    if evaluation:
        changes["evaluation"] = evaluation
    if force_sources:
        changes["min_sources"] = 1
    values = recipe.model_dump()
    return validated(
        {**values, "calibration": {**values["calibration"], **changes}}, f"{recipe.name} with these options"
    )


def _show_summary(summary: CalibrationSummary, folder: Path, *, already: bool) -> None:
    from quantkit.spec.calibration import REPORT_NAME

    out = console()
    if already:
        out.print(f"{folder} already holds this calibration; nothing was done", markup=False)
    out.print(
        f"coverage {summary.coverage:.1%}: {summary.observed_gemms} of {summary.expected_gemms} GEMMs observed, "
        f"{summary.tokens:,} tokens in {len(summary.samples)} samples",
        markup=False,
    )
    out.print(_worst_table(summary))
    for line in (*_method_lines(summary), *_held_out_lines(summary)):
        out.print(line, markup=False)
    for warning in summary.warnings:
        out.print(f"warning: {warning}", markup=False)
    out.print(f"report: {folder / REPORT_NAME}", markup=False)


def _method_lines(summary: CalibrationSummary) -> Iterator[str]:
    """What the methods that learn from text did."""
    from quantkit.report.held_out import method_rows

    for row in method_rows(summary.methods, 0):
        without = f"; {row['without']:,} GEMMs have no bias to correct" if row["without"] else ""
        yield (
            f"{row['method']}: {row['changed']:,} of {row['places']:,} places changed, mean error of the output "
            f"{row['before']:.3%}, {row['after']:.3%} with it{without}"
        )


def _held_out_lines(summary: CalibrationSummary) -> Iterator[str]:
    """What was measured on held-out text, and what was decided on."""
    for stream, kl in summary.held_out.kl.items() if summary.held_out else ():
        kind = max(kl, key=kl.__getitem__)
        routing = summary.held_out.routing[stream] if summary.held_out else {}
        same = (
            f"; the source's experts are chosen in {min(routing.values()):.2%} of the cases or more" if routing else ""
        )
        yield f"held-out text, {stream}: KL divergence from the source at most {kl[kind]:.4f} ({kind}){same}"
    for form, row in summary.decisions.forms.items() if summary.decisions else ():
        yield f"exceptions of the {form} form: {len(row.exceptions)}, {row.kept_share:.2%} of the weights are kept"


def _worst_table(summary: CalibrationSummary) -> Table:
    """The quantized GEMMs whose inputs lose most to per-token INT8."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="largest error of the input", title_justify="left")
    table.add_column("GEMM")
    for name in ("tokens", "absmax", "per token", "per group", "outlier channels"):
        table.add_column(name, justify="right")
    quantized = (gemm for gemm in summary.gemms if gemm.quantized)
    for gemm in sorted(quantized, key=lambda row: (-row.token_error, row.name))[:_WORST]:
        table.add_row(
            gemm.name,
            f"{gemm.tokens:,}",
            f"{gemm.absmax:.3g}",
            f"{gemm.token_error:.2%}",
            f"{gemm.group_error:.2%} ({gemm.group_size})",
            str(gemm.outlier_channels),
        )
    return table
