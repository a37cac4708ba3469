"""Which kernel runs an operation on a device: rows of data, imported on use.

An operation has one signature for all devices:
- `w8a8_gemm(x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype) -> [T, N]`: INT8 product, exact in int32, then the
  float32 epilogue. `x_scale` is float32 `[T, 1]`, or `[T, G]` for activations quantized per group of K / G inputs.

A new kernel is one file and one row here; a row above another of the same key is preferred.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One kernel.

    Attributes:
        op: operation.
        layout: of the weight, a row of the layouts in the manifest.
        family: "cpu", "cuda" or "hip".
        name: shown in the table of executed GEMMs.
        target: `module:function`.
    """

    op: str
    layout: str
    family: str
    name: str
    target: str


ROWS: tuple[Row, ...] = (
    Row("w8a8_gemm", "plain", "cpu", "f32-chunks", "quantkit_runtime.kernels.reference:w8a8_gemm"),
    Row("w8a8_gemm", "plain", "cuda", "torch._int_mm", "quantkit_runtime.kernels.int_mm:w8a8_gemm"),
    Row("w8a8_gemm", "plain", "hip", "torch._int_mm", "quantkit_runtime.kernels.int_mm:w8a8_gemm"),
    Row("paged_decode", "plain", "cpu", "torch", "quantkit_runtime.kernels.reference:paged_decode"),
    Row("paged_decode", "plain", "cuda", "torch", "quantkit_runtime.kernels.reference:paged_decode"),
    Row("paged_decode", "plain", "hip", "torch", "quantkit_runtime.kernels.reference:paged_decode"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to call."""

    name: str
    run: Callable[..., Any]


@cache
def find(op: str, family: str, layout: str = "plain") -> Kernel:
    """The preferred kernel of an operation on a device family.

    Raises:
        UsageError: no row serves this operation, layout and family.
    """
    for row in ROWS:
        if (row.op, row.layout, row.family) == (op, layout, family):
            module, _, function = row.target.partition(":")
            return Kernel(row.name, getattr(importlib.import_module(module), function))
    raise UsageError(
        f"no kernel for {op} on {family} with weights in layout {layout}",
        "convert for a layout that this device has a kernel for",
        choices=[f"{row.op} {row.layout} on {row.family}" for row in ROWS],
    )
