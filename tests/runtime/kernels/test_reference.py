"""The torch reference of each operation against numpy, transformers and torch's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from quantkit.arithmetic import quantize_tokens
from quantkit_runtime.kernels import reference
from tests.runtime.kernels import cases


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_norm_quantize_is_transformers_norm_then_quantize(
    kind: str, with_residual: bool, dtype: torch.dtype, group: int
) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm}[kind](40, eps=1e-5).to(dtype)
    norm.weight.data = cases.normal(0, 40, dtype=dtype)
    x, residual = cases.normal(1, 5, 40, dtype=dtype), cases.normal(2, 5, 40, dtype=dtype) * 3
    total = x + residual if with_residual else x
    with torch.no_grad():
        want = norm(total)
        got = reference.norm_quantize(
            x, norm.weight, 1e-5, residual if with_residual else None, kind == "gemma", group_size=group
        )
    assert torch.equal(got.normed, want)
    assert torch.equal(got.total, total)
    q, scale = quantize_tokens(want, group or None)
    assert torch.equal(got.q, q)
    assert torch.equal(got.scale, scale)


@pytest.mark.parametrize("group", [0, 5])
def test_silu_mul_quantize(group: int) -> None:
    gate_up = cases.normal(0, 7, 30)
    gate, up = gate_up.double().numpy()[:, :15], gate_up.double().numpy()[:, 15:]
    q, scale = reference.silu_mul_quantize(gate_up, group)
    want = gate / (1 + np.exp(-gate)) * up
    got = q.double().unflatten(1, (scale.shape[1], -1)) * scale.double().unsqueeze(-1)
    limit = 0.5001 * scale.double().unsqueeze(-1).expand_as(got).flatten(1)
    assert bool((torch.from_numpy(want) - got.flatten(1)).abs().le(limit).all())


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [(1, 1, 2, 16), (9, 2, 5, 4), (40, 3, 7, 16)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_alignment_holds_every_slot_once(tokens: int, k: int, experts: int, block: int, elsewhere: bool) -> None:
    index, _ = cases.routing(0, tokens, k, experts, elsewhere)
    got = reference.align(index, experts, block)
    flat = index.reshape(-1)
    rows = got.slots.view(-1, block)
    assert rows.shape[0] == got.tile_expert.shape[0] == reference.most_tiles(tokens * k, experts, block)
    held = [slot for slot in got.slots.tolist() if slot < tokens * k]
    assert sorted(held) == [slot for slot, expert in enumerate(flat.tolist()) if 0 <= expert < experts]
    for tile, expert in enumerate(got.tile_expert.tolist()):
        inside = rows[tile][rows[tile] < tokens * k].long()
        assert bool((flat[inside] == expert).all())


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("share", [1, 2])
def test_grouped_gemm_and_combine_against_float64(share: int, group: int) -> None:
    tokens, k, experts, n, inner = 11, 2, 5, 9, 24
    index, weights = cases.routing(3, tokens, k, experts, elsewhere=True)
    x, w = cases.int8(0, tokens * k // share, inner), cases.int8(1, experts, n, inner)
    x_scale = cases.positive(2, x.shape[0], inner // group if group else 1)
    w_scale, bias = cases.positive(3, experts, n, 1), cases.normal(4, experts, n)
    alignment = reference.align(index, experts, 4)
    out = reference.grouped_gemm(x, x_scale, w, w_scale, bias, alignment, share, torch.float32)
    got = reference.combine(out, weights, index, experts)
    real_x = x.double() * x_scale.double().repeat_interleave(inner // x_scale.shape[1], 1)
    want = torch.zeros(tokens, n, dtype=torch.float64)
    for slot, expert in enumerate(index.reshape(-1).tolist()):
        if 0 <= expert < experts:
            y = (w[expert].double() * w_scale[expert].double()) @ real_x[slot // share] + bias[expert].double()
            want[slot // k] += y * weights.reshape(-1)[slot].double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("int8_keys", "int8_values"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads", [(6, 3), (4, 1), (2, 2)])
def test_paged_decode_is_attention_over_the_sequence(
    heads: tuple[int, int], int8_keys: bool, int8_values: bool, window: int
) -> None:
    """torch's own attention in float64, one sequence at a time; places that no token holds are NaN."""
    h, kv_heads = heads
    pages = cases.pages((1, 16, 17, 5), kv_heads, 4, (12, 10), int8_keys, int8_values)
    q = cases.normal(3, 4, h, 12)
    got = reference.paged_decode(
        q,
        pages.k_cache,
        pages.k_scale,
        pages.v_cache,
        pages.v_scale,
        pages.block_table,
        pages.lengths,
        0.3,
        window=window,
    )
    for row, length in enumerate(pages.lengths.tolist()):
        seen = slice(max(0, length - window) if window else 0, length)
        k, v = (t[row, :, seen].double().repeat_interleave(h // kv_heads, 0) for t in (pages.k, pages.v))
        want = functional.scaled_dot_product_attention(q[row].double().unsqueeze(1), k, v, scale=0.3).squeeze(1)
        torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-6)


def test_paged_decode_with_sinks_softcap_and_an_empty_sequence() -> None:
    pages = cases.pages((6, 0), 1, 4, (8, 8), True, False)
    q, sinks = cases.normal(3, 2, 2, 8), torch.tensor([0.5, -1.0])
    got = reference.paged_decode(
        q,
        pages.k_cache,
        pages.k_scale,
        pages.v_cache,
        None,
        pages.block_table,
        pages.lengths,
        0.3,
        sinks=sinks,
        softcap=2.0,
    )
    scores = (q[0].double() @ pages.k[0, 0, :6].double().T * 0.3).div(2).tanh() * 2
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.double().exp().unsqueeze(1))
    torch.testing.assert_close(got[0].double(), weights @ pages.v[0, 0, :6].double(), rtol=1e-5, atol=1e-6)
    assert not got[1].any()


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("int8_keys", "int8_values"), [(False, False), (True, False), (True, True)])
def test_paged_prefill_is_causal_attention_of_each_sequence(int8_keys: bool, int8_values: bool, window: int) -> None:
    """torch's own attention in float64 with a mask made position by position, one sequence at a time, and padding."""
    counts, lengths, h, kv_heads = (1, 9, 5, 4), (1, 21, 5, 20), 6, 3
    pages = cases.pages(lengths, kv_heads, 4, (12, 10), int8_keys, int8_values)
    q, tiles = cases.normal(3, sum(counts) + 3, h, 12), cases.tiles(counts, lengths, 4, padding=3, spare=2)
    stores = pages.k_cache, pages.k_scale, pages.v_cache, pages.v_scale
    got = reference.paged_prefill(q, *stores, pages.block_table, tiles, 0.3, window=window)
    first = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        k, v = (t[row, :, :length].double().repeat_interleave(h // kv_heads, 0) for t in (pages.k, pages.v))
        mask = torch.tensor(
            [[max(0, at - window + 1 if window else 0) <= p <= at for p in range(length)]
             for at in range(length - count, length)]
        )  # fmt: skip
        mine = q[first : first + count].double().transpose(0, 1)
        want = functional.scaled_dot_product_attention(mine, k, v, attn_mask=mask, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(got[first : first + count].double(), want, rtol=1e-5, atol=1e-6)
        first += count
    assert not got[first:].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_is_seen(wrong: float) -> None:
    """By queries at and behind it: zeros in place of NaN would be taken for a text. A query before it has none."""
    pages, q = cases.pages((9,), 1, 4, (8, 8), False, False), cases.normal(3, 9, 2, 8).abs()
    pages.k_cache[pages.block_table[0, 1], 0, 1] = wrong  # position 5
    stores = pages.k_cache, None, pages.v_cache, None
    for at in (4, 5, 8):
        length = torch.tensor([at + 1], dtype=torch.int32)
        got = reference.paged_decode(q[at : at + 1], *stores, pages.block_table, length, 0.3)
        assert bool(got.isnan().all()) == bool(got.isnan().any()) == (at >= 5)
    got = reference.paged_prefill(q, *stores, pages.block_table, cases.tiles((9,), (9,), 4), 0.3)
    assert got.isnan().all(-1).all(-1).tolist() == [at >= 5 for at in range(9)]
