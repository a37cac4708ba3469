"""Rotary embedding and the write into the paged cache, one program per token and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    qkv, cos, sin, places, q_out, k_cache, k_scale, v_cache, v_scale, heads, kv_heads,
    PAGE: tl.constexpr, DIM: tl.constexpr, INT8_K: tl.constexpr, INT8_V: tl.constexpr, BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < DIM
    row = qkv + (token * (heads + 2 * kv_heads) + head) * DIM
    x = tl.load(row + d, mask=inside, other=0.0)
    dtype = x.dtype
    value = x.to(tl.float32)
    if head < heads + kv_heads:
        low = d < DIM // 2
        other = tl.load(row + tl.where(low, d + DIM // 2, d - DIM // 2), mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + token * DIM + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + token * DIM + d, mask=inside, other=0.0).to(tl.float32)
        value = (value * c + tl.where(low, -other, other) * s).to(dtype).to(tl.float32)
    if head < heads:
        tl.store(q_out + (token * heads + head) * DIM + d, value.to(dtype), mask=inside)
        return
    place = tl.load(places + token)
    if place < 0:
        return
    kv_head = (head - heads) % kv_heads
    at = (place // PAGE * kv_heads + kv_head) * PAGE + place % PAGE
    if head < heads + kv_heads:
        _write(k_cache, k_scale, at, d, inside, value, DIM, INT8_K)
    else:
        _write(v_cache, v_scale, at, d, inside, value, DIM, INT8_V)


def rope_write(
    qkv_TD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    places: Tensor,
    k_cache: Tensor,
    k_scale: Tensor | None,
    v_cache: Tensor,
    v_scale: Tensor | None,
) -> Tensor:
    """See `kernels.reference`."""
    tokens, (_, kv_heads, page, dim) = qkv_TD.shape[0], k_cache.shape
    heads = qkv_TD.shape[1] // dim - 2 * kv_heads
    q = qkv_TD.new_empty((tokens, heads, dim))
    if tokens:
        _rope_write[(tokens, heads + 2 * kv_heads)](
            qkv_TD.contiguous(), cos_TR.contiguous(), sin_TR.contiguous(), places.contiguous(), q,
            k_cache, k_scale, v_cache, v_scale, heads, kv_heads, PAGE=page, DIM=dim,
            INT8_K=k_scale is not None, INT8_V=v_scale is not None, BD=triton.next_power_of_2(dim),
            num_warps=1, **overlap(),
        )  # fmt: skip
    return q
