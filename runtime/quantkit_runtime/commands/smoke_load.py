"""`quantkit-runtime smoke-load`: load one rank, run it, report memory, checksums and every GEMM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import console, json_option, print_json
from quantkit_runtime.commands.common import human_size, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from quantkit_runtime.graft import LoadedModel
    from quantkit_runtime.memory import MemoryPlan
    from quantkit_runtime.smoke import Result


@click.command("smoke-load")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or hip.")
@click.option("--prompt", default="The", show_default=True, help="Text to continue.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to generate.")
@click.option("--dtype", default="auto", show_default=True, help="Of all that is not INT8: auto, float32 or bfloat16.")
@click.option("--no-verify", is_flag=True, help="Do not check checksums while reading.")
@json_option
def command(
    folder: Path, device: str, prompt: str, max_new_tokens: int, dtype: str, no_verify: bool, as_json: bool
) -> None:
    """Load a converted FOLDER (either form) into transformers' model, run a forward and a greedy generation, and
    count every GEMM by kernel and dtype. Exits with 4 when a GEMM that is stored in INT8 did not run in INT8.

    \b
    Example:
      quantkit-runtime smoke-load OUT --prompt "Once upon a time" --max-new-tokens 40
    """
    from quantkit_runtime import smoke

    out = console(as_json)
    options = smoke.Options(folder, device, dtype, prompt, max_new_tokens, verify=not no_verify)
    result = smoke.run(options, lambda plan: _print_plan(out, plan), lambda loaded: _print_loaded(out, loaded))
    if as_json:
        print_json(smoke.as_json(result))
    _print_result(out, result)
    smoke.require(result)
    out.print("passed: everything that the files hold in INT8 ran in INT8" if result.verdict.expected else "passed")


def _print_plan(out: Console, plan: MemoryPlan) -> None:
    rows = [[name, human_size(size)] for name, size in [*plan.rows(), ("total", plan.total), ("free", plan.free)]]
    print_table(out, "Memory, planned", ["what", "size"], rows)


def _print_loaded(out: Console, loaded: LoadedModel) -> None:
    files, checked = loaded.files, loaded.checked
    out.print(f"device: {loaded.device.line}; computes in {str(loaded.dtype).removeprefix('torch.')}")
    out.print(f"loaded: {files.root} ({files.form}, architecture record {files.arch.name})")
    if checked.names:
        read = f"{len(checked.names)} tensors in {len(checked.files)} files"
        out.print(f"checksums: {read} correct, {human_size(checked.nbytes)}")
    else:
        out.print("checksums: none checked (no manifest, or --no-verify)")
    if loaded.unused:
        out.print(f"not built by transformers' model, left unread: {len(loaded.unused)} tensors")


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
