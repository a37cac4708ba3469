"""Tiled INT8 GEMM: dense and grouped by expert, activations scaled per token or per group of K; one kernel source.

int8 tiles go through the matrix units into int32. Per token that sum is scaled once, in float32, when it is complete.
Per group each group's int32 sum is scaled by its activation scale and added in float32. Grouped tiles hold rows of one
expert (`reference.Alignment`) and gather their rows of x.

Shape suffixes: M rows of a tile, N output channels, K input channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_runtime.kernels.reference import Alignment, check_accumulator
from quantkit_runtime.kernels.triton.overlap import after_previous, overlap
from quantkit_runtime.kernels.triton.quantize import HALF_EVEN
from quantkit_runtime.kernels.tuning import Tile, tuning

MOST_BIASED = 256
"""Longest group whose sums, at most 256 x 127^2 < 2^22, `_wide` takes to float32 by additions alone."""

_HALVED = 64
"""Tiles of routed experts with as many rows are computed as half of them where the other half is empty."""

NO_SPLIT = 128
"""Longest group of K that one tile step covers; longer groups take several steps."""


@triton.jit
def _step(acc, x_ptr, w_ptr, at, inside_K, EVEN: tl.constexpr, SWAP: tl.constexpr):
    """`acc` with the products of one step of K; EVEN: all of it is inside."""
    if EVEN:
        x_tile, w_tile = tl.load(x_ptr + at), tl.load(w_ptr + at)
    else:
        x_tile = tl.load(x_ptr + at, mask=inside_K[None, :], other=0)
        w_tile = tl.load(w_ptr + at, mask=inside_K[None, :], other=0)
    if SWAP:
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, out_dtype=tl.int32)
    else:
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _wide(acc, BIASED: tl.constexpr):
    """float32 of int32 sums, exactly; BIASED: of magnitudes below 2^22, without a conversion (slow on NVIDIA)."""
    if BIASED:
        # the bits of HALF_EVEN: an integer added to them is added to it
        return (acc + 0x4B400000).to(tl.float32, bitcast=True) - HALF_EVEN
    return acc.to(tl.float32)


@triton.jit
def _tile(
    x, x_scale, w, w_scale, bias, out, slots, rows, n, k, first_m, tile_n,
    SHARE: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Rows and channels beyond the end read others, spread evenly: if all of them read the first, every unit would wait
    # for the few cache lines that hold it (32 tokens in tiles of 64 rows: twice the time, on an H200).
    offs_m = first_m + tl.arange(0, BM)
    if SHARE > 0:
        out_m = tl.load(slots + offs_m)
        valid_m = out_m < rows
        x_m = tl.where(valid_m, out_m, offs_m % rows) // SHARE
    else:
        out_m = offs_m
        valid_m = out_m < rows
        x_m = out_m % rows
    offs_n = tile_n * BN + tl.arange(0, BN)
    valid_n = offs_n < n
    safe_n = offs_n % n
    offs_k = tl.arange(0, BK)
    x_ptr = x + x_m.to(tl.int64)[:, None] * k + offs_k[None, :]
    w_ptr = w + safe_n.to(tl.int64)[:, None] * k + offs_k[None, :]

    # With SWAP the output channels are the rows of the matrix instruction.
    ROWS: tl.constexpr = BN if SWAP else BM
    COLUMNS: tl.constexpr = BM if SWAP else BN
    if GROUP > 0:
        STEPS: tl.constexpr = (GROUP + BK - 1) // BK
        groups = k // GROUP
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for group in range(groups):
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
            for step in tl.static_range(STEPS):
                at = group * GROUP + step * BK
                acc = _step(acc, x_ptr, w_ptr, at, step * BK + offs_k < GROUP, GROUP % BK == 0, SWAP)
            scale = tl.load(x_scale + x_m * groups + group)
            if SWAP:
                acc = tl.trans(acc)
            total += _wide(acc, BIASED) * scale[:, None]
    else:
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for at in range(0, k, BK):
            acc = _step(acc, x_ptr, w_ptr, at, at + offs_k < k, EVEN_K, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        total = acc.to(tl.float32) * tl.load(x_scale + x_m)[:, None]

    total *= tl.load(w_scale + safe_n)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + safe_n).to(tl.float32)[None, :]
    out_ptr = out + out_m.to(tl.int64)[:, None] * n + offs_n[None, :]
    tl.store(out_ptr, total.to(out.dtype.element_ty), mask=valid_m[:, None] & valid_n[None, :])


@triton.jit
def _gemm(
    x, x_scale, w, w_scale, bias, out, slots, tile_expert, rows, tiles_m, n, k, stride_expert,
    SHARE: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr,
    BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    HALVES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    # Bands of BAND row tiles: their rows of x and the weights of a column stay in the cache.
    tile = tl.program_id(0)
    in_band = BAND * tl.cdiv(n, BN)
    first = tile // in_band * BAND
    height = tl.minimum(tiles_m - first, BAND)
    tile_m = first + tile % in_band % height
    tile_n = tile % in_band // height
    first_m = tile_m * BM

    if SHARE > 0:
        expert = tl.load(tile_expert + tile_m)
        if expert < 0:
            return
        w += expert.to(tl.int64) * stride_expert
        w_scale += expert * n
        bias += expert * n
    if HALVES:
        # An expert's last tile is half empty half of the time.
        if tl.load(slots + first_m + BM // 2) >= rows:
            _tile(
                x, x_scale, w, w_scale, bias, out, slots, rows, n, k, first_m, tile_n,
                SHARE, GROUP, BIASED, HAS_BIAS, SWAP, BM // 2, BN, BK, EVEN_K,
            )  # fmt: skip
            return
    _tile(
        x, x_scale, w, w_scale, bias, out, slots, rows, n, k, first_m, tile_n,
        SHARE, GROUP, BIASED, HAS_BIAS, SWAP, BM, BN, BK, EVEN_K,
    )  # fmt: skip


def w8a8_gemm(
    x_TK: Tensor,
    x_scale: Tensor,
    w_NK: Tensor,
    w_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """See `kernels.registry`; `tile` overrides the device's table."""
    rows, n = x_TK.shape[0], w_NK.shape[0]
    out = x_TK.new_empty((rows, n), dtype=out_dtype)
    if rows:
        chosen = tile or tuning().gemm_tile(rows, grouped_activations=x_scale.shape[1] > 1)
        _launch(x_TK, x_scale, w_NK, w_scale_N1, bias_N, out, None, 0, chosen)
    return out


