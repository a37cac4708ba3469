"""Inputs that the tests of all kernels share: odd sizes, uneven routing, pages in random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_runtime.kernels.reference import Tiles

M_CLASSES = (1, 3, 16, 64, 129)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def int8(seed: int, *shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator(seed))


def positive(seed: int, *shape: int) -> Tensor:
    """Scales between 0.001 and 0.1."""
    return torch.rand(shape, generator=generator(seed)) * 0.099 + 0.001


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def routing(seed: int, tokens: int, k: int, experts: int, elsewhere: bool = False) -> tuple[Tensor, Tensor]:
    """Distinct experts per token, low numbers more often, the last expert never; weights that sum to 1.

    `elsewhere` sends some slots to experts of another rank (an index of E or more, or -1).
    """
    chance = torch.linspace(2.0, 0.2, experts)
    chance[-1] = 0.0
    index = torch.multinomial(chance.expand(tokens, -1), k, generator=generator(seed))
    if elsewhere:
        index[::3, 0] = experts
        index[1::4, -1] = -1
    weights = torch.rand((tokens, k), generator=generator(seed + 1))
    return index, weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class Pages:
    """Keys and values of some sequences, as pages and as plain tensors.

    Attributes:
        k, v: float32 `[B, kv_heads, L, D]`, what the pages hold, dequantized.
    """

    k_cache: Tensor
    k_scale: Tensor | None
    v_cache: Tensor
    v_scale: Tensor | None
    block_table: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor


def pages(
    lengths: tuple[int, ...], kv_heads: int, block: int, dims: tuple[int, int], int8_keys: bool, int8_values: bool
) -> Pages:
    """Pages in random order with NaN or large values in every place that no token holds."""
    per_sequence = -(-max(lengths) // block)
    blocks = per_sequence * len(lengths) + 2
    table = torch.randperm(blocks, generator=generator(7))[: per_sequence * len(lengths)].view(len(lengths), -1)
    length = torch.tensor(lengths, dtype=torch.int32)
    held = torch.zeros(blocks, block, dtype=torch.bool)
    places = torch.arange(per_sequence * block).view(1, per_sequence, block)
    held[table] = places < length.view(-1, 1, 1)

    def cache(seed: int, dim: int, quantized: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        empty = ~held[:, None, :, None]
        if not quantized:
            values = normal(seed, blocks, kv_heads, block, dim).masked_fill(empty, torch.nan)
            return values, None, values
        q, scale = int8(seed, blocks, kv_heads, block, dim), positive(seed, blocks, kv_heads, block) * 0.2
        scale = scale.masked_fill(empty[..., 0], torch.nan)
        return q, scale, q * scale.unsqueeze(-1)

    def plain(values: Tensor) -> Tensor:
        return values[table].transpose(1, 2).flatten(2, 3)

    k_cache, k_scale, k = cache(1, dims[0], int8_keys)
    v_cache, v_scale, v = cache(2, dims[1], int8_values)
    table = table.to(torch.int32)
    for row, tokens in enumerate(lengths):
        table[row, -(-tokens // block) :] = -1  # behind the end: must not be followed
    return Pages(k_cache, k_scale, v_cache, v_scale, table, length, plain(k), plain(v))


def tiles(counts: tuple[int, ...], lengths: tuple[int, ...], queries: int, padding: int = 0, spare: int = 0) -> Tiles:
    """The last `counts` positions of sequences of these lengths, packed; then padding, and tiles that nobody needs."""
    rows, first = [], 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        rows += [(row, first + at, min(queries, count - at), length - count + at) for at in range(0, count, queries)]
        first += count
    rows += [(0, first + at, min(queries, padding - at), -queries) for at in range(0, padding, queries)]
    rows += [(0, 0, 0, 0)] * spare
    return Tiles(torch.tensor(rows, dtype=torch.int32), queries)
