"""Triton's kernels in its interpreter against the torch reference: odd sizes, uneven routing, pages in random order.

The half-precision type is float16 here: the interpreter truncates to bfloat16 where cards round.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quantkit_runtime.kernels import reference
from quantkit_runtime.kernels.tuning import Attention, Prefill, Tile, tuning
from tests.runtime.kernels import cases

Modules = dict[str, ModuleType]

SMALL = Tile(16, 32, 32, 4, 2)
"""Small enough that a small matrix has several tiles in each direction."""


def close(got: Tensor, want: Tensor, relative: float = 1e-6) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=relative * float(want.float().abs().max()))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [(33, 97, 0), (70, 128, 0), (33, 160, 32), (17, 33, 11), (40, 512, 256)])
@pytest.mark.parametrize("m", cases.M_CLASSES)
def test_gemm(triton_kernels: Modules, m: int, n: int, k: int, group: int, swap: bool) -> None:
    x, w, bias = cases.int8(0, m, k), cases.int8(1, n, k), cases.normal(4, n)
    x_scale, w_scale = cases.positive(2, m, k // group if group else 1), cases.positive(3, n, 1)
    tile = Tile(16, 32, 32, 4, 2, band=2, swap=swap) if m < 64 else Tile(64, 32, 64, 4, 2, band=2, swap=swap)
    for dtype, relative in ((torch.float32, 1e-6), (torch.float16, 2**-10)):
        args = (x, x_scale, w, w_scale, None if dtype == torch.float32 else bias, dtype)
        close(triton_kernels["gemm"].w8a8_gemm(*args, tile), reference.w8a8_gemm(*args), relative)


def test_gemm_is_exact_in_int32_where_float32_is_not(triton_kernels: Modules) -> None:
    """All products at 127^2 over more inputs than float32 could add exactly; the sum is a multiple of 2^8."""
    x, w = torch.full((2, 2048), 127, dtype=torch.int8), torch.full((3, 2048), 127, dtype=torch.int8)
    ones = torch.ones(2, 1), torch.ones(3, 1)
    got = triton_kernels["gemm"].w8a8_gemm(x, ones[0], w, ones[1], None, torch.float32)
    assert torch.equal(got, torch.full((2, 3), float(2048 * 127**2)))


@pytest.mark.parametrize("sign", [1, -1])
def test_gemm_is_exact_for_the_largest_sums_of_a_group(triton_kernels: Modules, sign: int) -> None:
    """Sums of 256 products of 127^2, next to 2^22: the bias that takes them to float32 must not run over."""
    x, w = torch.full((2, 512), 127, dtype=torch.int8), torch.full((3, 512), 127 * sign, dtype=torch.int8)
    x[1, 0] = 126  # an odd last bit
    scales = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.ones(3, 1)
    got = triton_kernels["gemm"].w8a8_gemm(x, scales[0], w, scales[1], None, torch.float32)
    assert got[:, 0].tolist() == [sign * 256 * 127**2, sign * (256 * 127**2 - 127)]


@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize(("m", "block"), [*((m, 16) for m in cases.M_CLASSES), (16, 64), (129, 64)])
def test_grouped_gemm(triton_kernels: Modules, m: int, block: int, share: int, group: int) -> None:
    """Blocks of 64 rows are computed as 32 where the others are empty."""
    experts, per_token, n, k = 7, 3, 33, 80
    index, _ = cases.routing(m, m, per_token, experts, elsewhere=True)
    rows = m * per_token // share
    x, w, bias = cases.int8(0, rows, k), cases.int8(1, experts, n, k), cases.normal(4, experts, n)
    x_scale, w_scale = cases.positive(2, rows, k // group if group else 1), cases.positive(3, experts, n, 1)
    alignment = reference.align(index, experts, block)
    if block == 64 and m == 129:
        held = (alignment.slots.view(-1, block)[alignment.tile_expert >= 0] < index.numel()).sum(1)
        assert held.min() <= 32 < held.max()
    args = (x, x_scale, w, w_scale, bias, alignment, share, torch.float32)
    here = ((index >= 0) & (index < experts)).reshape(-1)
    got, want = triton_kernels["gemm"].grouped_gemm(*args, SMALL), reference.grouped_gemm(*args)
    close(got[here], want[here])


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_quantize_is_bit_for_bit_the_reference(triton_kernels: Modules, m: int, dtype: torch.dtype, group: int) -> None:
    x = cases.normal(m, m, 200, dtype=dtype)
    x[0, :16] = 0
    x[-1, 7] = 60000
    q, scale = triton_kernels["quantize"].quantize(x, group)
    want_q, want_scale = reference.quantize(x, group)
    assert torch.equal(q, want_q)
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_quantize_rounds_half_to_even_and_lets_nan_through(triton_kernels: Modules, wrong: float) -> None:
    """Infinity too: int8 values of a quotient that is NaN differ between cards, and times infinity they can be a score
    of -infinity, which attention passes over."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], [1.0, 2.0, wrong, 0.0, 0.0, 0.0, 0.0]])
    q, scale = triton_kernels["quantize"].quantize(x)
    assert q[0].tolist() == [127, 0, 2, 2, 0, -2, -126]
    assert scale[0].item() == 1.0
    assert bool(scale[1].isnan())


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_quantize(
    triton_kernels: Modules, dtype: torch.dtype, with_residual: bool, unit_offset: bool, group: int
) -> None:
    x, residual = cases.normal(1, 5, 200, dtype=dtype), cases.normal(2, 5, 200, dtype=dtype) * 3
    weight = cases.normal(3, 200, dtype=dtype)
    args = (x, weight, 1e-5, residual if with_residual else None, unit_offset, group)
    got, want = triton_kernels["quantize"].norm_quantize(*args), reference.norm_quantize(*args)
    assert torch.equal(got.total, want.total)
    bits = 1e-6 if dtype == torch.float32 else 2**-9  # the order of the sum may move the last bit
    close(got.normed, want.normed, bits)
    close(got.scale, want.scale, bits)
    assert int((got.q.int() - want.q.int()).abs().max()) <= 1


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_mul_quantize(triton_kernels: Modules, dtype: torch.dtype, group: int) -> None:
    gate_up = cases.normal(1, 5, 400, dtype=dtype) * 4
    got, want = (
        triton_kernels["quantize"].silu_mul_quantize(gate_up, group),
        reference.silu_mul_quantize(gate_up, group),
    )
    close(got[1], want[1], 1e-6 if dtype == torch.float32 else 2**-9)
    assert int((got[0].int() - want[0].int()).abs().max()) <= 1


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("experts", [2, 7, 16])
@pytest.mark.parametrize("m", [*cases.M_CLASSES, 700])
def test_align_is_the_reference(triton_kernels: Modules, m: int, experts: int, block: int) -> None:
    index, _ = cases.routing(m, m, 1 if experts == 2 else 2, experts, elsewhere=True)
    got, want = triton_kernels["routing"].align(index, experts, block), reference.align(index, experts, block)
    assert torch.equal(got.slots, want.slots)
    assert torch.equal(got.tile_expert, want.tile_expert)