def grouped_gemm(
    x_RK: Tensor,
    x_scale: Tensor,
    w_ENK: Tensor,
    w_scale_EN1: Tensor,
    bias_EN: Tensor | None,
    alignment: Alignment,
    share: int,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """See `kernels.registry`; the tile's rows are those of `alignment`."""
    slots = x_RK.shape[0] * share
    out = x_RK.new_empty((slots, w_ENK.shape[1]), dtype=out_dtype)
    if slots:
        chosen = tile or tuning().grouped_tile(alignment.block, grouped_activations=x_scale.shape[1] > 1)
        _launch(x_RK, x_scale, w_ENK, w_scale_EN1, bias_EN, out, alignment, share, chosen)
    return out


def _launch(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    alignment: Alignment | None,
    share: int,
    tile: Tile,
) -> None:
    (rows, n), k, groups = out.shape, x.shape[1], x_scale.shape[1]
    check_accumulator(k)
    group = k // groups if groups > 1 else 0
    bm, bk = (alignment.block if alignment else tile.bm), tile.bk
    if group:
        bk = min(NO_SPLIT, max(32, triton.next_power_of_2(group)))
    tiles_m = alignment.tile_expert.shape[0] if alignment else triton.cdiv(rows, bm)
    _gemm[(tiles_m * triton.cdiv(n, tile.bn),)](
        x.contiguous(), x_scale.contiguous(), w.contiguous(), w_scale, w_scale if bias is None else bias, out,
        alignment.slots if alignment else out, alignment.tile_expert if alignment else out,
        rows, tiles_m, n, k, w.stride(0),
        SHARE=share, GROUP=group, BIASED=group <= MOST_BIASED and torch.version.hip is None, HAS_BIAS=bias is not None,
        SWAP=tile.swap, BAND=tile.band, BM=bm, BN=tile.bn, BK=bk, EVEN_K=k % bk == 0,
        HALVES=alignment is not None and bm >= _HALVED,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(),
    )  # fmt: skip
