"""Routing of tokens to experts: alignment into tiles of one expert, and the weighted sum back. No atomics, no sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_runtime.kernels.reference import Alignment, most_tiles
from quantkit_runtime.kernels.triton.overlap import after_previous, overlap

_CHUNK = 4096


@triton.jit
def _align(
    index, slots, tile_expert, count, tiles, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    # Program e < E places expert e; program E marks the tiles that are not needed. Each counts all slots for itself.
    me = tl.program_id(0)
    bins, lanes = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, count, CHUNK):
        at = start + lanes
        expert = tl.load(index + at, mask=at < count, other=E).to(tl.int32)
        expert = tl.where((expert >= 0) & (expert < E), expert, E)  # bin E: other ranks' and none
        counts += tl.histogram(expert, BINS)
    run_tiles = tl.where(bins < E, (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bins < me, run_tiles, 0), axis=0)
    mine = tl.sum(tl.where(bins == me, run_tiles, 0), axis=0)
    if me == E:
        mine = tiles - first
    label = tl.where(me < E, me, -1)
    for tile in range(0, mine, FILL):
        at = tile + tl.arange(0, FILL)
        tl.store(tile_expert + first + at, tl.zeros((FILL,), tl.int32) + label, mask=at < mine)
    held = tl.sum(tl.where((bins == me) & (bins < E), counts, 0), axis=0)
    for pad in range(held, mine * BLOCK, CHUNK):
        at = pad + lanes
        tl.store(slots + first * BLOCK + at, tl.zeros((CHUNK,), tl.int32) + count, mask=at < mine * BLOCK)
    done = 0
    if me < E:
        for start in range(0, count, CHUNK):
            at = start + lanes
            hit = (tl.load(index + at, mask=at < count, other=-1).to(tl.int32) == me).to(tl.int32)
            place = done + tl.cumsum(hit, axis=0) - 1
            tl.store(slots + first * BLOCK + place, at, mask=hit > 0)
            done += tl.sum(hit, axis=0)


@triton.jit
def _combine(out, weights, index, total, h, K: tl.constexpr, E: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr):
    after_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BH + tl.arange(0, BH)
    acc = tl.zeros((BH,), dtype=tl.float32)
    for slot in tl.static_range(K):
        expert = tl.load(index + token * K + slot)
        weight = tl.load(weights + token * K + slot).to(tl.float32)
        here = (expert >= 0) & (expert < E)
        row = tl.load(out + (token * K + slot) * h + offs, mask=(offs < h) & here, other=0.0)
        acc += row.to(tl.float32) * weight
    tl.store(total + token * h + offs, acc.to(total.dtype.element_ty), mask=offs < h)


def align(index_Tk: Tensor, experts: int, block: int) -> Alignment:
    """See `kernels.registry`."""
    count = index_Tk.numel()
    tiles = most_tiles(count, experts, block)
    slots = index_Tk.new_empty(tiles * block, dtype=torch.int32)
    tile_expert = index_Tk.new_empty(tiles, dtype=torch.int32)
    if count:
        _align[(experts + 1,)](
            index_Tk.contiguous(), slots, tile_expert, count, tiles,
            E=experts, BINS=triton.next_power_of_2(experts + 1), BLOCK=block,
            CHUNK=min(_CHUNK, max(32, triton.next_power_of_2(count))), FILL=128, num_warps=8 if count > 1024 else 4,
        )  # fmt: skip
    return Alignment(slots, tile_expert, block)


def combine(out_SH: Tensor, weights_Tk: Tensor, index_Tk: Tensor, experts: int) -> Tensor:
    """See `kernels.registry`."""
    (tokens, k), h = index_Tk.shape, out_SH.shape[1]
    total = out_SH.new_empty((tokens, h))
    if tokens:
        bh = min(2048, triton.next_power_of_2(h))
        _combine[(tokens, triton.cdiv(h, bh))](
            out_SH, weights_Tk.contiguous(), index_Tk.contiguous(), total, h, K=k, E=experts, BH=bh, **overlap()
        )
    return total
