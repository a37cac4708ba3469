"""Keys and values in blocks: a pool for all sequences, and for each sequence a table of the blocks that are its own.

Every block holds `block` positions, so sequences of any length share a pool without copying and only the end of a
sequence's last block is ever unused. INT8 entries have one float32 scale per token and head. Block 0 belongs to nobody:
padding writes there.

Layers that see a window have a pool and a table of their own, a group for each window: what no later token can see is
written over, block by block, so a sequence owns a ring of blocks, and its table names block i of the text at place i.
The pools of windows are sized so that they never run out before that of the whole text; it alone decides who may run,
and on all ranks of a mesh alike.

Shape suffixes: T tokens, G key/value heads, D head dimension, B sequences, L positions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.arithmetic import quantize_tokens
from quantkit.errors import UsageError

BLOCK, CHUNK = 16, 512
DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "float32": torch.float32}


class LayerSpec(NamedTuple):
    """What the attention of a layer hands over; `window` 0 means all positions are seen, `queries` are query heads."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    queries: int = 1


@dataclass(frozen=True)
class KvFormat:
    """How a position is kept.

    Attributes:
        keys, values: dtype.
        block: positions in a block.
        chunk: most tokens of a sequence in one forward.
    """

    keys: torch.dtype
    values: torch.dtype
    block: int = BLOCK
    chunk: int = CHUNK

    @classmethod
    def of(cls, keys: str, values: str, compute: torch.dtype, block: int = BLOCK) -> KvFormat:
        """From `--kv-keys` and `--kv-values`: int8, bf16, float32, or auto for the compute dtype.

        Raises:
            UsageError: unknown name, or no block size.
        """
        known = {**DTYPES, "auto": compute}
        for name in (keys, values):
            if name not in known:
                raise UsageError(f"unknown dtype {name!r} of the KV cache", choices=sorted(known))
        if block < 1:
            raise UsageError(f"a KV block of {block} positions", "give --kv-block 16")
        return cls(known[keys], known[values], block)

    def block_bytes(self, spec: LayerSpec) -> int:
        """Bytes of one block of a layer, scales included."""
        entry = _entry_bytes(spec.key_dim, self.keys) + _entry_bytes(spec.value_dim, self.values)
        return self.block * spec.heads * entry

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many positions."""
        return -(-tokens // self.block)

    def ring(self, window: int) -> int:
        """Blocks of a sequence in a layer with a window: what a chunk's first token sees, and the chunk, unaligned."""
        return self.blocks(window - 1 + self.chunk) + 1 if window else 1 << 60

    def layer_blocks(self, window: int, blocks: int, sequences: int) -> int:
        """Blocks in the pool of a layer, of `blocks` (block 0 included) for the whole texts of `sequences`."""
        return min(blocks, 1 + sequences * self.ring(window))

    def pool_bytes(self, layers: Iterable[LayerSpec], blocks: int, sequences: int) -> int:
        """Bytes of all layers' pools, see `layer_blocks`."""
        return sum(self.layer_blocks(spec.window, blocks, sequences) * self.block_bytes(spec) for spec in layers)

    def most_blocks(self, layers: Iterable[LayerSpec], nbytes: int, sequences: int, wanted: int) -> int:
        """As many of the wanted blocks as fit into so many bytes."""
        layers = tuple(layers)
        return bisect_right(range(1, wanted + 1), nbytes, key=lambda n: self.pool_bytes(layers, n, sequences))

    @property
    def name(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.keys, self.values)]
        return f"keys {names[0]}, values {names[1]}"


def _entry_bytes(dim: int, dtype: torch.dtype) -> int:
    return dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)


