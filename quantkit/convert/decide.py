"""Which source tensors are quantized, kept or dropped, and everything that forbids it. Reads headers only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quantkit.archs import Key, Kind, Stage
from quantkit.archs.extra import rule_for
from quantkit.archs.roles import FUSED_BY_ENGINES
from quantkit.arithmetic import MAX_INT32_K
from quantkit.checkpoint.reader import Entry, Source
from quantkit.crosscheck import contradictions
from quantkit.errors import InputError, QuantkitError, UsageError
from quantkit.recipe import Recipe, unused_rule
from quantkit.spec.manifest import Dropped
from quantkit.spec.scheme import SCHEMES, Scheme

KEEP = SCHEMES["keep"]

_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass
class Problems:
    """What forbids a conversion, collected so that all of it is reported at once.

    Attributes:
        use: wrong options or recipe.
        source: wrong in the source.
        raised: the error that lists them, once it was raised.
    """

    use: list[str] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    raised: QuantkitError | None = None

    def raise_if_any(self) -> None:
        """Raise one error that lists everything."""
        everything = list(dict.fromkeys(self.use + self.source))
        if not everything:
            return
        kind: type[QuantkitError] = UsageError if self.use else InputError
        self.raised = kind(
            f"this conversion cannot be done; {len(everything)} problem{'s' * (len(everything) > 1)}:",
            "change what is listed and run again; nothing was written",
            items=everything,
        )
        raise self.raised


@dataclass(frozen=True)
class Decisions:
    """Outcome for every entry of the source.

    Attributes:
        schemes: key of a stored weight -> scheme; only those that are written.
        written: keys that are written, in canonical order.
        dropped: tensors that are not written.
    """

    schemes: dict[Key, Scheme]
    written: tuple[Key, ...]
    dropped: tuple[Dropped, ...]

    def is_int8(self, key: Key) -> bool:
        return self.schemes.get(key.with_part("weight"), KEEP).is_int8


def is_extra(source: Source, key: Key) -> bool:
    """Whether a tensor stays whole and belongs to no rank: draft layers, vision towers, buffers of the model."""
    role = source.arch.role(key.role)
    return source.dims.is_draft(key) or (role.kind is Kind.OPAQUE and key.layer is None)


def canonical_order(source: Source, keys: Iterable[Key]) -> tuple[Key, ...]:
    """Keys by stage, layer, expert and role: the same whatever files the tensors lie in."""
    from quantkit.archs.roles import ROLES

    position = {name: index for index, name in enumerate(ROLES)}

    def rank(key: Key) -> tuple[object, ...]:
        if key.layer is None:
            where = 2 if source.arch.role(key.role).stage is Stage.LAST else 0
        else:
            where = 1
        expert = -1 if key.expert is None else key.expert
        return (where, key.layer or 0, expert, position.get(key.role, len(position)), key.role, key.label, key.part)

    return tuple(sorted(keys, key=rank))


def decide(source: Source, recipe: Recipe, form: str, problems: Problems) -> Decisions:
    """Apply the recipe to every entry."""
    schemes: dict[Key, Scheme] = {}
    written: list[Key] = []
    dropped: list[Dropped] = []
    for key, entry in source.entries.items():
        if recipe.mtp == "drop" and source.dims.is_draft(key):
            rule = "recipe: mtp is drop"
            dropped.append(Dropped(name=entry.name, rule=rule, parameters=math.prod(entry.shape)))
            others = [info.name for info in entry.stored.values() if info.name != entry.name]
            dropped += [Dropped(name=name, rule=rule) for name in others]
            continue
        written.append(key)
        if key.part == "weight":
            schemes[key] = _scheme(source, recipe, key, entry, problems)
    dropped.sort(key=lambda row: row.name)
    found = Decisions(schemes, canonical_order(source, written), tuple(dropped))
    _check_recipe(source, recipe, form, found, problems)
    _check_groups(source, form, found, problems)
    _check_source(source, problems)
    return found


def _scheme(source: Source, recipe: Recipe, key: Key, entry: Entry, problems: Problems) -> Scheme:
    """Scheme of one weight; draft layers and opaque tensors are kept, whatever the recipe's scheme is."""
    role = source.arch.role(key.role)
    if is_extra(source, key) or role.kind is Kind.OPAQUE:
        return KEEP
    scheme = recipe.scheme_for(source.arch, key, entry.name)
    if not scheme.is_int8:
        return KEEP
    if role.kind is not Kind.LINEAR:
        problems.use.append(f"{entry.name}: a rule asks for {scheme.name}, but a {role.kind} ({key.role}) is kept")
        return KEEP
    shape = source.canonical_shape(key)
    dimensions = 3 if source.is_stacked(key) else 2
    if len(shape) != dimensions:
        return scheme  # `contradictions` tells of it
    if shape[-1] > MAX_INT32_K:
        problems.use.append(
            f"{entry.name}: K = {shape[-1]} overflows int32 sums; legal K: up to {MAX_INT32_K}; keep it"
        )
    elif 0 in shape:
        problems.source.append(f"{entry.name}: empty shape {list(shape)}")
    elif entry.dtype not in _FLOATS:
        problems.source.append(f"{entry.name}: {entry.dtype} values are not weights of a GEMM")
    return scheme


