"""Compile every Triton kernel for cards that are not there and print what the assembly holds, as JSON.

A process of its own: the tests' process interprets the kernels, and a kernel is either interpreted or compiled.

    python -m tests.runtime.kernels.ahead_of_time gfx942 gfx90a gfx908
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantkit_runtime.kernels.triton import attention, cache, gemm, prefill, quantize, routing

GEMM = {
    "x": "*i8", "x_scale": "*fp32", "w": "*i8", "w_scale": "*fp32", "bias": "*bf16", "out": "*bf16", "slots": "*i32",
    "tile_expert": "*i32", "rows": "i32", "tiles_m": "i32", "n": "i32=16", "k": "i32=16", "stride_expert": "i64=16",
}  # fmt: skip
QUANTIZE = {
    "x": "*bf16", "q": "*i8", "scale": "*fp32", "k": "i32=16", "groups": "i32", "residual": "*bf16", "weight": "*bf16",
    "normed": "*bf16", "total": "*bf16", "eps": "fp32", "gate_up": "*bf16",
}  # fmt: skip
ROUTING = {
    "index": "*i64", "slots": "*i32", "tile_expert": "*i32", "count": "i32", "tiles": "i32", "out": "*bf16",
    "weights": "*bf16", "total": "*bf16", "h": "i32=16",
}  # fmt: skip
ATTENTION = {
    "q": "*bf16", "k": "*i8", "k_scale": "*fp32", "v": "*bf16", "table": "*i32", "lengths": "*i32", "part": "*fp32",
    "part_max": "*fp32", "part_sum": "*fp32", "scale": "fp32", "softcap": "fp32", "window": "i32", "heads": "i32",
    "max_blocks": "i32", "dim": "i32=16", "dim_v": "i32=16", "shares": "i32", "sinks": "*fp32",
    "out": "*bf16",
}  # fmt: skip
PREFILL = {
    "q": "*bf16", "k": "*i8", "k_scale": "*fp32", "v": "*bf16", "table": "*i32", "tiles": "*i32", "sinks": "*bf16",
    "out": "*bf16", "scale": "fp32", "softcap": "fp32", "window": "i32", "rep": "i32", "q_token": "i32=16",
    "q_head": "i32=16", "table_row": "i32",
}  # fmt: skip
CACHE = {
    "q": "*bf16", "k": "*bf16", "v": "*bf16", "cos": "*fp32", "sin": "*fp32", "places": "*i64", "q_out": "*bf16",
    "k_cache": "*i8", "k_scale": "*fp32", "v_cache": "*bf16", "heads": "i32", "kv_heads": "i32",
    "angles_token": "i32=16", **{f"{name}_{part}": "i32=16" for name in "qkv" for part in ("token", "head")},
}  # fmt: skip
"""Triton's types of the arguments; "=16": a multiple of 16."""


def _gemm(bm: int, bn: int, share: int, group: int, swap: bool, warps: int) -> tuple[Any, ...]:
    sizes = {"SHARE": share, "GROUP": group, "BM": bm, "BN": bn, "BK": 128, "SWAP": swap, "BAND": 8}
    rest = {"BIASED": False, "HAS_BIAS": True, "EVEN_K": True, "HALVES": share > 0}
    return gemm._gemm, GEMM, {**sizes, **rest}, warps


_ROW = {"GROUP": 4096, "G": 1, "W": 4096}
_NORM = {"RESIDUAL": True, "UNIT_OFFSET": False, "KEEP": True}
_SHARE = {
    "v_scale": None, "REP": 4, "PAGE": 16, "INT8_K": True, "INT8_V": False, "SOFTCAP": False, "BH": 16, "BN": 64,
    "BD": 128, "BV": 128,
}  # fmt: skip
_FLOAT_KEYS = {"INT8_K": False, "k_scale": None}
_PREFILL = {
    "v_scale": None, "PAGE": 16, "DIM": 128, "DIM_V": 128, "INT8_K": True, "INT8_V": False, "SOFTCAP": False,
    "WINDOW": False, "SINKS": False, "BM": 64, "BN": 64, "BD": 128, "BV": 128,
    "PRECISION": "ieee",
}  # fmt: skip
_EXPANDED = {**_FLOAT_KEYS, "DIM": 192, "BD": 256, "BN": 32, "WINDOW": True, "SINKS": True}
_ALIGN = {"E": 128, "BINS": 256, "BLOCK": 128, "CHUNK": 1024, "FILL": 128}
_WRITE = {
    "v_scale": None,
    "PAGE": 16,
    "DIM": 128,
    "PAIRS": 64,
    "ADJACENT": False,
    "INT8_K": True,
    "INT8_V": False,
    "BD": 128,
}

