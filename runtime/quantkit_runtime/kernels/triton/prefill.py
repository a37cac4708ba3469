"""Prefill attention over a paged cache: packed queries of many sequences in tiles of one, with an online softmax.

A program takes the queries of a tile for one head and walks over the keys that any of them sees. Which sequence a tile
belongs to and where it stands in it is read from the card alone, so that a captured graph serves any packing. Keys that
all of a tile's queries see come first and are not masked (Dao, FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_runtime.kernels.reference import Tiles
from quantkit_runtime.kernels.triton.attention import LOG2E
from quantkit_runtime.kernels.triton.overlap import after_previous, overlap
from quantkit_runtime.kernels.tuning import Prefill, tuning


@triton.jit
def _rows(cache, place, inside, DIM: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    d = tl.arange(0, BD)
    at = cache + place[:, None] * DIM + d[None, :]
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (d[None, :] < DIM), other=0)
    elif BD > DIM:
        x = tl.load(at, mask=d[None, :] < DIM, other=0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _walk(
    acc, weight, top, q_tile, position, low, high, k, k_scale, v, v_scale, table, kv_head, kv_heads, scale, softcap,
    window, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, INT8_K: tl.constexpr, INT8_V: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Online softmax, in powers of 2, over the keys from low to high.
    for at in range(low, high, BN):
        n = at + tl.arange(0, BN)
        inside = n < high
        if MASKED:
            block = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // PAGE).to(tl.int64)
        place = (block * kv_heads + kv_head) * PAGE + n % PAGE
        k_tile = _rows(k, place, inside, DIM, BD, MASKED).to(q_tile.dtype)  # int8 without loss
        v_tile = _rows(v, place, inside, DIM_V, BV, MASKED).to(q_tile.dtype)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if INT8_K:
            score *= tl.load(k_scale + place, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            score = 1.0 - 2.0 / (tl.exp(score * (2.0 * scale / softcap)) + 1.0)  # tanh without libdevice
            score *= softcap * LOG2E
        else:
            score *= scale * LOG2E
        if MASKED:
            seen = n[None, :] <= position[:, None]
            if WINDOW:
                seen &= n[None, :] > position[:, None] - window
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        safe = new_top
        if MASKED:  # of a query that has seen no key yet
            safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        kept = tl.exp2(top - safe)
        p = tl.exp2(score - safe[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        if INT8_V:
            p *= tl.load(v_scale + place, mask=inside, other=0.0)[None, :]
        acc = tl.dot(p.to(q_tile.dtype), v_tile, acc * kept[:, None], input_precision=PRECISION)
        top = new_top
    return acc, weight, top


@triton.jit(do_not_specialize=["table", "tiles", "table_row"])  # they differ from form to form
def _prefill(
    q, k, k_scale, v, v_scale, table, tiles, sinks, out, scale, softcap, window, rep, q_token, q_head, table_row,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, INT8_K: tl.constexpr, INT8_V: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    head, tile = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    row = tl.load(tiles + tile * 4).to(tl.int64)
    first = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    queries = tl.load(tiles + tile * 4 + 2)
    start = tl.load(tiles + tile * 4 + 3)
    if queries == 0:
        return
    kv_head, kv_heads = head // rep, heads // rep
    r, d, e = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    here = (r < queries)[:, None]
    q_at = q + (first + r)[:, None] * q_token + head * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=here & (d[None, :] < DIM), other=0.0)
    own, position = table + row * table_row, start + r
    high = start + queries
    low = 0
    whole = tl.maximum(start + 1, 0) // BN * BN  # before it every query sees every key
    if WINDOW:
        low = tl.maximum(start - window + 1, 0) // BN * BN
        whole = low
    acc = tl.zeros((BM, BV), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    if not WINDOW:
        acc, weight, top = _walk(
            acc, weight, top, q_tile, position, low, whole, k, k_scale, v, v_scale, own, kv_head, kv_heads, scale,
            softcap, window, PAGE, DIM, DIM_V, INT8_K, INT8_V, SOFTCAP, WINDOW, False, BN, BD, BV, PRECISION,
        )  # fmt: skip
    acc, weight, top = _walk(
        acc, weight, top, q_tile, position, whole, high, k, k_scale, v, v_scale, own, kv_head, kv_heads, scale,
        softcap, window, PAGE, DIM, DIM_V, INT8_K, INT8_V, SOFTCAP, WINDOW, True, BN, BD, BV, PRECISION,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.maximum(top, sink)
        kept = tl.exp2(top - total)
        acc *= kept[:, None]
        weight = weight * kept + tl.exp2(sink - total)
    value = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    to = out + ((first + r)[:, None] * heads + head) * DIM_V + e[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=here & (e[None, :] < DIM_V))


def paged_prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
    block_table: Tensor,
    tiles: Tiles,
    scale: float,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    config: Prefill | None = None,
) -> Tensor:
    """See `kernels.reference`; `config` overrides the device's table, but for the queries of a tile.

    Scores and sums are float32. Keys, values and probabilities enter the products in q's dtype: INT8 ones without loss,
    their scales are applied outside.
    """
    (tokens, heads, dim), (kv_heads, page), dim_v = q_THD.shape, k_cache.shape[1:3], v_cache.shape[3]
    out = q_THD.new_empty((tokens, heads, dim_v))
    if not tokens:
        return out
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    config = config or tuning().prefill_shape(tokens, heads, tiles.queries)
    bd, bv = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(dim_v))
    # on CUDA float32 products run on tensor cores in three parts; one by one they would spill registers
    wide = q_THD.dtype == torch.float32 and q_THD.is_cuda and torch.version.hip is None
    bn, stages = config.fitted((bd + bv) * q_THD.element_size())
    _prefill[(heads, len(tiles.rows))](
        q_THD, k_cache, k_scale, v_cache, v_scale, block_table, tiles.rows,
        None if sinks is None else sinks.contiguous(), out, scale, softcap, window, heads // kv_heads,
        q_THD.stride(0), q_THD.stride(1), block_table.stride(0),
        PAGE=page, DIM=dim, DIM_V=dim_v, INT8_K=k_scale is not None, INT8_V=v_scale is not None, SOFTCAP=softcap > 0,
        WINDOW=window > 0, SINKS=sinks is not None, BM=max(16, tiles.queries), BN=bn, BD=bd, BV=bv,
        PRECISION="tf32x3" if wide else "ieee", **overlap(), num_warps=config.warps, num_stages=stages,
    )  # fmt: skip
    return out
