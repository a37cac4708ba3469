"""`quantkit-runtime commcheck`: the collectives of a mesh, checked and timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json
from quantkit.errors import UsageError, VerificationError
from quantkit_instruments.commands.common import device_option, print_table

if TYPE_CHECKING:
    from rich.console import Console


@click.command("commcheck")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--tp", type=click.IntRange(1), default=1, help="Sizes of the mesh, if no FOLDER of shards is given.")
@click.option("--pp", type=click.IntRange(1), default=1)
@click.option("--ep", type=click.IntRange(1), default=1)
@click.option("--dp", type=click.IntRange(1), default=1)
@device_option
@click.option(
    "--mib", type=click.IntRange(1), default=64, show_default=True, help="Message on each rank, for bandwidth."
)
@click.option(
    "--repeats", type=click.IntRange(1), default=20, show_default=True, help="Timed calls; the median counts."
)
@json_option
def command(
    folder: Path | None, tp: int, pp: int, ep: int, dp: int, device: str, mib: int, repeats: int, as_json: bool
) -> None:
    """Check and time all-reduce, all-gather, all-to-all and send/recv over every team of a mesh, that of shards in
    FOLDER or of the given sizes. Warns when a tensor-parallel team leaves a node. Exits with 4 on a wrong result.

    \b
    Example:
      torchrun --nproc-per-node 8 -m quantkit_instruments.cli commcheck --tp 4 --pp 2
    """
    from quantkit.spec.mesh import Mesh
    from quantkit_instruments import comm
    from quantkit_runtime import device as devices
    from quantkit_runtime import parallel
    from quantkit_runtime.loader import mesh_of

    on = devices.resolve(device)
    mesh = mesh_of(folder) if folder else Mesh(tp=tp, pp=pp, ep=ep, dp=dp)
    if not folder and (problems := mesh.problems(pp, ep)):
        raise UsageError("there is no such mesh", "change these sizes", items=problems)
    rows, warnings = comm.check(mesh, on, mib * 2**20, repeats)
    report = comm.as_json(mesh, on, rows, warnings)
    parallel.leave()
    if as_json:
        print_json(report)
    _print(console(as_json), report)
    if not report["passed"]:
        wrong = [f"{row.collective} over {row.teams}" for row in rows if not row.correct]
        raise VerificationError(f"{len(wrong)} collectives give wrong results", "check links and driver", items=wrong)


def _print(out: Console, report: dict[str, Any]) -> None:
    out.print(f"device: {report['device']}; carried by {report['backend']}")
    rows = [
        [
            row["teams"],
            str(row["size"]),
            row["collective"],
            "yes" if row["correct"] else "NO",
            f"{row['latency'] * 1e6:.0f} us",
            f"{row['bandwidth'] / 1e9:.2f} GB/s",
        ]
        for row in report["collectives"]
    ]
    print_table(out, "Collectives", ["teams", "ranks", "collective", "correct", "latency", "bandwidth of a link"], rows)
    for warning in report["warnings"]:
        out.print(f"warning: {warning}")
