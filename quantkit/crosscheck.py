"""Hold a config.json against the tensors that lie beside it.

Tensors are the truth: the model that will run is theirs, so each finding says what they tell and which key to correct.
Expected sizes come from the split units of the role table, so a new role is checked without a line here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from quantkit.archs import ROLES, Architecture, Dims, Key, Kind, Role, Split, text_config
from quantkit.memory import Weight, canonical_shape
from quantkit.spec.tensorfile import TensorInfo

if TYPE_CHECKING:
    from quantkit.checkpoint.reader import Source

_MAX_NAMED = 8


class Problem(BaseModel):
    """One finding.

    Attributes:
        level: "error" when the checkpoint cannot be converted or would run wrong, "note" for what a person should know.
        what: what disagrees, with both values.
        remedy: the next step.
        items: offenders, where there are several.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["error", "note"]
    what: str
    remedy: str
    items: tuple[str, ...] = ()


def cross_check(
    arch: Architecture, dims: Dims, config: Mapping[str, Any], weights: Mapping[Key, Weight]
) -> list[Problem]:
    """All disagreements between config and tensors, errors first."""
    found = [
        *_numbers(dims),
        *_layers(dims, weights),
        *_head(dims, weights),
        *_dimensions(arch, dims, weights),
        *_shapes(arch, dims, weights),
        *_experts(arch, dims, weights),
        *_scales(arch, weights),
        *_stale_quantization(config, weights),
    ]
    return sorted(found, key=lambda problem: problem.level != "error")


def contradictions(source: Source) -> list[Problem]:
    """Errors of `cross_check` that make a model of wrong sizes: `convert`, `calibrate` and `baseline` refuse them."""
    arch = replace(source.arch, experts_transposed=False)  # entries know their canonical shape
    weights = {
        key: Weight(key, {"weight": TensorInfo(entry.name, entry.dtype, entry.canonical_shape, 0, 0)})
        for key, entry in source.entries.items()
    }
    found = [
        *_numbers(source.dims),
        *_layers(source.dims, weights),
        *_dimensions(arch, source.dims, weights),
        *_shapes(arch, source.dims, weights),
        *_biases(arch, weights),
        *_experts(arch, source.dims, weights),
    ]
    return [problem for problem in found if problem.level == "error"]


def _error(what: str, remedy: str, items: Iterable[str] = ()) -> Problem:
    return Problem(level="error", what=what, remedy=remedy, items=tuple(items))


def _numbers(dims: Dims) -> Iterator[Problem]:
    """Sizes of the config that contradict one another."""
    for what, remedy in dims.contradictions():
        yield _error(what, remedy)