class Store:
    """Keys or values of one layer.

    Attributes:
        data: `[blocks, G, block, D]`.
        scale: float32 `[blocks, G, block]` of INT8 data, else None.
    """

    def __init__(self, blocks: int, heads: int, block: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        # zeros: what is masked is still multiplied, and 0 x NaN is NaN
        self.data = torch.zeros((blocks, heads, block, dim), dtype=dtype, device=device)
        self.scale = torch.zeros((blocks, heads, block), device=device) if dtype == torch.int8 else None

    def write(self, slots_T: Tensor, x_TGD: Tensor) -> None:
        """Put tokens at their slots (block x block size + offset)."""
        size = self.data.shape[2]
        block, offset = slots_T // size, slots_T % size
        if self.scale is not None:
            x_TGD, scale = quantize_tokens(x_TGD)
            self.scale[block, :, offset] = scale.squeeze(-1)
        self.data[block, :, offset] = x_TGD.to(self.data.dtype)

    def read(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Blocks `[n]` -> `[G, n x block, D]` in `dtype`."""
        data = self.data[table].to(dtype)
        if self.scale is not None:
            data *= self.scale[table].unsqueeze(-1)
        return data.transpose(0, 1).flatten(1, 2)


class Layer(NamedTuple):
    """What a layer holds; `group` is the place of its tables among those of a sequence."""

    spec: LayerSpec
    keys: Store
    values: Store
    group: int = 0

    def write(self, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self.keys.write(slots_T, k_TGD)
        self.values.write(slots_T, v_TGD)


class KvCache:
    """The pools and who owns which block.

    Args:
        layers: of this rank.
        fmt: how a position is kept.
        blocks: for the whole text of all sequences, block 0 included.
        device: of the pools.
        sequences: most of them at once; None: as many as there are blocks, and pools of windows are as large.

    Attributes:
        rings: of each group, the blocks after which a sequence's table repeats; the first group's never does.
        tables: sequence -> a table for each group.
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec],
        fmt: KvFormat,
        blocks: int,
        device: torch.device,
        sequences: int | None = None,
    ) -> None:
        self.format, layers = fmt, tuple(layers)
        self.sequences = blocks if sequences is None else sequences
        self.capacity = (blocks - 1) * fmt.block
        windows = sorted({spec.window for spec in layers if fmt.ring(spec.window) < blocks - 1})
        self.rings = [1 << 60, *map(fmt.ring, windows)]
        sizes = [fmt.layer_blocks(window, blocks, self.sequences) for window in (0, *windows)]
        self._free = [list(range(size - 1, 0, -1)) for size in sizes]

        def layer(spec: LayerSpec) -> Layer:
            group = windows.index(spec.window) + 1 if spec.window in windows else 0
            size, block = sizes[group], fmt.block
            keys = Store(size, spec.heads, block, spec.key_dim, fmt.keys, device)
            return Layer(spec, keys, Store(size, spec.heads, block, spec.value_dim, fmt.values, device), group)

        self.layers = {spec.layer: layer(spec) for spec in layers}
        self.tables: dict[int, list[array[int]]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free[0])

    @property
    def nbytes(self) -> int:
        stores = [store for layer in self.layers.values() for store in (layer.keys, layer.values)]
        tensors = [store.data for store in stores] + [store.scale for store in stores if store.scale is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Give a sequence the blocks for its first `tokens` positions; False, and nothing changes, without enough."""
        tables = self.tables.get(sequence) or [array("i") for _ in self.rings]
        missing = self.format.blocks(tokens) - len(tables[0])
        if missing > self.free_blocks or (sequence not in self.tables and len(self.tables) == self.sequences):
            return False
        self.tables[sequence] = tables
        for table, ring, free in zip(tables, self.rings, self._free, strict=True):
            for _ in range(missing):
                table.append(free.pop() if len(table) < ring else table[-ring])
        return True

    def release(self, sequence: int) -> None:
        """Take back all blocks of a sequence."""
        tables = self.tables.pop(sequence, ())
        for table, ring, free in zip(tables, self.rings, self._free, strict=False):
            free += reversed(table[:ring])

    def slots(self, sequence: int, start: int, stop: int) -> list[list[int]]:
        """Where positions `start` to `stop` of a sequence lie, in each group.

        Raises:
            UsageError: more tokens than a window's ring has room for.
        """
        block = self.format.block
        if len(self.rings) > 1 and stop - start > self.format.chunk:
            raise UsageError(
                f"{stop - start} tokens of a sequence at once; the KV cache was made for {self.format.chunk}",
                "give a smaller --chunk",
            )
        places = range(start, stop)
        return [[table[at // block] * block + at % block for at in places] for table in self.tables[sequence]]
