"""`quantkit-runtime compare`: a candidate against the baseline of its source; exit code 4 when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import console, json_option, print_json, quoted
from quantkit.errors import VerificationError
from quantkit_instruments.commands.common import device_option, dtype_option, no_verify_option, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from quantkit.compare.result import Comparison

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("baseline", type=_FOLDER)
@click.argument("candidate", type=_FOLDER)
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML report to this file.")
@click.option("--limits", type=click.Path(path_type=Path), help="YAML that replaces single limits.")
@click.option("--save", is_flag=True, help="Keep what passed in CANDIDATE, for `quantkit-runtime regress`.")
@device_option
@dtype_option
@no_verify_option
@json_option
def command(
    baseline: Path,
    candidate: Path,
    report: Path | None,
    limits: Path | None,
    save: bool,
    device: str,
    dtype: str,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Hold a CANDIDATE (INT8 checkpoint, shards of one rank, or the source) against the BASELINE that `quantkit
    baseline` made of its source: distributions, greedy continuations, routing, needles in long texts, and every layer
    by itself on the source's input. What is wrong is located: layer, operator, expert.

    Exits with 4 when a limit is not kept.

    \b
    Example:
      quantkit-runtime compare BASELINE OUT --report comparison.html --save
    """
    from quantkit.compare.report import check_place, sentences, write_report
    from quantkit_instruments import compare, regress

    out = console(as_json)
    if report is not None:
        check_place(report)
    if save:
        regress.check_savable(candidate)
    options = compare.Options(baseline, candidate, device, dtype, limits, verify=not no_verify)
    result = compare.run(options)
    if report is not None:
        write_report(report, result)
        out.print(f"report: {report}", markup=False)
    if as_json:
        print_json(result.model_dump(mode="json"))
    _print(out, result)
    if not result.passed:
        raise VerificationError(
            "the candidate does not keep to the limits",
            "begin with the first finding; limits can be replaced with --limits, findings cannot",
            items=sentences(result),
        )
    out.print("passed: the candidate keeps to every limit")
    if save:
        out.print(f"saved: {regress.keep(options, result)}", markup=False)
        out.print(f"after an upgrade: quantkit-runtime regress {quoted(candidate)}", markup=False)


def _print(out: Console, result: Comparison) -> None:
    checks = [
        [
            check.name,
            "-" if check.value is None else f"{check.value:.4g}",
            f"{check.limit:g}",
            "ok" if check.passed else "FAILED",
            check.where,
        ]
        for check in result.checks
    ]
    print_table(out, "Limits", ["limit", "value", "allowed", "", "where"], checks)
    kinds = [
        [
            row.kind or "all",
            str(row.tokens),
            f"{row.kl_mean:.4f}",
            f"{row.kl_p99:.3f}",
            f"{row.cosine_mean:.4f}",
            f"{row.top1_agreement:.1%}",
            f"{row.source_perplexity:.3f}",
            f"{row.perplexity_ratio:.4f}",
        ]
        for row in result.kinds
    ]
    columns = ["text", "tokens", "KL mean", "KL p99", "cosine", "top-1", "perplexity", "ratio"]
    print_table(out, None, columns, kinds)
    for greedy in result.greedy:
        first = greedy.first
        end = (
            "same as the source's"
            if first is None
            else (
                f"token {first.step}: {first.source!r} (by {first.source_margin:.2f} nats) against {first.candidate!r} "
                f"(by {first.candidate_margin:.2f})"
            )
        )
        out.print(f"{greedy.prompt}: {greedy.agreed} of {greedy.tokens} tokens agree; {end}", markup=False)
