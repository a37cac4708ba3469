"""Keys and values in blocks: a pool for all sequences, and for each sequence a table of the blocks that are its own.

Every block holds `block` positions of every layer, so sequences of any length share the pool without copying and only
the end of a sequence's last block is ever unused. INT8 entries have one float32 scale per token and head. Block 0
belongs to nobody: padding writes there.

Shape suffixes: T tokens, G key/value heads, D head dimension, B sequences, L positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.arithmetic import quantize_tokens
from quantkit.errors import UsageError

BLOCK = 16
DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "float32": torch.float32}


class LayerSpec(NamedTuple):
    """What the attention of a layer hands over; `window` 0 means all positions are seen."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    window: int


@dataclass(frozen=True)
class KvFormat:
    """How a position is kept.

    Attributes:
        keys, values: dtype.
        block: positions in a block.
    """

    keys: torch.dtype
    values: torch.dtype
    block: int = BLOCK

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

    def block_bytes(self, layers: Iterable[LayerSpec]) -> int:
        """Bytes of one block over all layers, scales included."""
        entries = [pair for spec in layers for pair in self._entries(spec)]
        return self.block * sum(_entry_bytes(dim, dtype) * heads for heads, dim, dtype in entries)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many positions."""
        return -(-tokens // self.block)

    def pool_bytes(self, layers: Iterable[LayerSpec], lengths: Iterable[int]) -> int:
        """Bytes of a pool for sequences of these lengths, block 0 included."""
        return (1 + sum(map(self.blocks, lengths))) * self.block_bytes(layers)

    def _entries(self, spec: LayerSpec) -> tuple[tuple[int, int, torch.dtype], ...]:
        return (spec.heads, spec.key_dim, self.keys), (spec.heads, spec.value_dim, self.values)

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
    """What a layer holds."""

    spec: LayerSpec
    keys: Store
    values: Store

    def write(self, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self.keys.write(slots_T, k_TGD)
        self.values.write(slots_T, v_TGD)


class KvCache:
    """The pool and who owns which block.

    Args:
        layers: of this rank.
        fmt: how a position is kept.
        blocks: of the pool, block 0 included.
        device: of the pool.
    """

    def __init__(self, layers: Iterable[LayerSpec], fmt: KvFormat, blocks: int, device: torch.device) -> None:
        self.format = fmt
        self.layers = {
            spec.layer: Layer(
                spec,
                Store(blocks, spec.heads, fmt.block, spec.key_dim, fmt.keys, device),
                Store(blocks, spec.heads, fmt.block, spec.value_dim, fmt.values, device),
            )
            for spec in layers
        }
        self.capacity = (blocks - 1) * fmt.block
        self.tables: dict[int, array[int]] = {}
        self._free = list(range(blocks - 1, 0, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        stores = [store for layer in self.layers.values() for store in (layer.keys, layer.values)]
        tensors = [store.data for store in stores] + [store.scale for store in stores if store.scale is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Give a sequence the blocks for its first `tokens` positions; False, and nothing changes, without enough."""
        held = len(self.tables.get(sequence, ()))
        missing = self.format.blocks(tokens) - held
        if missing > len(self._free):
            return False
        self.tables.setdefault(sequence, array("i")).extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, sequence: int) -> None:
        """Take back all blocks of a sequence."""
        self._free += reversed(self.tables.pop(sequence, array("i")))

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Where positions `start` to `stop` of a sequence lie."""
        table, block = self.tables[sequence], self.format.block
        return [table[at // block] * block + at % block for at in range(start, stop)]
