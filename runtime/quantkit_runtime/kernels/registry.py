"""Which kernel runs an operation on a device: rows of data, imported on use.

An operation has one signature for all devices; `kernels.reference` is its definition:

- `w8a8_gemm(x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype) -> [T, N]`: INT8 product, exact in int32, then the
  float32 epilogue. `x_scale` is float32 `[T, 1]`, or `[T, G]` for activations quantized per group of K / G inputs.
- `grouped_gemm(x_RK, x_scale, w_ENK, w_scale_EN1, bias_EN, alignment, share, out_dtype) -> [S, N]`: the same for
  routed experts in tiles of one expert.
- `expert_gemm(x_RK, x_scale, w_ENK, w_scale_EN1, bias_EN, index_Tk, share, out_dtype) -> [S, N]`: the same slot by
  slot, for few tokens.
- `quantize_gemm(x_TK, w_NK, w_scale_N1, bias_N, out_dtype) -> [T, N]`: `quantize` and the product in one kernel, for
  one token.
- `quantize`, `norm_quantize`, `silu_mul_quantize`: int8 and scales of activations, with what comes before.
- `align`, `combine`: routing into tiles and the weighted sum back.
- `rope_write`: rotary embedding and the write of keys and values into a paged cache.
- `paged_decode`: attention of one query per sequence over a paged cache.
- `paged_prefill`: causal attention of packed queries over it, in tiles of one sequence.

A new kernel is one file and one row here; a row above another of the same key is preferred. A row that cannot serve (no
compiler, no Triton, a failed self-test) is passed over, and `skipped` says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.errors import QuantkitError, UsageError, first_line

VARIABLE = "QUANTKIT_KERNELS"
"""Environment variable: `torch` uses only kernels that need neither Triton nor a compiler."""

TRITON, COMPILER = "Triton", "a compiler"
"""What a row may need."""


@dataclass(frozen=True)
class Row:
    """One kernel.

    Attributes:
        op: operation.
        layout: of the weight, a row of the layouts in the manifest.
        family: "cpu", "cuda" or "hip".
        name: shown in the table of executed GEMMs.
        target: `module:function` in this package.
        needs: what must be there besides torch.
        few: serves at most the number of tokens at which the device's table hands over.
        one: serves one token.
        multiple: K and the group size must be multiples of it.
        most_k: longest K.
    """

    op: str
    layout: str
    family: str
    name: str
    target: str
    needs: str = ""
    few: bool = False
    one: bool = False
    multiple: int = 1
    most_k: int = 1 << 30


def _card_rows(op: str, name: str, target: str, **columns: Any) -> tuple[Row, ...]:
    return tuple(Row(op, "plain", family, name, target, **columns) for family in ("cuda", "hip"))


def _triton_rows(module: str, *ops: str) -> tuple[Row, ...]:
    return tuple(row for op in ops for row in _card_rows(op, "triton", f"triton.{module}:{op}", needs=TRITON))


FUSED = ("quantize", "norm_quantize", "silu_mul_quantize")
ROUTED = ("align", "combine")
PAGED = ("paged_decode", "paged_prefill", "rope_write")

ROWS: tuple[Row, ...] = (
    *_card_rows("w8a8_gemm", "streaming-gemv", "gemv:w8a8_gemm", needs=COMPILER, few=True, multiple=16),
    *_card_rows("expert_gemm", "streaming-gemv", "gemv:expert_gemm", needs=COMPILER, few=True, multiple=16),
    Row(  # where kernels follow each other without a pause, as on Hopper cards, two are faster than this one
        "quantize_gemm",
        "plain",
        "hip",
        "streaming-gemv",
        "gemv:quantize_gemm",
        needs=COMPILER,
        one=True,
        multiple=16,
        most_k=8192,
    ),
    *_triton_rows("gemm", "w8a8_gemm", "grouped_gemm"),
    *_triton_rows("quantize", *FUSED),
    *_triton_rows("routing", *ROUTED),
    *_triton_rows("attention", "paged_decode"),
    *_triton_rows("prefill", "paged_prefill"),
    *_triton_rows("cache", "rope_write"),
    *_card_rows("w8a8_gemm", "torch._int_mm", "int_mm:w8a8_gemm"),
    *(row for op in (*FUSED, *PAGED) for row in _card_rows(op, "torch", f"reference:{op}")),
    Row("w8a8_gemm", "plain", "cpu", "f32-chunks", "reference:w8a8_gemm"),
    *(Row(op, "plain", "cpu", "torch", f"reference:{op}") for op in ("grouped_gemm", *FUSED, *ROUTED, *PAGED)),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to call."""

    name: str
    run: Callable[..., Any]


