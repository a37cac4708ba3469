"""How one role's rows and columns are divided among the ranks of a mesh.

Fused tensors are split part by part and then joined, never as a whole. The rules are columns of the role table
(`split`, `unit`); this file only does the arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quantkit.archs import Dims, Role, Split

VOCAB_MULTIPLE = 64
"""Padded vocabularies are a multiple of this, so that the GEMM of the output head has no ragged edge."""

_HEAD_UNITS = frozenset({"heads", "kv_heads"})


class Range(NamedTuple):
    """[start, stop) of the own rows or columns, then `padding` zeros."""

    start: int
    stop: int
    padding: int = 0


def unit_count(dims: Dims, role: Role, length: int) -> int:
    """Indivisible units along the split dimension of `length`: heads, or single rows of a width."""
    return dims.count(role.unit) if role.unit in _HEAD_UNITS else length


def padded_vocab(vocab: int, size: int) -> int:
    """Rows of all ranks together; a single rank needs no padding."""
    multiple = math.lcm(VOCAB_MULTIPLE, size)
    return vocab if size == 1 else -(-vocab // multiple) * multiple


def split_range(dims: Dims, role: Role, length: int, size: int, rank: int) -> Range:
    """Part of `length` rows (COL) or columns (ROW) that `rank` of `size` holds; `misfit` must have passed."""
    if role.split is Split.REP or size == 1:
        return Range(0, length)
    if role.unit == "vocab":
        per_rank = padded_vocab(length, size) // size
        start, stop = min(rank * per_rank, length), min((rank + 1) * per_rank, length)
        return Range(start, stop, per_rank - (stop - start))
    units = unit_count(dims, role, length)
    width = length // units
    if role.unit == "kv_heads" and size > units:
        first, count = rank // (size // units), 1
    else:
        count = units // size
        first = rank * count
    return Range(first * width, (first + count) * width)


def misfit(dims: Dims, role: Role, length: int, size: int, what: str, group: int = 0) -> str:
    """Why `length` cannot be divided over `size` ranks, "" when it can.

    Args:
        what: name of the mesh direction, for the message.
        group: activation group that no boundary may cut (ROW), 0 for none.
    """
    if role.split is Split.REP or role.unit == "vocab" or _fits(dims, role, length, size, group):
        return ""
    units = unit_count(dims, role, length)
    if not units or length % units:
        return f"{role.name} has {length} rows or columns, not a multiple of {units} {role.unit}"
    most = max(units, size, dims.heads if role.unit in _HEAD_UNITS else 1)
    legal = [n for n in range(1, most + 1) if _fits(dims, role, length, n, group)]
    groups = f" in groups of {group}" if group else ""
    return (
        f"{what}={size} does not divide {role.name} with {units} {role.unit}{groups}; "
        f"legal {what}: {', '.join(map(str, legal))}"
    )


def _fits(dims: Dims, role: Role, length: int, size: int, group: int) -> bool:
    units = unit_count(dims, role, length)
    if not units or length % units:
        return False
    if role.unit == "kv_heads" and size > units:
        return size % units == 0
    return units % size == 0 and (not group or (length // size) % group == 0)
