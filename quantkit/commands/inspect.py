"""`quantkit inspect`: what a checkpoint is, in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import console, json_option, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quantkit.inspect import Inspection


@click.command(
    "inspect",
    epilog="""\b
Example:
  quantkit inspect tests/models/tiny-minimax-m2
  quantkit inspect config.json
""",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--recipe", default="w8a8", show_default=True, metavar="NAME|FILE", help="Recipe of the INT8 columns.")
@json_option
def command(model: Path, recipe: str, as_json: bool) -> None:
    """Describe the checkpoint in the folder MODEL from its config and headers, or a config.json alone.

    Problems come first, each with its remedy. Exit code 3 if the checkpoint cannot be converted as it is.
    """
    from quantkit.inspect import inspect

    found = inspect(model, recipe)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        render(found, console())
    if not found.sound:
        raise SystemExit(3)


def render(found: Inspection, out: Console) -> None:
    """Problems, two lines, the table by role column, what the recipe makes of it, and the operators."""
    from quantkit.inspect import details_line, inspect_line
    from quantkit.memory import human_bytes, human_count

    for problem in found.problems:
        out.print(f"{problem.level}: {problem.what}", markup=False)
        for item in problem.items:
            out.print(f"  - {item}", markup=False)
        out.print(f"  next: {problem.remedy}", markup=False)
    out.print(inspect_line(found), markup=False)
    out.print(details_line(found), markup=False)
    out.print(_table(found))
    share = found.quantized / found.parameters if found.parameters else 0.0
    out.print(
        f"recipe {found.recipe}: {human_count(found.quantized)} parameters ({share:.1%}) to INT8, "
        f"{human_bytes(found.nbytes)} -> {human_bytes(found.output_nbytes)}",
        markup=False,
    )
    if found.output_nbytes > found.nbytes and found.quantized:
        out.print("note: the source is smaller than its INT8 form; keep it where cards read it natively")
    for line in _operator_lines(found):
        out.print(line, markup=False)


def _table(found: Inspection) -> Table:
    from rich.table import Table

    from quantkit.memory import human_bytes, human_count

    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    for name in ("tensors", "parameters", "bytes", "to INT8", "bytes after"):
        table.add_column(name, justify="right")
    for row in found.columns:
        table.add_row(
            row.name,
            str(row.tensors),
            human_count(row.parameters),
            human_bytes(row.nbytes),
            human_count(row.quantized) if row.quantized else "-",
            human_bytes(row.output_nbytes),
        )
    return table


def _operator_lines(found: Inspection) -> Iterator[str]:
    """The operator list, one line for a function: who runs it here, of what it is made, what to watch."""
    width = max((len(row.function) for row in found.operators), default=0)
    yield f"{'operators of':{width}}  {'run by':10}  what they are | what to watch"
    for row in found.operators:
        yield f"{row.function:{width}}  {row.state:10}  {row.operators} | {row.watch}"