@pytest.mark.parametrize("m", [1, 16])
def test_combine_leaves_out_what_other_ranks_compute(triton_kernels: Modules, m: int) -> None:
    index, weights = cases.routing(m, m, 3, 7, elsewhere=True)
    out = cases.normal(0, 3 * m, 33)
    out[~((index >= 0) & (index < 7)).reshape(-1)] = torch.nan
    close(triton_kernels["routing"].combine(out, weights, index, 7), reference.combine(out, weights, index, 7))


def columns(x: Tensor) -> Tensor:
    """The same values lying apart, as columns of a wider tensor do."""
    return torch.stack((x, torch.full_like(x, 99)), -1)[..., 0]


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize(("int8_keys", "int8_values"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads", [(6, 3), (5, 1)])
def test_paged_decode(
    triton_kernels: Modules, heads: tuple[int, int], int8_keys: bool, int8_values: bool, window: int
) -> None:
    """Several steps and several shares per sequence, an empty one, one of a single token, odd head dimensions."""
    pages = cases.pages((1, 150, 17, 0), heads[1], 4, (12, 10), int8_keys, int8_values)
    q, sinks = cases.normal(3, 4, heads[0], 12), cases.normal(5, heads[0]) if window else None
    args = (
        q, pages.k_cache, pages.k_scale, pages.v_cache, pages.v_scale, pages.block_table, pages.lengths, 0.3,
        sinks, window, 5.0 if window == 7 else 0.0,
    )  # fmt: skip
    strided = (*args[:5], columns(pages.block_table), columns(pages.lengths), *args[7:])
    for programs, given in ((1, args), (40, strided)):
        got = triton_kernels["attention"].paged_decode(*given, config=Attention(16, 4, 2, programs))
        close(got, reference.paged_decode(*args), 5e-4 if int8_keys else 1e-5)  # queries to 15 bits over INT8 keys


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_decode_shows_a_query_that_is_no_number(triton_kernels: Modules, wrong: float) -> None:
    """Over INT8 keys the query is rounded to integers, of which none is NaN."""
    pages, q = cases.pages((17, 5), 1, 4, (12, 10), True, False), cases.normal(3, 2, 2, 12)
    q[1, 0, 3] = wrong
    stores = pages.k_cache, pages.k_scale, pages.v_cache, pages.v_scale
    got = triton_kernels["attention"].paged_decode(q, *stores, pages.block_table, pages.lengths, 0.3)
    assert got.isnan().all(-1).tolist() == got.isnan().any(-1).tolist() == [[False, False], [True, False]]


PACKED = {
    "one sequence, one query": ((1,), (38,)),
    "packed": ((3, 16, 1, 9), (3, 45, 29, 9)),
    "tiles and a bit": ((64, 33), (71, 33)),
    "long": ((129,), (150,)),
}
"""Queries and lengths of sequences: pasts that are no multiple of a block of 4 or of a step, and none."""


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize(("int8_keys", "int8_values"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("packed", PACKED)
def test_paged_prefill(triton_kernels: Modules, packed: str, int8_keys: bool, int8_values: bool, window: int) -> None:
    """Odd head dimensions, padding and tiles that are not needed, softcaps and sinks, tables and queries that lie
    apart; no place behind a sequence's end is read, for there is NaN."""
    (counts, lengths), padding = PACKED[packed], 5
    heads = (2, 1) if packed == "long" else (4, 2)
    pages = cases.pages(lengths, heads[1], 4, (12, 10), int8_keys, int8_values)
    q, sinks = cases.normal(3, sum(counts) + padding, heads[0], 12), cases.normal(5, heads[0]) if window else None
    stores, softcap = (pages.k_cache, pages.k_scale, pages.v_cache, pages.v_scale), 5.0 if window == 7 else 0.0
    want_tiles = cases.tiles(counts, lengths, 64, padding)
    want = reference.paged_prefill(q, *stores, pages.block_table, want_tiles, 0.3, sinks, window, softcap)
    run = triton_kernels["prefill"].paged_prefill
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    for queries, bn, one, table in (
        (16, 16, columns(q), pages.block_table),
        (64, 32, turned, columns(pages.block_table)),
    ):
        tiles = cases.tiles(counts, lengths, queries, padding, spare=3)
        got = run(one, *stores, table, tiles, 0.3, sinks, window, softcap, Prefill(queries, bn, 4, 2))
        close(got, want, 1e-5)


@pytest.mark.parametrize(("dim", "dim_v"), [(80, 80), (96, 96), (192, 128), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_paged_prefill_of_other_head_dimensions(
    triton_kernels: Modules, dtype: torch.dtype, dim: int, dim_v: int
) -> None:
    """One key head for all, values in another dtype than queries, and the table's own shape."""
    counts, lengths = (16, 3), (50, 3)
    pages = cases.pages(lengths, 1, 16, (dim, dim_v), int8_keys=True, int8_values=False)
    q, tiles = cases.normal(3, 19, 5, dim, dtype=dtype), cases.tiles(counts, lengths, 16)
    args = (q, pages.k_cache, pages.k_scale, pages.v_cache, None, pages.block_table, tiles, dim**-0.5)
    close(
        triton_kernels["prefill"].paged_prefill(*args),
        reference.paged_prefill(*args),
        1e-5 if dtype == torch.float32 else 2**-9,
    )


def test_tiles_of_prefill_attention_bring_their_own_shape(
    triton_kernels: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward is cut for its layer with most heads; a layer with fewer takes the table's row for these tiles, since
    only whole rows were tried on the card."""
    taken: list[Prefill] = []
    rows = ((64, Prefill(16, 64, 2, 3)), (1 << 30, Prefill(64, 32, 4, 2)))
    monkeypatch.setattr(triton_kernels["prefill"], "tuning", lambda: replace(tuning(), prefill=rows))
    monkeypatch.setattr(Prefill, "fitted", lambda self, _: (taken.append(self), (self.bn, self.stages))[1])
    counts, lengths = (16, 3), (50, 3)
    pages = cases.pages(lengths, 1, 16, (16, 16), int8_keys=True, int8_values=False)
    for queries in (64, 16, 32):
        q, tiles = cases.normal(3, 19, 2, 16), cases.tiles(counts, lengths, queries)
        args = (q, pages.k_cache, pages.k_scale, pages.v_cache, None, pages.block_table, tiles, 0.3)
        close(triton_kernels["prefill"].paged_prefill(*args), reference.paged_prefill(*args), 1e-5)
    assert taken == [rows[1][1], rows[0][1], rows[0][1]]


@pytest.mark.parametrize(("pairs", "adjacent"), [(6, False), (4, False), (4, True), (6, True), (0, False)])
@pytest.mark.parametrize(("int8_keys", "int8_values"), [(False, False), (True, False), (True, True)])
def test_rope_write(triton_kernels: Modules, int8_keys: bool, int8_values: bool, pairs: int, adjacent: bool) -> None:
    """Queries, keys and values as transformers hands them over: views of one product, the heads before the tokens."""
    tokens, heads, kv_heads, dim = 5, 6, 2, 12
    q, k, v = cases.normal(0, tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    v = columns(v)
    whole = cases.normal(1, tokens, 2 * pairs), cases.normal(2, tokens, 2 * pairs)
    cos, sin = (x[:, :pairs] for x in whole) if adjacent else (whole[0][:, :pairs], columns(whole[1][:, :pairs]))
    rope = reference.Rope(cos, sin, adjacent) if pairs else None
    places = torch.tensor([3, 17, -1, 8, 0])

    def caches() -> list[Tensor | None]:
        shape = (5, kv_heads, 4, dim)
        made: list[Tensor | None] = []
        for quantized in (int8_keys, int8_values):
            made.append(torch.zeros(shape, dtype=torch.int8 if quantized else torch.float32))
            made.append(torch.zeros(shape[:3]) if quantized else None)
        return made

    ours, theirs = caches(), caches()
    got = triton_kernels["cache"].rope_write(q, k, v, rope, columns(places), *ours)
    close(got, reference.rope_write(q, k, v, rope, places, *theirs))
    for one, other in zip(ours, theirs, strict=True):
        if one is not None and other is not None:
            close(one, other, 1e-6 if one.dtype == torch.float32 else 1.01 / 127)
