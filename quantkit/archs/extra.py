"""Roles that a recipe adds for tensors that no record knows, and the snippet that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from quantkit.archs.base import Architecture, split_name
from quantkit.archs.roles import ROLES, Kind, Role
from quantkit.archs.rules import JOINED_PARTS, PARTS
from quantkit.errors import UsageError, one_line, printable

LAYER_PREFIX = "layers.*."
"""A pattern of `roles:` that begins with it holds below every layer, any other one outside the layers."""


def with_roles(arch: Architecture, extra: Mapping[str, str]) -> Architecture:
    """The record with a recipe's `roles:` added.

    Args:
        extra: pattern -> role. `layers.*.mlp.wi` classifies that module of every layer, `*` after `experts.` stands
            for the expert, `audio_tower.**` for a whole subtree; `final_norm` (no layer) holds outside the layers.

    Raises:
        UsageError: roles that do not exist; all of them are listed.
    """
    known = {**ROLES, **arch.roles}
    unknown = [f"{pattern}: {role}" for pattern, role in extra.items() if role not in known]
    if unknown:
        raise UsageError(
            "the recipe's `roles:` name unknown roles", "use roles of the table", items=unknown, choices=sorted(known)
        )
    if split := [f"{pattern}: {role}" for pattern, role in extra.items() if not _fits(pattern, known[role])]:
        raise UsageError(
            "the recipe's `roles:` give a whole subtree a role of one tensor",
            "a pattern that ends in `.**` takes an opaque role, which keeps everything below it",
            items=split,
            choices=sorted(name for name, role in known.items() if role.kind is Kind.OPAQUE),
        )
    inside = {key.removeprefix(LAYER_PREFIX): role for key, role in extra.items() if key.startswith(LAYER_PREFIX)}
    outside = {key: role for key, role in extra.items() if not key.startswith(LAYER_PREFIX)}
    return replace(arch, layer_rules={**arch.layer_rules, **inside}, model_rules={**arch.model_rules, **outside})


def _fits(pattern: str, role: Role) -> bool:
    return not pattern.endswith(".**") or role.kind is Kind.OPAQUE


def unused_patterns(extra: Iterable[str], names: Iterable[str]) -> list[str]:
    """Patterns of a recipe's `roles:` that fit none of a checkpoint's tensor names."""
    left = list(extra)
    for name in names:
        if not left:
            break
        layer, _, rest = split_name(name)
        place = LAYER_PREFIX if layer is not None else ""
        spellings = {place + rest, place + _without_part(rest)}
        left = [
            pattern
            for pattern in left
            if pattern not in spellings
            and not (pattern.endswith(".**") and f"{place}{rest}".startswith(pattern.removesuffix("**")))
        ]
    return left


def roles_snippet(names: Iterable[str]) -> str:
    """YAML for a recipe that classifies `names`, one line for each pattern with the first name that it stands for.

    Every ROLE is to be replaced; the text is valid YAML as it stands.
    """
    examples: dict[str, list[str]] = {}
    for name in names:
        examples.setdefault(rule_for(name), []).append(name)
    lines = ["roles:"]
    for pattern, found in examples.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        key = json.dumps(pattern, ensure_ascii=False)  # of any name a YAML string
        lines.append(f"  {printable(key)}: ROLE  # {one_line(found[0])}{more}")
    return "\n".join(lines)


def rule_for(name: str) -> str:
    """The pattern of `roles:` that classifies a tensor's name.

    Of an unknown tower with numbered blocks of its own it is the whole subtree: `audio_tower.**`.
    """
    layer, _, rest = split_name(name)
    if layer is None and re.search(r"\.\d+\.", rest):
        return rest.split(".", 1)[0] + ".**"
    return (LAYER_PREFIX if layer is not None else "") + _without_part(rest)


def _without_part(rest: str) -> str:
    stem, _, last = rest.rpartition(".")
    if stem and last in PARTS:
        return stem
    joined = next((part for part in JOINED_PARTS if rest.endswith(f"_{part}")), "")
    return rest.removesuffix(f"_{joined}") if joined else rest
