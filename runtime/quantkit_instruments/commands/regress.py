"""`quantkit-runtime regress`: the saved comparison again, after an upgrade; exit code 4 when it does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import FiniteRange, console, json_option, print_json
from quantkit.errors import VerificationError
from quantkit_instruments.commands.common import print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quantkit.compare.saved import Moved
    from quantkit_instruments.regress import Outcome

_FOLDER = click.Path(path_type=Path)


@click.command("regress")
@click.argument("folder", type=_FOLDER)
@click.option("--baseline", type=_FOLDER, help="Where the baseline lies now, if not beside FOLDER.")
@click.option(
    "--tolerance",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor on how far figures may move.",
)
@json_option
def command(folder: Path, baseline: Path | None, tolerance: float, as_json: bool) -> None:
    """Run the comparison that `compare --save` kept in FOLDER again, with its options and limits, and say what moved.

    For after an upgrade of torch, driver or kernels: versions that changed are named, every figure is shown then and
    now. Exits with 4 when a limit is not kept, or when a figure moved by more than it may: up or down, since figures
    that suddenly improve come from another arithmetic.

    \b
    Example:
      quantkit-runtime compare BASELINE OUT --save
      quantkit-runtime regress OUT
    """
    from quantkit.compare.report import sentences
    from quantkit_instruments import regress

    out = console(as_json)
    outcome = regress.run(folder, baseline, tolerance)
    if as_json:
        print_json(_as_json(outcome))
    if outcome.changed:
        print_table(out, "Changed since", ["what", "then", "now"], [list(row) for row in outcome.changed])
    moved = [row for row in outcome.moved if not row.passed]
    rows = [row for row in outcome.moved if "layers." not in row.name or row in moved]
    print_table(
        out,
        "Figures",
        ["figure", "then", "now", "may move by", ""],
        [_row(row) for row in [*rows, *_furthest(outcome.moved, moved)]],
    )
    if not outcome.passed:
        failed = [f"{row.name}: {_number(row.then)} then, {_number(row.now)} now" for row in moved]
        changed = ", ".join(row.name for row in outcome.changed) or "nothing that is recorded"
        raise VerificationError(
            f"the saved comparison does not hold any more; changed since: {changed}",
            "go back to the versions that were recorded, or find the cause: `quantkit-runtime compare` locates it. If "
            "the new figures are right, keep them with `compare --save`",
            items=[*sentences(outcome.result), *failed],
        )
    out.print(f"passed: {len(outcome.moved)} figures are where they were, and keep to every limit")


def _furthest(every: Iterable[Moved], shown: list[Moved]) -> list[Moved]:
    """Of each figure by layer that holds in all layers, the layer where it moved furthest."""
    found: dict[str, Moved] = {}
    for row in every:
        name = row.name.partition(" ")[0]
        if "layers." in row.name and (name not in found or abs(row.change) > abs(found[name].change)):
            found[name] = row
    return [row for row in found.values() if row not in shown]


def _row(row: Moved) -> list[str]:
    verdict = "ok" if row.passed else "MOVED"
    return [row.name, _number(row.then), _number(row.now), f"{row.allowed:.2g}", verdict]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "passed": outcome.passed,
        "changed": [row._asdict() for row in outcome.changed],
        "figures": [{**row._asdict(), "passed": row.passed} for row in outcome.moved],
        "comparison": outcome.result.model_dump(mode="json"),
    }
