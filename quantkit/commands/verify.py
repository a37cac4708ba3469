"""`quantkit verify`: manifest, files, index, config and source against each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import console, json_option, print_json

if TYPE_CHECKING:
    from quantkit.convert.checks import VerifyReport

_EPILOG = """\b
Examples:
  quantkit verify OUT                    checksums, names, index, config
  quantkit verify OUT --source MODEL     also every weight against the source
  quantkit verify OUT --source MODEL --calibration CALIBRATION
                                         the same where methods learned from text
  quantkit verify OUT --source MODEL --sample 5%
                                         values of a twentieth of the tensors
  quantkit verify OUT --quick            sizes and headers only
  quantkit verify OUT --public-key K.pub also that it was signed with this key
"""

_SHOWN = 20


@click.command("verify", epilog=_EPILOG)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--source", type=click.Path(path_type=Path), help="The model that it was converted from.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Its calibration, for --source: needed where the recipe's methods learn from text.",
)
@click.option("--quick", is_flag=True, help="Names, sizes and headers only; no data is read.")
@click.option(
    "--sample",
    metavar="N|SHARE",
    help="Compare the values of N tensors, or of a share of them as 0.05 or 5%, with the source instead of all: at "
    "least one of every role and every layer. All else is checked in full.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the choice of --sample.")
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: the cores, at most 8.")
@click.option(
    "--public-key",
    type=click.Path(path_type=Path),
    help="PEM file of an elliptic-curve key: FOLDER must be signed with its private half. Needs quantkit[sign].",
)
@json_option
def command(
    folder: Path,
    source: Path | None,
    calibration: Path | None,
    quick: bool,
    sample: str | None,
    seed: int,
    jobs: int | None,
    public_key: Path | None,
    as_json: bool,
) -> None:
    """Verify the converted FOLDER. Exit code 4 if any check fails, with every failure named."""
    from quantkit.convert.run import default_jobs
    from quantkit.convert.sample import Sample
    from quantkit.convert.verify import verify
    from quantkit.errors import UsageError

    if sample is not None and (source is None or quick):
        raise UsageError("--sample says what is compared with the source", "give --source MODEL, and not --quick")
    chosen = None if sample is None else Sample.parse(sample, seed)
    workers = jobs or default_jobs()
    report = verify(
        folder,
        source=source,
        quick=quick,
        jobs=workers,
        public_key=public_key,
        sample=chosen,
        calibration=calibration,
    )
    if as_json:
        print_json({**report.model_dump(mode="json"), "passed": report.passed})
    else:
        _render(report)
    if not report.passed:
        raise SystemExit(4)


def _render(report: VerifyReport) -> None:
    from rich.table import Table

    from quantkit.convert.verify_source import SOURCE_CHECK

    table = Table("check", "looked at", "wrong", "note", title=None)
    for check in report.checks:
        table.add_row(check.name, f"{check.count:,}", str(len(check.failures)), check.note)
    shown = console()
    shown.print(table)
    for failure in report.failures[:_SHOWN]:
        shown.print(f"  - {failure}", markup=False)
    if len(report.failures) > _SHOWN:
        shown.print(f"  ... and {len(report.failures) - _SHOWN} more (--json prints all)")
    if report.passed:
        part = f" ({report.compared:,} of {report.tensors:,} tensors compared with the source)"
        shown.print(f"{report.folder}: verified{part if report.compared < report.tensors else ''}", markup=False)
    else:
        shown.print(f"{report.folder}: {len(report.failures)} failures", markup=False)
        if any(check.name == SOURCE_CHECK and check.failures for check in report.checks):
            shown.print(
                "next: give --source the model that was converted, as it was then; if it has changed, convert again"
            )
        else:
            shown.print("next: copy the named files again, or convert again into a new folder")
