"""Decode attention over a paged cache: INT8 or float keys and values, the sequence split over programs.

Pass one: each program reads its share of one sequence's tokens for one key head, with all query heads of that key head
as the rows of a matrix product, and leaves an unnormalized sum, its maximum and its weight. Pass two joins the shares.
Shares are cut from the true length, so that nothing on the host depends on it and a captured graph stays valid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_runtime.kernels.triton.overlap import after_previous, overlap
from quantkit_runtime.kernels.triton.quantize import absmax_scale, round_half_even
from quantkit_runtime.kernels.tuning import Attention, tuning

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _share(
    q, k, k_scale, v, v_scale, table, lengths, part, part_max, part_sum, scale, softcap, window, heads, max_blocks,
    dim, dim_v, shares, REP: tl.constexpr, PAGE: tl.constexpr, INT8_K: tl.constexpr, INT8_V: tl.constexpr,
    SOFTCAP: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    seq, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    after_previous(OVERLAP)
    length = tl.load(lengths + seq)
    start = 0
    if window > 0:
        start = tl.maximum(length - window, 0) // BN * BN
    each = tl.cdiv(tl.cdiv(length - start, BN), shares) * BN
    low = start + share * each
    high = tl.minimum(low + each, length)

    r, d, e = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BV)
    head = kv_head * REP + r
    row = seq * heads + head
    q_tile = tl.load(q + row[:, None] * dim + d[None, :], mask=(r[:, None] < REP) & (d[None, :] < dim), other=0.0)
    q_high, q_low = q_tile, q_tile
    if INT8_K:
        # q = q_scale * (high + low / 254): 15 bits in two int8 products, so that keys need no conversion
        wide = q_tile.to(tl.float32)
        q_scale = absmax_scale(wide)  # of a query that is no number it is NaN, and so are the scores
        wide = wide / q_scale[:, None]
        rounded = round_half_even(wide)
        rest = round_half_even((wide - rounded) * 254.0)
        q_high, q_low = rounded.to(tl.int8), rest.to(tl.int8)
        scale = scale * q_scale[:, None]
    top = tl.full((BH,), -float("inf"), tl.float32)
    weight = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, BV), tl.float32)
    for at in range(low, high, BN):
        n = at + tl.arange(0, BN)
        seen = n < high
        block = tl.load(table + seq.to(tl.int64) * max_blocks + n // PAGE, mask=seen, other=0).to(tl.int64)
        place = (block * kv_heads + kv_head) * PAGE + n % PAGE
        k_tile = tl.load(k + place[:, None] * dim + d[None, :], mask=seen[:, None] & (d[None, :] < dim), other=0)
        v_tile = tl.load(v + place[:, None] * dim_v + e[None, :], mask=seen[:, None] & (e[None, :] < dim_v), other=0)
        if INT8_K:
            k_turned = tl.trans(k_tile)
            score = tl.dot(q_high, k_turned, out_dtype=tl.int32).to(tl.float32)
            score += tl.dot(q_low, k_turned, out_dtype=tl.int32).to(tl.float32) * (1.0 / 254.0)
            score *= scale * tl.load(k_scale + place, mask=seen, other=0.0)[None, :]
        else:
            score = tl.dot(q_tile, tl.trans(k_tile.to(q_tile.dtype)), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))  # tanh without libdevice
        if window > 0:
            seen &= n >= length - window
        score = tl.where(seen[None, :], score * LOG2E, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        kept = tl.exp2(top - safe)
        p = tl.exp2(score - safe[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        if INT8_V:
            p *= tl.load(v_scale + place, mask=seen, other=0.0)[None, :]
        acc = acc * kept[:, None] + tl.dot(p.to(q_tile.dtype), v_tile.to(q_tile.dtype), input_precision="ieee")
        top = new_top
    out = row * shares + share
    tl.store(part_max + out, top, mask=r < REP)
    tl.store(part_sum + out, weight, mask=r < REP)
    tl.store(part + out[:, None] * dim_v + e[None, :], acc, mask=(r[:, None] < REP) & (e[None, :] < dim_v))


@triton.jit
def _join(part, part_max, part_sum, sinks, out, heads, shares, dim_v, SINKS: tl.constexpr, BS: tl.constexpr,
          BV: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    after_previous(OVERLAP)
    row = tl.program_id(0)
    s, e = tl.arange(0, BS), tl.arange(0, BV)
    tops = tl.load(part_max + row * shares + s, mask=s < shares, other=-float("inf"))
    sums = tl.load(part_sum + row * shares + s, mask=s < shares, other=0.0)
    top = tl.max(tops, axis=0)
    sink = -float("inf")
    if SINKS:
        sink = tl.load(sinks + row % heads).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    safe = tl.where(top == -float("inf"), 0.0, top)
    factor = tl.exp2(tops - safe)
    total = tl.sum(sums * factor, axis=0)
    if SINKS:
        total += tl.exp2(sink - safe)
    parts = tl.load(
        part + (row * shares + s[:, None]) * dim_v + e[None, :],
        mask=(s[:, None] < shares) & (e[None, :] < dim_v), other=0.0,
    )  # fmt: skip
    value = tl.sum(parts * factor[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * dim_v + e, value.to(out.dtype.element_ty), mask=e < dim_v)


def paged_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    config: Attention | None = None,
) -> Tensor:
    """See `kernels.registry`; `config` overrides the device's table.

    Scores and sums are float32; over INT8 keys the query is taken to 15 bits. Probabilities enter the second product in
    q's dtype.
    """
    (b, h, dim), (kv_heads, page), dim_v = q_BHD.shape, k_cache.shape[1:3], v_cache.shape[3]
    out = q_BHD.new_empty((b, h, dim_v))
    if not b:
        return out
    table, block_table = tuning(), block_table if block_table.stride(1) == 1 else block_table.contiguous()
    config = config or (table.attention_float if k_scale is None else table.attention)
    longest = min(block_table.shape[1] * page, window or block_table.shape[1] * page)
    shares = config.shares(b * kv_heads, longest)
    part = q_BHD.new_empty((b, h, shares, dim_v), dtype=torch.float32)
    ends = q_BHD.new_empty((2, b, h, shares), dtype=torch.float32)
    bv = triton.next_power_of_2(dim_v)
    _share[(b, kv_heads, shares)](
        q_BHD.contiguous(), k_cache, k_scale, v_cache, v_scale, block_table, lengths.contiguous(), part,
        ends[0], ends[1], scale, softcap, window, h, block_table.stride(0), dim, dim_v, shares,
        REP=h // kv_heads, PAGE=page, INT8_K=k_scale is not None, INT8_V=v_scale is not None, SOFTCAP=softcap > 0,
        BH=max(16, triton.next_power_of_2(h // kv_heads)), BN=config.bn, BD=max(32, triton.next_power_of_2(dim)),
        BV=max(16, bv), **overlap(), num_warps=config.warps, num_stages=config.stages_of(longest, shares),
    )  # fmt: skip
    _join[(b * h,)](
        part, ends[0], ends[1], None if sinks is None else sinks.contiguous(), out, h, shares, dim_v,
        SINKS=sinks is not None, BS=triton.next_power_of_2(shares), BV=bv, **overlap(),
    )  # fmt: skip
    return out
