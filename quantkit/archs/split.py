"""How one role's rows and columns are divided among the ranks of a mesh.

Fused tensors are split part by part and then joined, never as a whole. The rules are columns of the role table
(`split`, `unit`); this file only does the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from quantkit.archs.base import Architecture, Dims
from quantkit.archs.roles import ROLES, Key, Role, Split

VOCAB_MULTIPLE = 64
"""Padded vocabularies are a multiple of this, so that the GEMM of the output head has no ragged edge."""

_REPLICATED = frozenset({"kv_heads", "index_heads"})
"""Units of which a rank holds one when there are more ranks than units: several ranks hold the same."""

_HEAD_UNITS = frozenset({"heads", "output_groups"}) | _REPLICATED


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
    if not units:  # an empty bias, of whose weight alone `misfit` is asked
        return Range(0, length)
    width = length // units
    if role.unit in _REPLICATED and size > units:
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
    if role.unit in _REPLICATED and size > units:
        return size % units == 0
    return units % size == 0 and (not group or (length // size) % group == 0)


def local_dims(arch: Architecture, dims: Dims, tp: int, moe_tp: int, experts: int) -> Dims:
    """Sizes of the part of a model that one rank holds; the vocabulary stays the true one.

    Args:
        experts: how many routed experts it holds.
    """
    sizes = {"experts": experts}
    for name in ROLES:
        role = arch.role(name)
        if role.split is not Split.REP and role.unit and role.unit != "vocab":
            sizes[role.unit] = max(dims.count(role.unit) // (moe_tp if role.per_expert else tp), 1)
    present: dict[str, Any] = {unit: size for unit, size in sizes.items() if dims.count(unit)}
    return replace(dims, **present)


def local_shape(arch: Architecture, whole: Dims, local: Dims, key: Key, shape: tuple[int, ...], tp: int) -> list[int]:
    """Shape of a rank's part of a tensor in canonical orientation: `[N, K]`, `[N]`, or stacked with a leading E."""
    role, found = arch.role(key.role), list(shape)
    stacked = int(role.per_expert and key.expert is None)
    if stacked:
        found[0] = local.experts
    if role.split is Split.REP or (role.split is Split.ROW and key.part == "bias"):
        return found
    axis = stacked + (role.split is Split.ROW)
    if role.unit == "vocab":
        found[axis] = padded_vocab(found[axis], tp) // tp
        return found
    parts = role.parts or (role.name,)
    of_whole, of_local = (
        sum(dims.count(arch.role(part).unit) * dims.rows_per_unit(part) for part in parts) for dims in (whole, local)
    )
    found[axis] = found[axis] * of_local // of_whole
    return found
