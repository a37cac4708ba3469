"""Layouts: permutations that come back bit for bit, held against index arithmetic written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError, UsageError
from quantkit.spec.layout import LAYOUTS, Layout, layout_named

Address = Callable[[int, int, int, int], int]

ADDRESSES: dict[str, Address] = {
    "plain": lambda n, k, _, size_k: n * size_k + k,
    # tiles of 16 channels x 32 inputs (512 bytes); in a tile first the 16 inputs of the lower half for every channel
    "aiter_16x16": lambda n, k, _, size_k: (
        n // 16 * 16 * size_k + k // 32 * 512 + k % 32 // 16 * 256 + n % 16 * 16 + k % 16
    ),
    # blocks of 64 inputs; in a block channel after channel
    "marlin_k64": lambda n, k, size_n, _: k // 64 * 64 * size_n + n * 64 + k % 64,
}
"""Byte address of W[n, k] in the packed matrix, given (n, k, N, K)."""


def random_int8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def ref_pack(w: np.ndarray, address: Address) -> np.ndarray:
    """Bytes of the packed matrix, one element at a time."""
    size_n, size_k = w.shape
    flat = np.zeros(size_n * size_k, np.int8)
    for n in range(size_n):
        for k in range(size_k):
            flat[address(n, k, size_n, size_k)] = w[n, k]
    return flat


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 192)])
def test_addresses(layout: Layout, n: int, k: int) -> None:
    w = random_int8(n, k)
    packed = layout.pack(w)
    np.testing.assert_array_equal(packed.flatten().numpy(), ref_pack(w.numpy(), ADDRESSES[layout.name]))
    assert packed.is_contiguous()
    assert (layout.name == "plain") == torch.equal(packed.flatten(), w.flatten()), "the others move something"


def test_packed_shapes() -> None:
    assert LAYOUTS["plain"].packed_shape((7, 5)) == (7, 5)
    assert LAYOUTS["aiter_16x16"].packed_shape((3, 32, 64)) == (3, 32, 64)
    assert LAYOUTS["marlin_k64"].packed_shape((7, 192)) == (3, 448)
    assert LAYOUTS["marlin_k64"].packed_shape((5, 7, 192)) == (5, 3, 448)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1)
)
def test_back_bit_for_bit(name: str, experts: int, tiles_n: int, tiles_k: int, seed: int) -> None:
    layout = LAYOUTS[name]
    lead = (experts,) if experts else ()
    w = random_int8(*lead, tiles_n * layout.n_multiple, tiles_k * layout.k_multiple, seed=seed)
    packed = layout.pack(w)
    assert tuple(packed.shape) == layout.packed_shape(tuple(w.shape))
    assert layout.plain_shape(tuple(packed.shape)) == tuple(w.shape)
    assert torch.equal(layout.unpack(packed), w)
    for expert in range(experts):
        assert torch.equal(packed[expert], layout.pack(w[expert])), "experts are packed one by one"
    assert torch.equal(layout.pack(w.transpose(-1, -2).contiguous().transpose(-1, -2)), packed), "strides do not matter"
    shifted = torch.cat([w.new_zeros(3), w.flatten()])[3:].reshape(w.shape)
    assert torch.equal(layout.pack(shifted), packed), "nor does the place in memory"


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 5), st.integers(1, 4), st.data())
def test_spans_are_the_rows(name: str, tiles_n: int, tiles_k: int, data: st.DataObject) -> None:
    """The bytes at the spans of some rows are those rows, packed on their own."""
    layout = LAYOUTS[name]
    n, k = tiles_n * layout.n_multiple, tiles_k * layout.k_multiple
    w = random_int8(n, k)
    first = data.draw(st.integers(0, tiles_n - 1))
    start, stop = (tile * layout.n_multiple for tile in (first, data.draw(st.integers(first + 1, tiles_n))))
    flat = layout.pack(w).flatten()
    joined = torch.cat([flat[offset : offset + length] for offset, length in layout.spans(n, k, start, stop)])
    rows = layout.pack(w[start:stop])
    assert torch.equal(joined, rows.flatten())
    assert torch.equal(layout.unpack(joined.reshape(rows.shape)), w[start:stop])


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("aiter_16x16", (40, 64), "N = 40 is no multiple of 16; nearest legal N: 32, 48"),
        ("aiter_16x16", (32, 48), "K = 48 is no multiple of 32; nearest legal K: 32, 64"),
        ("marlin_k64", (40, 32), "K = 32 is no multiple of 64; nearest legal K: 64"),
        ("marlin_k64", (2, 40, 65), "K = 65 is no multiple of 64; nearest legal K: 64, 128"),
        ("plain", (0, 5), "N = 0 is no multiple of 1; nearest legal N: 1"),
    ],
)
def test_odd_sizes_are_refused(name: str, shape: tuple[int, ...], found: str) -> None:
    with pytest.raises(UsageError) as caught:
        LAYOUTS[name].pack(torch.zeros(shape, dtype=torch.int8))
    assert found in caught.value.items


def test_both_misfits_are_told() -> None:
    assert len(LAYOUTS["aiter_16x16"].misfits(17, 33)) == 2
    assert LAYOUTS["aiter_16x16"].misfits(16, 32) == []


@pytest.mark.parametrize(("name", "shape"), [("aiter_16x16", (17, 32)), ("marlin_k64", (2, 100))])
def test_impossible_packed_shapes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="packed shape"):
        LAYOUTS[name].unpack(torch.zeros(shape, dtype=torch.int8))


def test_a_tile_is_not_cut() -> None:
    with pytest.raises(ValueError, match="cut a tile"):
        list(LAYOUTS["aiter_16x16"].spans(32, 32, 8, 16))


def test_an_unknown_name() -> None:
    with pytest.raises(UsageError) as caught:
        layout_named("marlin")
    assert caught.value.choices == ("plain", "aiter_16x16", "marlin_k64")