def _layers(dims: Dims, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """Layers that the config counts and the tensors lack, and the other way round."""
    present = {key.layer for key in weights if key.layer is not None}
    missing = sorted(set(range(dims.layers)) - present)
    if missing:
        yield _error(
            f"config.json counts {dims.layers} layers, {len(missing)} of them have no tensors: {_ranges(missing)}",
            "complete the checkpoint, or correct num_hidden_layers",
        )
    beyond = sorted(layer for layer in present if layer >= dims.layers)
    draft = {key.layer for key in weights if key.role == "mtp"}
    if foreign := [layer for layer in beyond if layer not in draft]:
        yield _error(
            f"layers {_ranges(foreign)} lie beyond the {dims.layers} of config.json and hold no draft model",
            f"correct num_hidden_layers to {max(foreign) + 1} if they belong to the model",
        )
    if mtp := [layer for layer in beyond if layer in draft]:
        yield Problem(
            level="note",
            what=f"layers {_ranges(mtp)} hold a draft (multi-token prediction) model",
            remedy="kept as they are; `mtp: drop` in the recipe leaves them out",
        )


def _head(dims: Dims, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """Embedding and output head: one of each, or one that both share."""
    if Key(None, "embed") not in weights:
        yield _error("there is no embedding table", "complete the checkpoint")
    has_head = Key(None, "lm_head") in weights
    if not has_head and not dims.tied:
        yield _error(
            "there is no lm_head, and config.json does not tie it to the embedding",
            "complete the checkpoint, or set tie_word_embeddings to true",
        )
    if has_head and dims.tied:
        yield Problem(
            level="note",
            what="config.json ties lm_head to the embedding, but the checkpoint holds both",
            remedy="set tie_word_embeddings to false if the two differ",
        )


_FIXED_ROWS: Mapping[str, Callable[[Dims], int]] = {
    "mla.q_a": lambda dims: dims.q_lora_rank,
    "mla.kv_a": lambda dims: dims.kv_lora_rank + dims.qk_rope_head_dim if dims.is_mla else dims.head_dim,
    "mla.q_a_norm": lambda dims: dims.q_lora_rank,
    "mla.kv_a_norm": lambda dims: dims.kv_lora_rank or dims.head_dim,
    "router": lambda dims: dims.experts,
    "router.correction": lambda dims: dims.experts,
}
"""Rows of the roles that tensor parallelism does not split; 0 means that the config does not tell."""

_HIDDEN_INPUTS = ("attn.in", "mlp.in")

_KEYS_OF_UNIT: Mapping[str, str] = {
    "heads": "num_attention_heads or the head size",
    "kv_heads": "num_key_value_heads or the head size",
    "vocab": "vocab_size",
    "output_groups": "o_groups or o_lora_rank",
    "intermediate": "intermediate_size",
    "moe_intermediate": "the experts' intermediate size",
    "shared_intermediate": "the width or number of the shared experts",
}


_MATRICES = frozenset({Kind.LINEAR, Kind.ROUTER, Kind.EMBEDDING})


def _dimensions(arch: Architecture, dims: Dims, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """A matrix has two sizes, three where experts are stacked: whatever reads its rows and columns relies on it."""
    wrong = []
    for key, weight in weights.items():
        role = arch.role(key.role)
        draft = key.layer is not None and key.layer >= dims.layers
        if key.part != "weight" or weight.payload is None or draft or role.kind not in _MATRICES:
            continue
        sizes = 3 if role.per_expert and key.expert is None else 2
        if len(weight.shape) != sizes:
            wrong.append(f"{weight.payload.name}: {list(weight.shape)} is no matrix of {sizes} sizes")
    if wrong:
        yield _error(f"{len(wrong)} weights are no matrices", "complete the checkpoint", wrong[:_MAX_NAMED])


def _shapes(arch: Architecture, dims: Dims, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """Every two-dimensional size that the config predicts, one finding per role, side and wrong size."""
    wrong: dict[tuple[str, str, int, int, str], list[str]] = defaultdict(list)
    for key, weight in weights.items():
        if key.part != "weight" or weight.payload is None or (key.layer is not None and key.layer >= dims.layers):
            continue
        role = arch.role(key.role)
        shape = canonical_shape(arch, weight)
        for side, expected, source in _expected(arch, dims, role):
            index = 0 if side == "rows" else 1
            if expected and len(shape) > index and shape[index] != expected:
                wrong[key.role, side, shape[index], expected, source].append(weight.payload.name)
    order = list(ROLES)
    for (role_name, side, actual, expected, source), names in sorted(
        wrong.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])
    ):
        yield _error(
            f"{role_name}: {len(names)} tensors have {actual} {side}, config.json says {expected}",
            f"the tensors decide: correct {source} in config.json",
            names[:_MAX_NAMED],
        )


def _biases(arch: Architecture, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """A bias has one value for each row of its weight, expert by expert; shapes are canonical."""
    wrong = []
    for key, bias in weights.items():
        weight = weights.get(key.with_part("weight"))
        if key.part != "bias" or weight is None or arch.role(key.role).kind is not Kind.LINEAR:
            continue
        rows = weight.shape[:-1]
        if bias.shape != rows and bias.payload is not None:
            wrong.append(f"{bias.payload.name}: {list(bias.shape)}, its weight has rows {list(rows)}")
    if wrong:
        yield _error(f"{len(wrong)} biases are not of their weights", "complete the checkpoint", wrong[:_MAX_NAMED])


def _expected(arch: Architecture, dims: Dims, role: Role) -> Iterator[tuple[str, int, str]]:
    """(rows or columns, size by the config, config keys) of a role's weight; size 0 is unknown."""
    if role.kind is Kind.OPAQUE:
        return
    if role.unit:
        members = role.parts or (role.name,)
        units = [arch.role(part).unit or role.unit for part in members]
        size = sum(dims.count(unit) * dims.rows_per_unit(part) for unit, part in zip(units, members, strict=True))
        yield ("rows" if role.split is Split.COL else "columns", size, _KEYS_OF_UNIT.get(role.unit, role.unit))
    if role.name in _FIXED_ROWS:
        yield "rows", _FIXED_ROWS[role.name](dims), "the number of experts" if "router" in role.name else "the ranks"
    if role.input in _HIDDEN_INPUTS or role.kind is Kind.EMBEDDING:
        yield "columns", dims.hidden, "hidden_size"
    if role.kind is Kind.LINEAR and role.split is Split.ROW:
        yield "rows", dims.hidden, "hidden_size"
    if role.kind is Kind.NORM and role.name.startswith("norm."):
        yield "rows", dims.hidden, "hidden_size"


def _experts(arch: Architecture, dims: Dims, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """Each layer that has experts has all of them, in every role."""
    single: dict[tuple[int, str], set[int]] = defaultdict(set)
    counts: dict[int, list[str]] = defaultdict(list)
    for key, weight in weights.items():
        if not arch.role(key.role).per_expert or key.layer is None or key.part != "weight":
            continue
        if key.expert is not None:
            single[key.layer, key.role].add(key.expert)
        elif weight.shape and weight.shape[0] != dims.experts:
            counts[weight.shape[0]].append(f"layer {key.layer} {key.role}")
    lost = []
    for (layer, role), experts in sorted(single.items()):
        if missing := sorted(set(range(dims.experts)) - experts):
            lost.append(f"layer {layer} {role}: experts {_ranges(missing)}")
        if surplus := sorted(expert for expert in experts if expert >= dims.experts):
            counts[max(surplus) + 1].append(f"layer {layer} {role}")
    if lost:
        yield _error(f"config.json counts {dims.experts} experts, some are missing", "complete the checkpoint", lost)
    for actual, where in sorted(counts.items()):
        yield _error(
            f"config.json counts {dims.experts} experts, the tensors hold {actual}",
            "the tensors decide: correct the number of experts in config.json",
            where[:_MAX_NAMED],
        )


_NARROW = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2"})


def _scales(arch: Architecture, weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """An 8-bit weight needs a scale, and a scale needs a weight."""
    orphans = [next(iter(weight.parts.values())).name for weight in weights.values() if weight.payload is None]
    bare = [
        weight.payload.name
        for key, weight in weights.items()
        if weight.payload is not None
        and weight.payload.dtype in _NARROW
        and len(weight.parts) == 1
        and arch.role(key.role).kind is not Kind.OPAQUE
    ]
    if orphans:
        yield _error(f"{len(orphans)} scales have no weight", "complete the checkpoint", orphans[:_MAX_NAMED])
    if bare:
        yield _error(f"{len(bare)} 8-bit weights have no scale", "complete the checkpoint", bare[:_MAX_NAMED])


def _stale_quantization(config: Mapping[str, Any], weights: Mapping[Key, Weight]) -> Iterator[Problem]:
    """A `quantization_config` beside weights that are all plain says nothing about them."""
    claimed = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not isinstance(claimed, Mapping) or any(len(weight.parts) > 1 for weight in weights.values()):
        return
    method = claimed.get("quant_method", "?")
    yield Problem(
        level="note",
        what=f"config.json claims quantization ({method}), but no tensor has a scale: the weights are plain",
        remedy="the tensors decide; remove quantization_config, or check that this is the checkpoint you meant",
    )


def _ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(shown[:_MAX_NAMED]) + (", ..." if len(shown) > _MAX_NAMED else "")
