"""Why a model cannot be transformed: rules over the role table and the record, each with its reason.

A step is exact only if every tensor that reads or writes what it changes is known and can be changed along. What is
missing here is not a limit of one family but a fact about tensors that any family may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.archs import ROLES, Key, Kind, known_model_types, text_config
from quantkit.archs.roles import Residual
from quantkit.checkpoint.reader import Source
from quantkit.errors import UsageError
from quantkit.spec.transform import (
    RESIDUAL_NORMS,
    CorrectBias,
    FoldNorm,
    RotateHeads,
    RotateResidual,
    ScalePair,
    Step,
    Transforms,
)

_UPS = ("mlp.up", "shared.up", "expert.up")


def check_transforms(source: Source, transforms: Transforms, *, without_drafts: bool = False) -> None:
    """Raise a UsageError that lists every reason why the steps would not leave the float model as it is.

    Args:
        without_drafts: draft layers are dropped, so what they read may change.
    """
    if reasons := list(refusals(source, transforms, without_drafts=without_drafts)):
        raise UsageError(
            f"the weights of {source.root} cannot be transformed exactly (architecture record: {source.arch.name})",
            "use a recipe without these methods",
            items=reasons,
        )


def refusals(source: Source, transforms: Transforms, *, without_drafts: bool = False) -> Iterator[str]:
    """Every reason against the steps, as sentences; none when they are exact."""
    if not transforms.steps:
        return
    if rounded := next((entry.name for entry in source.entries.values() if entry.format.name == "int8-channel"), ""):
        yield f"{rounded} is INT8 already, and would be rounded twice: transform the model that it was made from"
    steps = tuple(step for step in transforms.steps if not isinstance(step, CorrectBias))  # any bias can be changed
    if not steps:
        return
    types = {str(part.get("model_type", "")) for part in (source.config, text_config(source.config))}
    if not types & set(known_model_types()):
        yield (
            f"model type {', '.join(sorted(types))} has no record of its own: what its norms are and where they stand "
            "is not known"
        )
        return
    if source.unclassified:
        yield f"{source.unclassified[0]} has no role, so what it reads and writes is not known"
    for index, step in enumerate(steps):
        found = dict.fromkeys(_RULES[type(step)](source, step, steps[:index], without_drafts))
        yield from (f"{step.step}: {reason}" for reason in found)


def _fold_norm(source: Source, step: Step, _before: tuple[Step, ...], without_drafts: bool) -> Iterator[str]:
    assert isinstance(step, FoldNorm)
    for norm in step.norms:
        yield from _norm(source, norm)
    if "norm.final" in step.norms:
        yield from _drafts(source, without_drafts)
    yield from _unknown(source, rotated=False)


def _norm(source: Source, norm: str) -> Iterator[str]:
    """A norm that can be scaled: it has a row of readers, no bias, and stands before all of its readers."""
    if norm not in ROLES or source.arch.role(norm).kind is not Kind.NORM or not _is_read(source, norm):
        yield f"{norm} is no norm that feeds matrices"
        return
    layers = range(source.dims.layers)
    for key, entry in source.entries.items():
        if key.role == norm and key.part == "bias" and (key.layer is None or key.layer in layers):
            yield f"{entry.name}: a norm with a bias adds it after its weight, and the readers have no place for it"
        if source.arch.role(key.role).fed_by == norm and not source.dims.is_draft(key):
            own = Key(key.layer, norm)
            if not source.has(own):
                yield f"{entry.name} has no norm ({own.shard_name}) before it"


def _is_read(source: Source, norm: str) -> bool:
    """Whether the model has a matrix behind a norm; a tied output head is one, though it has no tensor."""
    roles = {key.role for key in source.entries} | {"lm_head"}
    return any(source.arch.role(name).fed_by == norm for name in roles)


def _rotate_residual(source: Source, _step: Step, before: tuple[Step, ...], without_drafts: bool) -> Iterator[str]:
    folded = {norm for step in before if isinstance(step, FoldNorm) for norm in step.norms}
    rescaled = {step.producer for step in before if isinstance(step, ScalePair)}
    for norm in RESIDUAL_NORMS:
        if norm not in folded or norm in rescaled:
            yield f"{norm} multiplies channel by channel, which a rotation does not commute with; fold it just before"
    for key, entry in source.entries.items():
        if source.arch.role(key.role).residual is Residual.SCALES and not source.dims.is_draft(key):
            yield (
                f"{entry.name}: a norm after the block multiplies what is added to the residual stream channel by "
                "channel, and no matrix stands behind it that could take its weight"
            )
            break
    yield from _drafts(source, without_drafts)
    yield from _unknown(source, rotated=True)


def _drafts(source: Source, without_drafts: bool) -> Iterator[str]:
    name = next((entry.name for key, entry in source.entries.items() if source.dims.is_draft(key)), "")
    if name and not without_drafts:
        yield (
            f"{name}: draft layers read the hidden states that the model hands them, in a way that differs between "
            "engines; `mtp: drop` in the recipe leaves them out"
        )


def _unknown(source: Source, *, rotated: bool) -> Iterator[str]:
    """Tensors that meet the residual stream, which is `rotated` or only scaled behind norms inside the layers, in a way
    that the table does not describe."""
    seen: set[str] = set()
    for key, entry in source.entries.items():
        role = source.arch.role(key.role)
        here = role.residual is Residual.UNKNOWN and (key.layer is not None or rotated)
        concerned = here or (role.residual is Residual.BESIDE and rotated)
        if concerned and not source.dims.is_draft(key) and key.role not in seen:
            seen.add(key.role)
            yield f"{entry.name} ({key.role}): how it reads or writes the residual stream is not described"


def _rotate_heads(source: Source, _step: Step, _before: tuple[Step, ...], _without: bool) -> Iterator[str]:
    yield from _values(source)
    if source.arch.query_gate:
        yield "the attention's output is multiplied by a gate channel by channel before the output projection"


def _values(source: Source) -> Iterator[str]:
    """Values and the output projection have the sizes that the config says."""
    dims = source.dims
    wanted = dims.heads * dims.v_head_dim
    for key, entry in source.entries.items():
        if key.role == "attn.o" and key.part == "weight" and not dims.is_draft(key):
            columns = source.canonical_shape(key)[-1]
            if columns != wanted:
                yield f"{entry.name} has {columns} columns, the config says {dims.heads} heads of {dims.v_head_dim}"


def _scale_pair(source: Source, step: Step, before: tuple[Step, ...], without_drafts: bool) -> Iterator[str]:
    assert isinstance(step, ScalePair)
    if step.producer == "attn.v":
        if any(isinstance(item, RotateHeads) for item in before):
            yield "values were rotated before: scale them first"
        yield from _values(source)
    elif step.producer in _UPS:
        if not source.arch.gate_is_linear_in_up:
            yield f"{step.producer}: the feed-forward is not linear in it (it is shifted or clamped before the product)"
    elif step.producer in ROLES and source.arch.role(step.producer).kind is Kind.NORM:
        yield from _norm(source, step.producer)
        yield from _unknown(source, rotated=False)
        if step.producer == "norm.final":
            yield from _drafts(source, without_drafts)
    else:
        yield f"{step.producer} is no norm, no attn.v and none of {', '.join(_UPS)}"


_Rule = Callable[[Source, Step, tuple[Step, ...], bool], Iterator[str]]
_RULES: dict[type, _Rule] = {
    FoldNorm: _fold_norm,
    RotateResidual: _rotate_residual,
    RotateHeads: _rotate_heads,
    ScalePair: _scale_pair,
}
