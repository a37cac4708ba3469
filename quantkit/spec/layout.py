"""Layouts of INT8 weights on disk: plain `[N, K]`, and the orders in which kernels of some devices read them.

A layout is a permutation: both sizes are cut into tiles, the axes are put in another order, and nothing is padded, so
`unpack(pack(w))` is `w` bit for bit and a size that does not fit is refused. Stacked experts are packed one by one.
Packing comes last, after fusing and splitting: a rank's shard is packed, never a piece of a packed tensor.

Shape suffixes: N output channels, K input channels, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import InputError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the bytes of one matrix `[N, K]` are ordered.

    N is cut into `[N / prod(n_tile), *n_tile]` and K into `[K / prod(k_tile), *k_tile]`; `order` permutes these axes,
    those of N first. A layout whose first axis is then K's is K-major: its packed shape is
    `[K / prod(k_tile), N * prod(k_tile)]`; any other keeps `[N, K]`.

    Attributes:
        name: as written in `--layout` and in the manifest.
        target: device family whose kernels read it, "" for any.
        n_tile, k_tile: sizes of the tiles, outermost first.
        order: axes of the cut matrix in the order of the bytes.
        doc: one line for humans.
    """

    name: str
    target: str
    n_tile: tuple[int, ...]
    k_tile: tuple[int, ...]
    order: tuple[int, ...]
    doc: str

    @property
    def n_multiple(self) -> int:
        return math.prod(self.n_tile)

    @property
    def k_multiple(self) -> int:
        return math.prod(self.k_tile)

    @property
    def k_major(self) -> bool:
        return self.order[0] > len(self.n_tile)

    def misfits(self, n: int, k: int) -> list[str]:
        """Why a matrix `[n, k]` cannot be packed, with the nearest legal sizes; empty when it can."""
        sizes = (("N", n, self.n_multiple), ("K", k, self.k_multiple))
        return [
            f"{axis} = {size} is no multiple of {multiple}; nearest legal {axis}: {_nearest(size, multiple)}"
            for axis, size, multiple in sizes
            if size % multiple or not size
        ]

    def packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape on disk of a weight `[N, K]` or `[E, N, K]`.

        Raises:
            UsageError: a size that does not fit, with the legal multiples.
        """
        *lead, n, k = shape
        if problems := self.misfits(n, k):
            raise UsageError(f"a weight {list(shape)} has no layout {self.name}", "keep it plain", items=problems)
        return (*lead, k // self.k_multiple, n * self.k_multiple) if self.k_major else tuple(shape)

    def plain_shape(self, packed: tuple[int, ...]) -> tuple[int, ...]:
        """The way back from `packed_shape`.

        Raises:
            InputError: no weight has this packed shape.
        """
        *lead, rows, columns = packed
        n, k = (columns // self.k_multiple, rows * self.k_multiple) if self.k_major else (rows, columns)
        if self.misfits(n, k) or n * k != rows * columns:
            raise InputError(f"no weight of layout {self.name} has the packed shape {list(packed)}")
        return (*lead, n, k)

    def pack(self, w_NK: Tensor) -> Tensor:
        """int8 `[N, K]` or `[E, N, K]` -> a contiguous tensor of its packed shape.

        Raises:
            UsageError: as `packed_shape`.
        """
        shape = self.packed_shape(tuple(w_NK.shape))
        return (
            w_NK.reshape(self._cut(tuple(w_NK.shape))).permute(self._axes(w_NK.dim() - 2)).reshape(shape).contiguous()
        )

    def unpack(self, packed: Tensor) -> Tensor:
        """The way back from `pack`: contiguous `[N, K]` or `[E, N, K]`.

        Raises:
            InputError: as `plain_shape`.
        """
        shape = self.plain_shape(tuple(packed.shape))
        cut, axes = self._cut(shape), self._axes(packed.dim() - 2)
        back = sorted(range(len(axes)), key=axes.__getitem__)
        return packed.reshape([cut[axis] for axis in axes]).permute(back).reshape(shape).contiguous()

    def spans(self, n: int, k: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(byte offset, length) of the pieces of one packed matrix `[n, k]` that hold its rows [start, stop).

        Joined they are `pack` of these rows alone. Both ends must be multiples of `n_multiple`.
        """
        if start % self.n_multiple or stop % self.n_multiple:
            raise ValueError(f"rows {start} to {stop} cut a tile of layout {self.name}")
        if not self.k_major:
            yield start * k, (stop - start) * k
            return
        width = self.k_multiple
        for block in range(k // width):
            yield (block * n + start) * width, (stop - start) * width

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *lead, n, k = shape
        return (*lead, n // self.n_multiple, *self.n_tile, k // self.k_multiple, *self.k_tile)

    def _axes(self, lead: int) -> tuple[int, ...]:
        return (*range(lead), *(lead + axis for axis in self.order))


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("plain", "", (), (), (0, 1), "[N, K] row by row: Triton, CK gemm_a8w8, hipBLASLt and every engine"),
        # view(N/16, 16, K/32, 2, 16).permute(0, 2, 3, 1, 4): AITER's shuffle_weight with layout (16, 16), 1-byte values
        Layout("aiter_16x16", "gfx9xx", (16,), (2, 16), (0, 2, 3, 1, 4), "AITER's pre-shuffled INT8 GEMMs"),
        # W.T as [K/64, 64, N] with the last two swapped: each row of a block of K is 64 values of one output channel
        Layout("marlin_k64", "dcu", (), (64,), (1, 0, 2), "W8A8 Marlin kernels of the DCU engines (slimquant)"),
    )
}


def layout_named(name: str) -> Layout:
    """A row of the table.

    Raises:
        UsageError: no such row.
    """
    if name not in LAYOUTS:
        raise UsageError(f"no layout is called {name!r}", "choose one of the table", choices=tuple(LAYOUTS))
    return LAYOUTS[name]


def _nearest(size: int, multiple: int) -> str:
    below = size // multiple * multiple
    return ", ".join(str(legal) for legal in (below, below + multiple) if legal)
