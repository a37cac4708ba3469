"""`quantkit merge`: rank shards back to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.console import console, json_option, print_json, quoted

_EPILOG = """\b
Example:
  quantkit merge SHARDS -o CHECKPOINT
"""


@click.command("merge", epilog=_EPILOG)
@click.argument("shards", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="New folder, outside SHARDS.")
@click.option("--jobs", type=click.IntRange(1), help="Threads; default: the cores, at most 8.")
@json_option
def command(shards: Path, out: Path, jobs: int | None, as_json: bool) -> None:
    """Merge the rank shards of a folder into a checkpoint that engines load, bit for bit.

    The weight files equal those of `quantkit convert` to a checkpoint with the same recipe. To split shards for another
    mesh, give them to `quantkit convert` as MODEL.
    """
    from quantkit.convert.merge import merge
    from quantkit.heap import return_large_blocks

    return_large_blocks()
    manifest = merge(shards, out, jobs=jobs or 0)
    if as_json:
        print_json({"out": str(out), "tensors": len(manifest.tensors), "options_digest": manifest.options_digest})
        return
    console().print(f"{out}: checkpoint of {len(manifest.tensors):,} tensors", markup=False)
    console().print(f"next: quantkit verify {quoted(out)} --source MODEL", markup=False, soft_wrap=True)
