"""`quantkit-runtime smoke-load`: load, run, report memory, checksums and every GEMM, of every rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.console import console, json_option, print_json
from quantkit_instruments.commands.common import (
    device_option,
    dtype_option,
    human_size,
    no_verify_option,
    prefill_line,
    print_device,
    print_table,
)

if TYPE_CHECKING:
    from rich.console import Console

    from quantkit_instruments.smoke import Result
    from quantkit_runtime.graft import LoadedModel
    from quantkit_runtime.memory import MemoryPlan


@click.command("smoke-load")
@click.argument("folder", type=click.Path(path_type=Path))
@device_option
@click.option("--prompt", default="The", show_default=True, help="Text to continue.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to generate.")
@dtype_option
@no_verify_option
@json_option
def command(
    folder: Path, device: str, prompt: str, max_new_tokens: int, dtype: str, no_verify: bool, as_json: bool
) -> None:
    """Load a converted FOLDER (either form) into transformers' model, run a forward and a greedy generation, and
    count every GEMM by kernel and dtype. Exits with 4 when a GEMM that is stored in INT8 did not run in INT8.

    Shards of a mesh want one process for each rank; the first one prints what all of them report.

    \b
    Example:
      quantkit-runtime smoke-load OUT --prompt "Once upon a time" --max-new-tokens 40
      torchrun --nproc-per-node 4 -m quantkit_instruments.cli smoke-load SHARDS
    """
    from quantkit_instruments import smoke
    from quantkit_runtime.parallel import leave

    out = console(as_json)
    options = smoke.Options(folder, device, dtype, prompt, max_new_tokens, verify=not no_verify)
    result = smoke.run(options, lambda plan: _print_plan(out, plan), lambda loaded: _print_loaded(out, loaded))
    reports = smoke.reports(result)
    leave()
    if as_json:
        passed = all(report["passed"] for report in reports)
        print_json({**reports[0], "passed": passed, "ranks": reports if len(reports) > 1 else []})
    _print_result(out, result)
    _print_ranks(out, reports)
    smoke.require(reports)
    out.print("passed: everything that the files hold in INT8 ran in INT8" if result.verdict.expected else "passed")


def _print_plan(out: Console, plan: MemoryPlan) -> None:
    rows = [[name, human_size(size)] for name, size in [*plan.rows(), ("total", plan.total), ("free", plan.free)]]
    print_table(out, "Memory, planned", ["what", "size"], rows)


def _print_loaded(out: Console, loaded: LoadedModel) -> None:
    files, checked = loaded.files, loaded.checked
    print_device(out, loaded)
    out.print(f"loaded: {files.root} ({files.form}, architecture record {files.arch.name})")
    if checked.names:
        read = f"{len(checked.names)} tensors in {len(checked.files)} files"
        out.print(f"checksums: {read} correct, {human_size(checked.nbytes)}")
    else:
        out.print("checksums: none checked (no manifest, or --no-verify)")
    if loaded.unused:
        out.print(f"not built by transformers' model, left unread: {len(loaded.unused)} tensors")


def _print_ranks(out: Console, reports: list[dict[str, Any]]) -> None:
    """What changed since the conversion, then one row for each rank, with what can differ between them."""
    for event in reports[0]["changed_since"]:
        out.print(f"note: since {event['event']}: {'; '.join(event['changed'])}", markup=False)
        out.print(f"  next: {event['command']}", markup=False)
    busiest = [
        max((max(load) * len(load) / max(sum(load), 1) for load in report["expert_load"].values()), default=0.0)
        for report in reports
    ]
    rows = [
        [
            str(report["rank"]["rank"]),
            " ".join(f"{name}{report['rank'][name]}" for name in ("pp", "dp", "tp", "ep")),
            str(len(report["rank"]["layers"])),
            str(len(report["rank"]["experts"])),
            f"{load:.1f} x mean" if load else "-",
            human_size(sum(size for name, size in report["memory"]["planned"].items() if name.startswith("weights"))),
            human_size(report["memory"]["peak"] or report["memory"]["used_after"]),
            human_size(report["checksums"]["bytes"]),
            f"{report['int8']['run']} / {report['int8']['expected']}",
            str(len(report["int8"]["fallbacks"])),
        ]
        for report, load in zip(reports, busiest, strict=True)
    ]
    columns = ["rank", "place", "layers", "experts", "busiest", "weights", "held", "checked", "INT8 run", "fallbacks"]
    if len(reports) > 1:
        print_table(out, "Ranks", columns, rows)
    elif busiest[0]:
        out.print(f"busiest expert of a layer: {busiest[0]:.1f} x the mean")


def _print_result(out: Console, result: Result) -> None:
    generated, verdict = result.generated, result.verdict
    rows = [
        ["held before loading", human_size(result.memory_before)],
        ["held after generation", human_size(result.memory_after)],
        ["KV cache", human_size(result.cache_bytes)],
    ]
    rows += [["largest amount on the card", human_size(result.memory_peak)]] if result.memory_peak else []
    print_table(out, "Memory, measured", ["what", "size"], rows)
    out.print(f"KV cache: {result.cache}")
    out.print(f"prefill: {prefill_line(result.prefill)}", markup=False)
    finite = "all finite" if result.logits_finite else "NOT FINITE"
    out.print(f"forward: logits {list(result.logits_shape)}, {finite}")
    out.print(f"generated {len(generated.tokens)} tokens{' up to a stop token' if generated.stopped else ''}:")
    out.print(f"  {result.text!r}", markup=False)
    gemms = [[row.kernel, row.dtype, row.phase, str(row.weights or "-"), str(row.calls)] for row in result.rows]
    print_table(out, "GEMMs", ["kernel", "dtype", "in", "weights", "calls"], gemms)
    if verdict.expected:
        ran = verdict.forward + verdict.self_tested
        out.print(
            f"INT8 GEMM weights run / expected: {ran} / {verdict.expected} ({100 * ran / verdict.expected:.1f} %); "
            f"in the forward {verdict.forward}, in the self-test {verdict.self_tested} (experts that no token was "
            f"routed to), floating-point fallbacks {len(verdict.fallbacks)}, never {len(verdict.missing)}"
        )
    else:
        out.print("INT8 GEMM weights: the files hold none")
