"""Build any tensor of a model from whatever form its source stores.

Sources store experts one by one or stacked, q/k/v and gate/up apart or fused; transformers' modules want one form,
rank shards another. `assemble` resolves a key to reads of what is there: as it is, fused from its parts, stacked
over experts, or cut out of a fused or stacked tensor. Canonical orientation is `[N, K]` (`[E, N, K]` stacked), gate
rows before up rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.archs.base import Architecture, Dims
from quantkit.archs.roles import Key
from quantkit.errors import InputError

Has = Callable[[Key], bool]
Fetch = Callable[[Key], Tensor]


def assemble(arch: Architecture, dims: Dims, key: Key, has: Has, fetch: Fetch) -> Tensor:
    """Tensor of `key` in canonical orientation.

    Args:
        has: whether the source stores exactly this key.
        fetch: reads a stored key, in canonical orientation.

    Raises:
        InputError: the source stores neither the key nor anything it can be built from.
    """
    found = _assemble(arch, dims, key, has, fetch)
    if found is None:
        raise InputError(f"the checkpoint has no tensor for {key.shard_name}", "check that the copy is complete")
    return found


def _assemble(arch: Architecture, dims: Dims, key: Key, has: Has, fetch: Fetch) -> Tensor | None:
    if has(key):
        return fetch(key)
    role = arch.role(key.role)
    if role.per_expert and key.expert is None:
        stacked = [_assemble_parts(arch, dims, key._replace(expert=e), has, fetch) for e in range(dims.experts)]
        complete = [tensor for tensor in stacked if tensor is not None]
        if complete and len(complete) < len(stacked):
            lost = [str(e) for e, tensor in enumerate(stacked) if tensor is None]
            raise InputError(f"{key.shard_name}: the checkpoint lacks experts {', '.join(lost)}")
        return torch.stack(complete) if complete else None
    return _assemble_parts(arch, dims, key, has, fetch)


def _assemble_parts(arch: Architecture, dims: Dims, key: Key, has: Has, fetch: Fetch) -> Tensor | None:
    """One expert's (or a dense layer's) tensor: stored, fused from parts, or cut out."""
    if has(key):
        return fetch(key)
    role = arch.role(key.role)
    if role.per_expert and key.expert is not None and has(key._replace(expert=None)):
        return fetch(key._replace(expert=None))[key.expert]
    if role.parts:
        parts = [_assemble_parts(arch, dims, key._replace(role=part), has, fetch) for part in role.parts]
        present = [part for part in parts if part is not None]
        return torch.cat(present) if len(present) == len(parts) else None
    if role.fuse:
        fused_key = key._replace(role=role.fuse)
        if has(fused_key) or (role.per_expert and has(fused_key._replace(expert=None))):
            fused = _assemble_parts(arch, dims, fused_key, has, fetch)
            assert fused is not None
            start, stop = rows_in_fused(arch, dims, key.role, fused.shape[0])
            return fused[start:stop]
    return None


def rows_in_fused(arch: Architecture, dims: Dims, role_name: str, total: int) -> tuple[int, int]:
    """Rows [start, stop) of a part inside its fused tensor of `total` rows."""
    members = arch.role(arch.role(role_name).fuse).parts
    sizes = [dims.count(arch.role(part).unit) * dims.rows_per_unit(part) for part in members]
    if sum(sizes) != total:
        raise InputError(
            f"{arch.role(role_name).fuse} has {total} rows, the config's parts add up to {sum(sizes)}",
            "the config does not describe these weights",
        )
    position = members.index(role_name)
    return sum(sizes[:position]), sum(sizes[: position + 1])


class Location(NamedTuple):
    """Rows of a stored tensor.

    Attributes:
        key: a key that the source stores.
        slot: expert along dimension 0 of a stacked tensor, None when it is not stacked.
        start, stop: rows of the matrix in canonical orientation (elements of a bias).
    """

    key: Key
    slot: int | None
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def locate(
    arch: Architecture, dims: Dims, key: Key, has: Has, rows_of: Callable[[Key], int]
) -> tuple[Location, ...] | None:
    """Where the rows of a tensor lie: what `assemble` would read, without reading.

    Args:
        key: of one matrix or vector; for a per-expert role with its expert.
        rows_of: number of canonical rows of a stored key (of one expert's matrix when it is stacked).

    Returns:
        Ranges in row order, None when the source stores nothing that the tensor can be built from.
    """
    if has(key):
        return (Location(key, None, 0, rows_of(key)),)
    role = arch.role(key.role)
    stacked = key._replace(expert=None)
    if role.per_expert and key.expert is not None and has(stacked):
        return (Location(stacked, key.expert, 0, rows_of(stacked)),)
    if role.parts:
        parts = [locate(arch, dims, key._replace(role=part), has, rows_of) for part in role.parts]
        present = [part for part in parts if part is not None]
        return tuple(item for part in present for item in part) if len(present) == len(parts) else None
    if role.fuse:
        fused_key = key._replace(role=role.fuse)
        if has(fused_key) or (role.per_expert and has(fused_key._replace(expert=None))):
            (whole,) = locate(arch, dims, fused_key, has, rows_of) or ()
            start, stop = rows_in_fused(arch, dims, key.role, whole.rows)
            return (whole._replace(start=start, stop=stop),)
    return None


def cut(locations: tuple[Location, ...], start: int, stop: int) -> tuple[Location, ...]:
    """Rows [start, stop) of the concatenation of `locations`."""
    found, position = [], 0
    for item in locations:
        low, high = max(start - position, 0), min(stop - position, item.rows)
        if low < high:
            found.append(item._replace(start=item.start + low, stop=item.start + high))
        position += item.rows
    return tuple(found)
