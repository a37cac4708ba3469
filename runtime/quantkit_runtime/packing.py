"""What a prefill forward reads, as one array of int32: one copy takes it to the card, and a recorded forward finds it
where it was.

Shape suffixes: R rows (ids, positions, each group's slots), T tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit_runtime.kernels.reference import Tiles, cut

SMALLEST = 64
"""Tokens of the smallest recorded forward: fewer take as long, since weights are read all the same."""


class Form(NamedTuple):
    """Sizes of a prefill forward.

    Attributes:
        tokens: packed, padding included.
        sequences: most of them.
        groups: block tables of a sequence.
        width: blocks of a table.
        queries: of a tile of attention; 0 where attention takes none.
    """

    tokens: int
    sequences: int
    groups: int
    width: int
    queries: int

    @property
    def tiles(self) -> int:
        """Tiles that suffice for any packing: each sequence, and the padding, may waste queries - 1 places."""
        return (self.tokens + (self.sequences + 1) * (self.queries - 1)) // self.queries if self.queries else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows, last tokens, tables and tiles, each from a multiple of 16 bytes on."""
        numbers = ((2 + self.groups) * self.tokens, self.sequences, self.sequences * self.groups * self.width)
        return tuple(-(-number // 4) * 4 for number in (*numbers, 4 * self.tiles))

    def holds(self, other: Form) -> bool:
        """Whether that forward can be padded to this one."""
        return self.groups == other.groups and all(one >= two for one, two in zip(self[:4], other[:4], strict=True))

    def pack(self, rows_RT: Any, tables: Any, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """The array of a forward, on the host.

        Args:
            rows_RT: ids, positions and each group's slots of the tokens; padding has zeros, so it writes to block 0.
            tables: of the sequences, `[B, groups, blocks]`.
            shapes: (tokens, length after them) of each sequence.
        """
        counts = [tokens for tokens, _ in shapes]
        tokens = sum(counts)
        rows = np.zeros((2 + self.groups, self.tokens), dtype=np.int32)
        rows[:, :tokens] = rows_RT
        last = np.zeros(self.sequences, dtype=np.int32)
        last[: len(shapes)] = np.cumsum(counts) - 1
        padded = np.zeros((self.sequences, self.groups, self.width), dtype=np.int32)
        padded[: len(shapes), :, : tables.shape[2]] = tables
        tiles = np.zeros((self.tiles, 4), dtype=np.int32)
        if self.queries:
            found, rest = cut(shapes, self.queries), self.tokens - tokens
            # of padding the positions lie before all keys
            found += [(0, tokens + first, count, -count) for _, first, count, _ in cut([(rest, rest)], self.queries)]
            tiles[: len(found)] = found
        packed = np.zeros(sum(self.sizes), dtype=np.int32)
        start = 0
        for part, size in zip((rows, last, padded, tiles), self.sizes, strict=True):
            packed[start : start + part.size] = part.reshape(-1)
            start += size
        return torch.from_numpy(packed)

    def empty(self) -> Tensor:
        """The array of a forward of nothing but padding."""
        shape = 2 + self.groups, 0
        return self.pack(np.zeros(shape), np.zeros((0, self.groups, 0)), [])

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tiles]:
        """Rows int64 `[R, T]`, places of the sequences' last tokens int64 `[B]`, tables int32 `[B, groups, width]`, and
        tiles: views of the array but for the int64."""
        rows, last, tables, tiles = packed.split(self.sizes)
        wide = packed[: len(rows) + len(last)].long()  # once, and not by every layer that reads it
        shape = self.sequences, self.groups, self.width
        return (
            wide[: (2 + self.groups) * self.tokens].view(-1, self.tokens),
            wide[len(rows) : len(rows) + self.sequences],
            tables[: self.sequences * self.groups * self.width].view(shape),
            Tiles(tiles[: 4 * self.tiles].view(-1, 4), self.queries),
        )


def sizes(chunk: int) -> list[int]:
    """Tokens of the forwards that are recorded, largest first: a prompt's rest is padded to at most twice its length
    where it is not short."""
    return [size for power in range(chunk.bit_length()) if (size := chunk >> power) >= min(SMALLEST, chunk)]
