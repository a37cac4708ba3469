"""What the commands share: options of the device and the KV cache, a session from them, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from quantkit_runtime.engine import Engine
    from quantkit_runtime.graft import LoadedModel
    from quantkit_runtime.memory import MemoryTable
    from quantkit_runtime.sampling import Sampling

OPS = ("w8a8_gemm", "grouped_gemm", "quantize", "paged_decode", "paged_prefill", "rope_write")
"""Operations whose kernels a report names."""

_SHOWN: dict[str, Any] = {"show_default": True}
device_option = click.option("--device", default="auto", **_SHOWN, help="auto, cpu, cuda or hip.")
dtype_option = click.option(
    "--dtype", default="auto", **_SHOWN, help="Of all that is not INT8: auto, float32 or bfloat16."
)
no_verify_option = click.option("--no-verify", is_flag=True, help="Do not check checksums while reading.")

_OPTIONS = (
    device_option,
    dtype_option,
    click.option("--kv-keys", default="int8", **_SHOWN, help="Keys in the KV cache: int8, bf16, float32 or auto."),
    click.option("--kv-values", default="auto", **_SHOWN, help="Values in the KV cache; auto is the compute dtype."),
    click.option("--kv-block", type=click.IntRange(1), default=16, **_SHOWN, help="Positions in a KV block."),
    click.option("--chunk", type=click.IntRange(1), default=512, **_SHOWN, help="Tokens of a prefill forward."),
    click.option(
        "--fuse",
        default="all",
        **_SHOWN,
        help="Fusions: all, none, or of qkv, gate_up, act_quant, norm_quant, rope, by commas.",
    ),
    click.option(
        "--overlap",
        type=click.IntRange(0),
        default=0,
        **_SHOWN,
        help="Tokens from which sums over ranks overlap with computing; 0: never. Can pay between slow links.",
    ),
    click.option("--no-graphs", is_flag=True, help="Do not record forwards as graphs."),
    no_verify_option,
)


def session_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that `open_session` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_session(
    folder: Path,
    context: int,
    batch: int,
    *,
    device: str,
    dtype: str,
    kv_keys: str,
    kv_values: str,
    kv_block: int,
    chunk: int,
    fuse: str,
    overlap: int,
    no_graphs: bool,
    no_verify: bool,
    sampling: Sampling | None = None,
    stop: frozenset[int] = frozenset(),
) -> tuple[LoadedModel, Engine, MemoryTable]:
    """Load a folder and start a session for `batch` sequences of `context` positions."""
    from dataclasses import replace

    from quantkit_runtime import device as devices
    from quantkit_runtime import fuse as fusions
    from quantkit_runtime import session
    from quantkit_runtime.graft import load_model
    from quantkit_runtime.kv_cache import KvFormat
    from quantkit_runtime.memory import out_of_memory_as_error
    from quantkit_runtime.sampling import Sampling

    on = devices.resolve(device)
    compute = devices.compute_dtype(dtype, on)
    tokens = min(chunk, context * batch)
    kv = replace(KvFormat.of(kv_keys, kv_values, compute, kv_block), chunk=tokens)
    loaded = load_model(
        folder,
        on,
        compute,
        verify=not no_verify,
        cache_tokens=context,
        prompt_tokens=tokens,
        kv_format=kv,
        overlap=overlap,
    )
    fusions.apply(loaded.model, fusions.parse(fuse), paged=not isinstance(loaded.kv, str))
    options = session.Options(context, kv, batch, tokens, not no_graphs, sampling or Sampling(), stop)
    with out_of_memory_as_error(loaded.memory):
        engine, table = session.start(loaded, options)
    return loaded, engine, table


def session_report(loaded: LoadedModel, engine: Engine, table: MemoryTable) -> dict[str, Any]:
    """What a session runs on, for `--json`."""
    from quantkit_runtime.fuse import outcomes
    from quantkit_runtime.kernels import registry
    from quantkit_runtime.runner import prefill_facts

    runner = engine.runner
    return {
        "device": loaded.device.line,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kv_cache": runner.kind,
        "graphs": sorted(runner.graphs),
        "eager_because": "" if runner.graphs else runner.eager_because,
        "prefill_runs": prefill_facts(runner),
        "fusions": {row.name: {"fused": len(row.fused), "refused": row.refused} for row in outcomes(loaded.model)},
        "kernels": {op: registry.names(op, loaded.device.family)[:1] for op in OPS},
        "kernels_passed_over": registry.skipped(loaded.device.family),
        "memory": {**dict(table.rows()), "fits": table.fits},
    }


def print_session(out: Console, loaded: LoadedModel, engine: Engine, table: MemoryTable) -> None:
    """The memory table and what serves."""
    from quantkit_runtime.fuse import outcomes
    from quantkit_runtime.kernels import registry
    from quantkit_runtime.runner import prefill_facts

    runner = engine.runner
    graphs = f"graphs of {len(runner.graphs)} batch sizes" if runner.graphs else f"eager ({runner.eager_because})"
    print_device(out, loaded)
    out.print(f"KV cache: {runner.kind}; decode steps: {graphs}", markup=False)
    out.print(f"prefill: {prefill_line(prefill_facts(runner))}", markup=False)
    for row in outcomes(loaded.model):
        out.print(f"fusion {row.line}", markup=False)
    for line in registry.skipped(loaded.device.family):
        out.print(f"kernel passed over: {line}", markup=False)
    print_table(out, "Memory", ["what", "size"], [[name, human_size(size)] for name, size in table.rows()])
    if table.fits:
        rows = [[str(batch), f"{context:,}"] for batch, context in table.fits]
        print_table(out, "What the memory has room for", ["sequences", "positions of each"], rows)


def prefill_line(facts: dict[str, Any]) -> str:
    """How chunks run, from `prefill_facts` of a runner."""
    sizes = ", ".join(f"{tokens:,}" for tokens in facts["graphs"])
    graphs = f"graphs of {sizes} tokens" if sizes else f"eager ({facts['eager_because']})"
    return f"{graphs}; attention: {facts['attention']}"


def print_device(out: Console, loaded: LoadedModel) -> None:
    out.print(f"device: {loaded.device.line}; computes in {str(loaded.dtype).removeprefix('torch.')}")


def print_table(out: Console, title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def human_size(size: int) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    value, unit = float(size), 0
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.2f} {units[unit]}"