@dataclass(frozen=True)
class _Usable:
    row: Row
    kernel: Kernel


_skipped: dict[Row, str] = {}


def find(op: str, family: str, layout: str = "plain", *, rows: int = 1 << 30, k: int = 0, group: int = 0) -> Kernel:
    """The preferred kernel of an operation on a device family for this number of tokens.

    Args:
        rows: tokens of the call.
        k, group: inputs and group size; 0 means any.

    Raises:
        UsageError: no row serves this operation, layout and family.
    """
    for found in _usable(op, family, layout):
        if _serves(found.row, rows, k, group):
            return found.kernel
    raise UsageError(
        f"no kernel for {op} on {family} with weights in layout {layout}",
        "convert for a layout that this device has a kernel for",
        choices=sorted({f"{row.op} {row.layout} on {row.family}" for row in ROWS}),
    )


def has(op: str, family: str, layout: str = "plain", *, rows: int = 1 << 30, k: int = 0, group: int = 0) -> bool:
    """Whether `find` would succeed."""
    return any(_serves(found.row, rows, k, group) for found in _usable(op, family, layout))


def names(op: str, family: str, layout: str = "plain") -> list[str]:
    """Kernels that can serve an operation, preferred first."""
    return [found.kernel.name for found in _usable(op, family, layout)]


def skipped(family: str) -> list[str]:
    """Rows that were wanted and could not serve, one line each with the reason."""
    return [f"{row.op} by {row.name}: {reason}" for row, reason in _skipped.items() if row.family == family]


def _serves(row: Row, rows: int, k: int, group: int) -> bool:
    if k % row.multiple or group % row.multiple or k > row.most_k or (row.one and rows > 1):
        return False
    if row.few:
        from quantkit_runtime.kernels.tuning import tuning

        return rows <= tuning().gemv_rows
    return True


@cache
def _usable(op: str, family: str, layout: str) -> tuple[_Usable, ...]:
    found = []
    for row in ROWS:
        if (row.op, row.layout, row.family) == (op, layout, family):
            reason = _missing(row)
            if not reason:
                module, _, function = row.target.partition(":")
                run = getattr(importlib.import_module(f"{__package__}.{module}"), function)
                reason = _failed(row, run)
                if not reason:
                    found.append(_Usable(row, Kernel(row.name, run)))
            if reason:
                _skipped[row] = reason
    return tuple(found)


def _missing(row: Row) -> str:
    """Why a row's needs are not met, or nothing."""
    if row.needs and os.environ.get(VARIABLE) == "torch":
        return f"{VARIABLE}=torch"
    if row.needs == TRITON and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if row.needs == COMPILER:
        return _not_built(row.family)
    return ""


@cache
def _not_built(family: str) -> str:
    """Why there is no streaming GEMV, or nothing; a build that fails is not tried again for every operation."""
    from quantkit_runtime import device
    from quantkit_runtime.kernels import gemv

    if device.resolve().family != family:
        return f"there is no {family} card"
    try:
        gemv.load()
    except QuantkitError as error:
        return first_line(error)
    return ""


def _failed(row: Row, run: Callable[..., Any]) -> str:
    """What the self-test of a kernel found on the card at hand, or nothing; without a card nothing can run anyway."""
    import torch

    if not row.needs or not torch.cuda.is_available():
        return ""
    from quantkit_runtime.kernels import gemv, selftest

    return selftest.failure(row.op, run, most_rows=1 if row.one else gemv.MOST_TOKENS if row.few else 0)