def _check_recipe(source: Source, recipe: Recipe, form: str, found: Decisions, problems: Problems) -> None:
    names = {entry.name: key for key, entry in source.entries.items()}
    problems.use += [unused_rule(pattern) for pattern in recipe.unused_rules(names)]
    if form != "checkpoint":
        return
    for name in sorted({scheme.name for scheme in found.schemes.values() if not scheme.checkpoint_form}):
        roles = sorted({key.role for key, scheme in found.schemes.items() if scheme.name == name})
        problems.use.append(
            f"no engine loads scheme {name} ({', '.join(roles)}) from a checkpoint; "
            "use --format sharded or a recipe with w8a8"
        )


def _check_groups(source: Source, form: str, found: Decisions, problems: Problems) -> None:
    """Members of one fused GEMM must share a scheme; so must all experts of a layer where engines run them as one."""
    groups: dict[tuple[object, ...], dict[str, str]] = defaultdict(dict)
    engine_group = {role: group for group in FUSED_BY_ENGINES for role in group}
    for key, scheme in found.schemes.items():
        role = source.arch.role(key.role)
        label = f"{key.role}{'' if key.expert is None else f' of expert {key.expert}'}"
        if role.per_expert and form == "checkpoint":
            groups[key.layer, "experts"][label] = scheme.name
        elif role.per_expert:
            groups[key.layer, role.fuse or key.role][label] = scheme.name
        elif role.fuse:
            groups[key.layer, role.fuse][label] = scheme.name
        elif key.role in engine_group and form == "checkpoint":
            groups[key.layer, engine_group[key.role]][label] = scheme.name
    layers: dict[str, list[object]] = defaultdict(list)  # what differs -> where
    for (layer, _), members in groups.items():
        names = set(members.values())
        refused = form == "checkpoint" and not all(SCHEMES[name].checkpoint_form for name in names)
        if len(names) > 1 and not refused:  # what the form cannot hold was said once already
            layers[_by_scheme(members)].append(layer)
    for shown, where in layers.items():
        place = f"layer{'s' * (len(where) > 1)} {', '.join(map(str, where[:8]))}{', ...' * (len(where) > 8)}"
        problems.use.append(f"{place}: parts of one fused GEMM have different schemes ({shown})")


def _by_scheme(members: dict[str, str]) -> str:
    """As `w8a8: attn.q, attn.k; keep: attn.v`, of each scheme the first few."""
    labels: dict[str, list[str]] = defaultdict(list)
    for label, name in members.items():
        labels[name].append(label)
    return "; ".join(f"{name}: {', '.join(own[:4])}{', ...' * (len(own) > 4)}" for name, own in labels.items())


def _check_source(source: Source, problems: Problems) -> None:
    problems.source += [
        f'{name}: no role (record {source.arch.name}); add `roles: {{"{rule_for(name)}": ROLE}}` to the recipe'
        for name in source.unclassified
    ]
    problems.source += [
        f"{problem.what}{' (' + ', '.join(problem.items) + ')' if problem.items else ''}: {problem.remedy}"
        for problem in contradictions(source)
    ]
    if not source.has(Key(None, "embed")):
        problems.source.append("the checkpoint has no embedding table")
    if source.tied and source.config.get("tie_word_embeddings") is False:
        problems.source.append("the checkpoint has no lm_head, but config.json says tie_word_embeddings: false")