KERNELS: dict[str, tuple[Any, ...]] = {
    "gemm": _gemm(128, 128, 0, 0, False, 8),
    "gemm, few rows": _gemm(16, 64, 0, 0, False, 4),
    "gemm, swapped": _gemm(16, 64, 0, 0, True, 4),
    "gemm, groups": _gemm(128, 128, 0, 128, False, 8),
    "gemm, experts": _gemm(128, 128, 8, 0, False, 8),
    "quantize": (quantize._quantize, QUANTIZE, _ROW, 4),
    "norm_quantize": (quantize._norm_quantize, QUANTIZE, {**_ROW, **_NORM}, 4),
    "silu_mul_quantize": (quantize._silu_mul_quantize, QUANTIZE, _ROW, 4),
    "align": (routing._align, ROUTING, _ALIGN, 4),
    "combine": (routing._combine, ROUTING, {"K": 8, "E": 128, "BH": 2048}, 4),
    "paged_decode": (attention._share, ATTENTION, _SHARE, 4),
    "paged_decode, float keys": (attention._share, {**ATTENTION, "k": "*bf16"}, {**_SHARE, **_FLOAT_KEYS}, 4),
    "paged_decode, join": (attention._join, ATTENTION, {"SINKS": True, "BS": 16, "BV": 128}, 4),
    "paged_prefill": (prefill._prefill, PREFILL, _PREFILL, 4),
    "paged_prefill, many tokens": (prefill._prefill, PREFILL, {**_PREFILL, "BM": 128}, 4),
    "paged_prefill, expanded latents": (prefill._prefill, {**PREFILL, "k": "*bf16"}, {**_PREFILL, **_EXPANDED}, 4),
    "rope_write": (cache._rope_write, CACHE, _WRITE, 1),
    "rope_write, adjacent pairs": (cache._rope_write, CACHE, {**_WRITE, "PAIRS": 32, "ADJACENT": True}, 1),
    "rope_write, nothing rotated": (cache._rope_write, CACHE, {**_WRITE, "PAIRS": 0}, 1),
}  # fmt: skip
"""Kernel, types of its arguments, its constants, warps."""

PRODUCTS = [name for name in KERNELS if name.startswith("gemm")] + ["paged_decode"]
"""Those that multiply int8 matrices."""

FLOAT_PRODUCTS = [name for name in KERNELS if name.startswith("paged_prefill")]
"""Those that multiply bfloat16 ones."""


def assembly(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, target: str) -> str:
    """AMD assembly of a kernel."""
    constants = {**constants, "OVERLAP": False} if "OVERLAP" in kernel.arg_names else constants
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind, _, aligned = ("constexpr" if name in constants else types[name]).partition("=")
        signature[name] = kind
        if kind.startswith("*") or aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    where = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=where, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("hip", target, 64), options=options)
    return str(compiled.asm["amdgcn"])


def facts(text: str) -> dict[str, int]:
    """What a test wants to know of an assembly."""
    spills = re.findall(r"\.vgpr_spill_count: +(\d+)", text)  # a scalar register spills into a lane of a vector one
    [scratch] = re.findall(r"\.private_segment_fixed_size: +(\d+)", text)
    return {
        "mfma_f32": len(re.findall(r"v_mfma_f32_\w*bf16", text)),
        "mfma_i32": len(re.findall(r"v_mfma_i32", text)),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        "spills": sum(map(int, spills)) if spills else -1,
        "scratch_bytes": int(scratch),
    }


if __name__ == "__main__":
    # all kernels for the first card, products alone for the others
    found = {
        target: {
            name: facts(assembly(*kernel, target))
            for name, kernel in KERNELS.items()
            if target == sys.argv[1] or name in (*PRODUCTS, *FLOAT_PRODUCTS)
        }
        for target in sys.argv[1:]
    }
    json.dump(found, sys.stdout)
