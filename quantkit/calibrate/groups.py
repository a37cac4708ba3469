"""Groups of GEMMs that must share a scheme, because engines or shards run them as one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantkit.archs import Architecture, Key
from quantkit.archs.roles import FUSED_BY_ENGINES
from quantkit.calibrate.weights import gemm_keys
from quantkit.checkpoint.reader import Source
from quantkit.recipe import AutoGroup, Recipe, keep_rule

EXPERTS = "experts"
"""Name of the group of all routed experts of a layer, in the checkpoint form."""


@dataclass(frozen=True)
class Group:
    """GEMMs of one layer.

    Attributes:
        name: `layers.3.attn.qkv`.
        layer: index.
        roles: of its GEMMs.
        weights: their number, over all experts.
        scheme: what the recipe gives them.
        pinned: a rule of the recipe is about one of them, so nothing is decided.
        never: the tables of the recipe ("auto_group", "auto_keep") that leave it as it is.
    """

    name: str
    layer: int
    roles: tuple[str, ...]
    weights: int
    scheme: str
    pinned: bool = False
    never: frozenset[str] = frozenset()


def groups_of(source: Source, recipe: Recipe) -> list[Group]:
    """Groups with quantized GEMMs in the finest form, that of shards: routed experts by part."""
    found: dict[tuple[int, str], list[tuple[Key, str]]] = defaultdict(list)
    for key, entry in source.entries.items():
        if key.layer is None or key.layer >= source.dims.layers or not gemm_keys(source.arch, source.dims, key):
            continue
        if recipe.scheme_for(source.arch, key, entry.name).is_int8:
            found[key.layer, _fused(source.arch, key.role)].append((key, entry.name))
    return [_group(source, recipe, layer, name, found[layer, name]) for layer, name in sorted(found)]


def _fused(arch: Architecture, role: str) -> str:
    """What a role is a part of when it runs."""
    engine = {each: group[0] for group in FUSED_BY_ENGINES for each in group}
    return arch.role(role).fuse or engine.get(role, role)


def _group(source: Source, recipe: Recipe, layer: int, name: str, stored: list[tuple[Key, str]]) -> Group:
    roles = {part for key, _ in stored for part in source.arch.role(key.role).parts or (key.role,)}
    tables: Mapping[str, AutoGroup | None] = {"auto_group": recipe.auto_group, "auto_keep": recipe.auto_keep}
    never = {
        label
        for label, table in tables.items()
        if table is not None and any(keep_rule(pattern).matches(*each) for pattern in table.never for each in stored)
    }
    return Group(
        f"layers.{layer}.{name}",
        layer,
        tuple(sorted(roles)),
        sum(math.prod(source.entries[key].shape) for key, _ in stored),
        recipe.scheme_for(source.arch, *stored[0]).name,
        any(recipe.rule_for(*each) is not None for each in stored),
        frozenset(never),
    )


def joined_experts(arch: Architecture, groups: Iterable[Group]) -> list[tuple[Group, tuple[str, ...]]]:
    """Groups of the checkpoint form, where the routed experts of a layer are one, with the names of their members."""
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        routed = any(arch.role(role).per_expert for role in group.roles)
        found[f"layers.{group.layer}.{EXPERTS}" if routed else group.name].append(group)
    return [(_joined(name, members), tuple(each.name for each in members)) for name, members in found.items()]


def _joined(name: str, members: list[Group]) -> Group:
    return Group(
        name,
        members[0].layer,
        tuple(role for each in members for role in each.roles),
        sum(each.weights for each in members),
        members[0].scheme,
        any(each.pinned for each in members),
        frozenset().union(*(each.never for each in members)),
    )
