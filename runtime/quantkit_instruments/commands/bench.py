"""`quantkit-runtime bench`: prefill, decode and a batch sweep, beside the source model in BF16 where that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json
from quantkit.errors import UsageError
from quantkit_instruments.commands.common import (
    open_session,
    print_session,
    print_table,
    session_options,
    session_report,
)

if TYPE_CHECKING:
    from rich.console import Console

    from quantkit_instruments.bench import Speeds


def _numbers(_: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        found = sorted({int(part) for part in value.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"--{param.name} takes positive numbers with commas between, not {value!r}")
    return found


@click.command("bench")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--lengths", default="128,512,2048,8192", show_default=True, callback=_numbers, help="Tokens of prompts.")
@click.option("--batches", default="1,2,4,8,16,32,64", show_default=True, callback=_numbers, help="Of the batch sweep.")
@click.option("--sweep-length", type=click.IntRange(1), default=512, show_default=True, help="Prompts of the sweep.")
@click.option("--steps", type=click.IntRange(2), default=64, show_default=True, help="Decode steps of each shape.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Prefills of each length.")
@click.option(
    "--baseline",
    type=(click.Choice(["bf16"]), click.Path(path_type=Path)),
    help="bf16 SOURCE: measure the source model as well, in this process.",
)
@click.option("--ablate", is_flag=True, help="Also turn the fusions on one by one, at the sweep's length.")
@session_options
@json_option
def command(
    folder: Path,
    lengths: list[int],
    batches: list[int],
    sweep_length: int,
    steps: int,
    repeats: int,
    baseline: tuple[str, Path] | None,
    ablate: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a converted FOLDER on this device: every prompt new, two full-length runs of each shape before it counts.

    \b
    Examples:
      quantkit-runtime bench OUT
      quantkit-runtime bench OUT --baseline bf16 SOURCE --json > bench.json
      quantkit-runtime bench OUT --ablate --lengths 512 --batches 1
    """
    from quantkit_instruments import bench
    from quantkit_instruments.tokenizer import max_positions, require_positions
    from quantkit_runtime import device as devices
    from quantkit_runtime.loader import require_folder
    from quantkit_runtime.parallel import leave

    def measure(
        root: Path, lengths: Sequence[int], batches: Sequence[int], **changed: Any
    ) -> tuple[dict[str, Any], Speeds]:
        devices.forget()
        remedy = "give smaller --lengths, a smaller --sweep-length or fewer --steps"
        context = require_positions(root, max(*lengths, sweep_length), steps + 1, remedy)
        loaded, engine, table = open_session(root, context, batches[-1], **{**options, **changed})
        print_session(out, loaded, engine, table)
        speeds = bench.Bench(engine, loaded.files.dims.vocab, steps=steps, repeats=repeats).run(
            lengths, batches, sweep_length
        )
        peak = loaded.device.peak_memory()
        report = session_report(loaded, engine, table)
        return {**report, "memory_peak": peak, **bench.as_json(speeds, sweep_length)}, speeds

    out = console(as_json)
    require_folder(folder)
    longest = max_positions(folder) - steps
    for length in [length for length in lengths if length > longest]:
        out.print(f"not measured, the model has no such positions: {length:,} tokens and {steps} new ones")
    lengths = [length for length in lengths if length <= longest] or lengths
    report, speeds = measure(folder, lengths, batches)
    reports: dict[str, Any] = {"candidate": report}
    source = None
    if baseline is not None:
        out.rule("the source in BF16", align="left")
        reports["baseline"], source = measure(
            baseline[1], lengths, batches, dtype="bfloat16", kv_keys="bf16", kv_values="bf16", no_verify=True
        )
    _print(out, speeds, source, sweep_length)
    if ablate:
        reports["ablation"] = _ablation(out, lambda fuse: measure(folder, (sweep_length,), (1,), fuse=fuse))
    leave()
    if as_json:
        print_json(reports)


def _print(out: Console, speeds: Speeds, source: Speeds | None, sweep: int) -> None:
    before = {row.length: row.ttft for row in source.prefill} if source else {}
    rows = [
        [
            f"{row.length:,}",
            f"{row.ttft * 1e3:.1f}",
            f"{row.tokens_per_second:,.0f}",
            _ratio(before, row.length, row.ttft),
        ]
        for row in speeds.prefill
    ]
    print_table(out, "Prefill", ["tokens", "first token, ms", "tokens/s", "times BF16"], rows)
    steps = {(row.length, row.batch): row.p50 for row in source.decode} if source else {}
    rows = [
        [
            f"{row.length:,}",
            str(row.batch),
            f"{row.p50 * 1e3:.2f}",
            f"{row.p99 * 1e3:.2f}",
            f"{row.tokens_per_second:,.1f}",
            _ratio(steps, (row.length, row.batch), row.p50),
        ]
        for row in speeds.decode
    ]
    columns = ["behind tokens", "sequences", "p50, ms a token", "p99", "tokens/s of all", "times BF16"]
    print_table(out, "Decode", columns, rows)
    for length, batch in speeds.left_out:
        out.print(f"not measured, the KV pool has no room: {batch} sequences behind {length:,} tokens")
    found = speeds.knee(sweep)
    if found is not None:
        best, enough = found
        out.print(f"most tokens/s behind {sweep:,} tokens: {best} sequences at once; {enough} give at least 90 % of it")


def _ablation(out: Console, measure: Callable[[str], tuple[dict[str, Any], Speeds]]) -> list[dict[str, Any]]:
    """Prefill and decode with none of the fusions, then with one more each time."""
    from quantkit_runtime.fuse import PASSES

    names = list(PASSES)
    found: list[dict[str, Any]] = []
    for count in range(len(names) + 1):
        _, speeds = measure(",".join(names[:count]) or "none")
        added = names[count - 1] if count else "none"
        found.append({"added": added, "ttft": speeds.prefill[0].ttft, "p50": speeds.decode[0].p50})
    rows = [
        [
            row["added"] if row is found[0] else f"+ {row['added']}",
            f"{row['ttft'] * 1e3:.2f}",
            f"{before['ttft'] / row['ttft']:.3f}",
            f"{row['p50'] * 1e3:.3f}",
            f"{before['p50'] / row['p50']:.3f}",
        ]
        for before, row in zip([found[0], *found], found, strict=False)
    ]
    columns = ["fusions", "first token, ms", "gain", "p50, ms a token", "gain"]
    print_table(out, "Fusions, one by one", columns, rows)
    return found


def _ratio(before: dict[Any, float], shape: Any, seconds: float) -> str:
    return f"{before[shape] / seconds:.2f}" if shape in before else "-"
