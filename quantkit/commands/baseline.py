"""`quantkit baseline`: what the source model answers, kept for every later comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import console, json_option, print_json, print_sizes, quoted

if TYPE_CHECKING:
    from quantkit.baseline.plan import Plan
    from quantkit.spec.baseline import Baseline

_FOLDER = click.Path(path_type=Path)

_EPILOG = """\b
Examples:
  quantkit baseline MODEL -o BASELINE               shipped texts of six kinds, a long text, needles, prompts
  quantkit baseline MODEL -o BASELINE --dry-run     what it takes, write nothing
  quantkit-runtime compare BASELINE OUT             hold a conversion against it
Killed or out of space: run the same command again, finished layers and tokens are kept.
"""


@click.command(epilog=_EPILOG)
@click.argument("model", type=_FOLDER)
@click.option("-o", "--out", type=_FOLDER, required=True, help="New or empty folder, outside MODEL.")
@click.option(
    "--data",
    multiple=True,
    metavar="NAME_OR_PATH",
    help="Source of text as of `quantkit calibrate`. Repeatable. Default: shipped texts that a default calibration "
    "does not see.",
)
@click.option("--texts", type=click.IntRange(1), default=4, show_default=True, help="Texts of each kind.")
@click.option("--tokens", type=click.IntRange(2), default=512, show_default=True, help="Longest text.")
@click.option("--prompts", type=click.IntRange(0), default=1, show_default=True, help="Prompts of each kind.")
@click.option(
    "--new-tokens",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Of each greedy continuation; a model that does not fit in memory is read once for each.",
)
@click.option(
    "--long-tokens",
    type=click.IntRange(0),
    default=0,
    help="Length of the long text and of those with a needle; 1: none; 0, the default: 2048, or twice the "
    "attention's largest window or top-k count, at most 16384.",
)
@click.option(
    "--probe-tokens",
    type=click.IntRange(2),
    default=192,
    show_default=True,
    help="Tokens whose hidden states are kept for every layer.",
)
@click.option("--top-k", type=click.IntRange(2), default=64, show_default=True, help="Likeliest tokens that are kept.")
@click.option("--full", is_flag=True, help="Keep all log-probabilities: 4 bytes times the vocabulary a position.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Texts at a time; default: the cores, at most 8.")
@click.option("--stream", is_flag=True, help="Never keep more than one layer in memory.")
@click.option("--dry-run", is_flag=True, help="Check everything, print sizes, write nothing.")
@json_option
def command(
    model: Path,
    out: Path,
    data: tuple[str, ...],
    new_tokens: int,
    top_k: int,
    full: bool,
    device: str,
    jobs: int | None,
    stream: bool,
    dry_run: bool,
    as_json: bool,
    **texts: int,
) -> None:
    """Run the source MODEL on fixed inputs and keep what it answers and what each layer does.

    The model is streamed layer by layer through transformers' own code. The folder can be copied to another machine,
    and any number of candidates compared with it by `quantkit-runtime compare`.
    """
    from quantkit.baseline.plan import Options, make_plan
    from quantkit.baseline.run import run_plan
    from quantkit.baseline.texts import TextOptions
    from quantkit.outdir import check_place

    check_place(out, model)
    options = Options(TextOptions(data=data, **texts), new_tokens, top_k, full)
    plan = make_plan(model, options, device=device, stream=stream)
    if dry_run:
        print_sizes(plan.describe(), as_json)
        return
    if not as_json:
        _announce(plan)
    result = run_plan(plan, out, jobs or 0)
    if as_json:
        print_json(result.baseline.model_dump(mode="json", exclude={"sequences"}))
    else:
        _show(result.baseline, out, already=result.already)


def _announce(plan: Plan) -> None:
    from quantkit.memory import human_bytes

    kept = "all layers stay in memory" if plan.resident else "one layer in memory at a time"
    console().print(
        f"{plan.tokens:,} tokens, {plan.passes} passes over {human_bytes(plan.weight_bytes)} of weights, {kept}: "
        f"{human_bytes(plan.read_bytes)} to read"
    )


def _show(baseline: Baseline, folder: Path, *, already: bool) -> None:
    from rich.table import Table

    out = console()
    if already:
        out.print(f"{folder} already holds this baseline; nothing was done", markup=False)
    table = Table(box=None, pad_edge=False, title="perplexity of the source", title_justify="left")
    for name in ("text", "positions", "tokens", "perplexity"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for row in baseline.perplexity:
        table.add_row(row.kind or "all", f"{row.start}-{row.stop - 1}", f"{row.tokens:,}", f"{row.perplexity:.3f}")
    out.print(table)
    for warning in baseline.warnings:
        out.print(f"warning: {warning}", markup=False)
    out.print(f"next: quantkit-runtime compare {quoted(folder)} CANDIDATE", markup=False, soft_wrap=True)
