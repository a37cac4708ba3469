"""`quantkit-runtime tune`: measure the kernels on this card and keep the fastest shapes."""

from __future__ import annotations

from pathlib import Path

import click

from quantkit.console import console, json_option, print_json


@click.command("tune")
@click.option("--output", type=click.Path(path_type=Path), help="File of tables; default is the one that runs read.")
@json_option
def command(output: Path | None, as_json: bool) -> None:
    """Measure tile sizes, the hand-over from the GEMV to tiles, and decode attention on this card (some minutes: every
    candidate is compiled once), and write its table where every run looks first: ~/.cache/quantkit/tuning.json, or
    what QUANTKIT_TUNING names. A table changes speed only, never a result.

    \b
    Example:
      quantkit-runtime tune
    """
    from dataclasses import asdict

    from quantkit.errors import UsageError
    from quantkit_instruments.tune import Tuner, require_triton
    from quantkit_runtime import device as devices
    from quantkit_runtime.kernels import tuning

    out, card = console(as_json), devices.resolve()
    if card.family == "cpu":
        raise UsageError("there is no card to tune for", "run it where torch sees a HIP or CUDA card")
    require_triton()
    path = output or tuning.user_file()
    out.print(f"device: {card.line}")
    tuner = Tuner(out.print)
    table = tuner.run()
    tuning.write(path, card.arch, table)
    out.print(f"written: {path}")
    if as_json:
        # what did not compile has no time
        rows = [{**asdict(row), "us": row.us if row.us < float("inf") else None} for row in tuner.rows]
        print_json({"card": card.arch, "file": str(path), "table": tuning.as_json(table), "measured": rows})
