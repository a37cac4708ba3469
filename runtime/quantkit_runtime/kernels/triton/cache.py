"""Rotary embedding and the write into the paged cache, one program per token and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit_runtime.kernels.reference import Rope
from quantkit_runtime.kernels.triton.overlap import after_previous, overlap
from quantkit_runtime.kernels.triton.quantize import absmax_scale, rounded_quotient


@triton.jit
def _write(cache, scale, at, d, inside, value, DIM: tl.constexpr, INT8: tl.constexpr):
    if INT8:
        row = value[None, :]
        row_scale = absmax_scale(row)
        tl.store(cache + at * DIM + d, tl.reshape(rounded_quotient(row, row_scale), value.shape), mask=inside)
        tl.store(scale + at + tl.arange(0, 1), row_scale)
    else:
        tl.store(cache + at * DIM + d, value.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _rope_write(
    q, k, v, cos, sin, places, q_out, k_cache, k_scale, v_cache, v_scale, heads, kv_heads,
    q_token, q_head, k_token, k_head, v_token, v_head, angles_token,
    PAGE: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr, INT8_K: tl.constexpr,
    INT8_V: tl.constexpr, BD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The heads of a token in their order: keys, values, and queries where they are to be rotated.
    after_previous(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < DIM
    if head < kv_heads:
        row = k + token * k_token + head * k_head
    elif head < 2 * kv_heads:
        row = v + token * v_token + (head - kv_heads) * v_head
    else:
        row = q + token * q_token + (head - 2 * kv_heads) * q_head
    x = tl.load(row + d, mask=inside, other=0.0)
    dtype = x.dtype
    value = x.to(tl.float32)
    if PAIRS > 0:
        if (head < kv_heads) | (head >= 2 * kv_heads):
            turns = d < 2 * PAIRS
            if ADJACENT:
                first, partner, angle = d % 2 == 0, d ^ 1, d // 2
            else:
                first = d < PAIRS
                partner, angle = tl.where(first, d + PAIRS, d - PAIRS), d % PAIRS
            other = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
            c = tl.load(cos + token * angles_token + angle, mask=turns, other=1.0).to(tl.float32)
            s = tl.load(sin + token * angles_token + angle, mask=turns, other=0.0).to(tl.float32)
            value = (value * c + tl.where(first, -other, other) * s).to(dtype).to(tl.float32)
    if head >= 2 * kv_heads:
        tl.store(q_out + (token * heads + head - 2 * kv_heads) * DIM + d, value.to(dtype), mask=inside)
        return
    place = tl.load(places + token)
    if place < 0:
        return
    at = (place // PAGE * kv_heads + head % kv_heads) * PAGE + place % PAGE
    if head < kv_heads:
        _write(k_cache, k_scale, at, d, inside, value, DIM, INT8_K)
    else:
        _write(v_cache, v_scale, at, d, inside, value, DIM, INT8_V)


def rope_write(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    rope: Rope | None,
    places: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
) -> Tensor:
    """See `kernels.reference`."""
    (tokens, heads, dim), (_, kv_heads, page, _) = q_THD.shape, k_cache.shape
    out = q_THD if rope is None else q_THD.new_empty((tokens, heads, dim))
    if not tokens:
        return out
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TGD, v_TGD))
    pairs, angles_token = (0, 0) if rope is None else (rope.cos.shape[1], rope.cos.stride(0))
    cos, sin = (places, places) if rope is None else rope[:2]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin, angles_token = cos.contiguous(), sin.contiguous(), pairs
    _rope_write[(tokens, 2 * kv_heads + (heads if pairs else 0))](
        q, k, v, cos, sin, places.contiguous(), out, k_cache, k_scale, v_cache, v_scale, heads, kv_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], angles_token,
        PAGE=page, DIM=dim, PAIRS=pairs, ADJACENT=rope is not None and rope.adjacent,
        INT8_K=k_scale is not None, INT8_V=v_scale is not None,
        BD=triton.next_power_of_2(dim), num_warps=1, **overlap(),
    )  # fmt: skip
    return out
