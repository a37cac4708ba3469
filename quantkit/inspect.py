"""What a checkpoint is, from its config and its files' headers: structure, sizes by role, and what does not fit.

No tensor data is read and torch is not imported, so that terabytes take seconds. A folder that is broken is described
as far as it can be read; what is wrong with it comes first. A folder with only a config.json gets its structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.archs import Architecture, Dims, Key, architecture_for, roles_snippet, text_config
from quantkit.archs.structure import Layer, draft_layers, layers_of
from quantkit.companions import check_companions, check_positions
from quantkit.crosscheck import Problem, cross_check
from quantkit.errors import InputError
from quantkit.garbage import collection_paused
from quantkit.memory import (
    Weight,
    active_parameters,
    columns,
    human_bytes,
    human_count,
    inventory,
    names_on_disk,
    native_dtypes,
)
from quantkit.operators import OperatorRow, operator_list
from quantkit.plan.native import promised_weights
from quantkit.recipe import Recipe, load_recipe
from quantkit.rope import rope_text
from quantkit.spec.document import Strict
from quantkit.spec.files import is_file, is_folder
from quantkit.spec.index import holds_rank_shards, open_checkpoint, read_json
from quantkit.spec.tensorfile import Header, read_header


class Structure(Strict):
    """The model as its config describes it; 0 means that it has none of that.

    Attributes:
        record: name of the architecture record that reads it.
        latent_rank: of keys and values (MLA), 0 for plain attention.
        moe_layers: layers that hold experts, by the tensors; None when there are no tensors.
        rope: scaling of positions.
        window: positions that windowed layers see, the largest; window_layers: how many layers are such.
        linear_layers, indexed_layers: layers of linear attention, layers with an indexer.
        draft_layers: by the tensors, else by the config.
        scoring: of the router, as the config says, "" when it does not.
        shared_intermediate: total width of the shared experts.
    """

    model_type: str
    record: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_rank: int
    intermediate: int
    experts: int
    experts_per_token: int
    moe_intermediate: int
    shared_intermediate: int
    moe_layers: int | None
    max_positions: int
    tied_embeddings: bool
    rope: str
    window: int
    window_layers: int
    linear_layers: int
    indexed_layers: int
    draft_layers: int
    vision: bool
    scoring: str


class ColumnRow(Strict):
    """Totals of one role column, see `quantkit.memory.Column`."""

    name: str
    tensors: int
    parameters: int
    nbytes: int
    quantized: int
    output_nbytes: int


class Inspection(Strict):
    """All that `quantkit inspect` tells.

    Attributes:
        name: of the folder.
        structure: from the config.
        problems: errors first; empty is good.
        files: number of safetensors files that could be read.
        tensors: number of tensors in them.
        parameters: of the model, scales not counted.
        active_parameters: that one token meets.
        nbytes: of all tensors on disk.
        dtypes: bytes by stored dtype.
        recipe: name of the recipe that the last two columns are for.
        quantized: parameters that it converts to INT8.
        output_nbytes: of all tensors after the conversion.
        columns: the same by role column.
        unclassified: names without a role (the first 50).
        operators: what the model is made of and who runs it.

    Without tensors, parameters and columns are what the config promises, and `tensors` is 0.
    """

    name: str
    structure: Structure
    problems: tuple[Problem, ...]
    files: int
    tensors: int
    parameters: int
    active_parameters: int
    nbytes: int
    dtypes: dict[str, int]
    recipe: str
    quantized: int
    output_nbytes: int
    columns: tuple[ColumnRow, ...]
    unclassified: tuple[str, ...]
    operators: tuple[OperatorRow, ...]

    @property
    def sound(self) -> bool:
        return not any(problem.level == "error" for problem in self.problems)


@collection_paused()
def inspect(root: Path, recipe_name: str = "w8a8") -> Inspection:
    """Describe a checkpoint folder.

    Args:
        root: folder with a config.json and, usually, *.safetensors; or a config.json, which then speaks alone.
        recipe_name: recipe for the INT8 columns.

    Raises:
        InputError: no such folder, or a config.json that cannot be read at all.
        UsageError: no such recipe, or rules of it match nothing.
    """
    recipe = load_recipe(recipe_name)
    alone = is_file(root) and root.suffix == ".json"
    if not is_folder(root) and not alone:
        open_checkpoint(root)  # raises the error that says what is wrong
    config = read_json(root if alone else root / "config.json")
    arch = architecture_for(config)
    dims = arch.dims(config)
    headers, problems = ({}, [_only_config()]) if alone else read_headers(root)
    weights, unclassified = inventory(arch, headers.values())
    if unclassified:
        problems.append(_without_role(arch, unclassified))
    if weights:
        recipe.check_rules(names_on_disk(weights), root)
        problems += cross_check(arch, dims, config, weights)
        problems += check_companions(root, config, _embedding_rows(dims, weights))
    else:
        problems += check_positions(config)
        weights = promised_weights(arch, dims, config)
    return _describe(root, config, arch, dims, recipe, headers, weights, problems, unclassified)


def _embedding_rows(dims: Dims, weights: Mapping[Key, Weight]) -> int:
    """Rows of the table, which a wrong vocab_size does not change."""
    table = weights.get(Key(None, "embed"))
    return table.shape[0] if table is not None and table.shape else dims.vocab


def _only_config() -> Problem:
    text = "there are no *.safetensors files: only config.json speaks, and nothing is checked against tensors"
    return Problem(level="note", what=text, remedy="copy the weights here to check and convert them")


def read_headers(root: Path) -> tuple[dict[str, Header], list[Problem]]:
    """Headers of all files that can be read, and what is wrong with the rest or with the index.

    Raises:
        InputError: the folder holds rank shards.
    """
    try:
        return dict(open_checkpoint(root).headers), []
    except InputError as error:
        if holds_rank_shards(root):
            raise  # parts of tensors under names of roles: nothing else that could be said of them helps
        files = sorted(root.glob("*.safetensors"))
        if not files:
            return {}, [_only_config()]
        problems = [_as_problem(error)]
    headers: dict[str, Header] = {}
    for path in files:
        try:
            headers[path.name] = read_header(path)
        except InputError as error:
            if error.message != problems[0].what:
                problems.append(_as_problem(error))
    return headers, problems


def _as_problem(error: InputError) -> Problem:
    return Problem(level="error", what=error.message, remedy=error.hint, items=error.items)


def _without_role(arch: Architecture, names: list[str]) -> Problem:
    return Problem(
        level="error",
        what=f"{len(names)} tensors have no role in the architecture record {arch.name}",
        remedy=f"add this to the recipe, with a role for each ROLE\n{roles_snippet(names)}",
        items=tuple(names[:20]),
    )


def _describe(
    root: Path,
    config: Mapping[str, Any],
    arch: Architecture,
    dims: Dims,
    recipe: Recipe,
    headers: Mapping[str, Header],
    weights: Mapping[Key, Weight],
    problems: list[Problem],
    unclassified: list[str],
) -> Inspection:
    rows = columns(arch, dims, weights.values(), recipe)
    layers = layers_of(arch, dims, config)
    roles = {key.role for key in weights}
    return Inspection(
        name=root.resolve().name if is_folder(root) else root.resolve().parent.name,
        structure=_structure(config, arch, dims, weights if headers else {}, layers),
        problems=tuple(sorted(problems, key=lambda problem: problem.level != "error")),
        files=len(headers),
        tensors=sum(len(header.tensors) for header in headers.values()),
        parameters=sum(row.parameters for row in rows),
        active_parameters=active_parameters(arch, dims, weights.values()),
        nbytes=sum(row.nbytes for row in rows),
        dtypes=native_dtypes(weights.values()),
        recipe=recipe.name,
        quantized=sum(row.quantized for row in rows),
        output_nbytes=sum(row.output_nbytes for row in rows),
        columns=tuple(ColumnRow(**vars(row)) for row in rows),
        unclassified=tuple(unclassified[:50]),
        operators=operator_list(arch, dims, config, layers, roles),
    )


def _structure(
    config: Mapping[str, Any],
    arch: Architecture,
    dims: Dims,
    weights: Mapping[Key, Weight],
    layers: tuple[Layer, ...],
) -> Structure:
    moe = {key.layer for key in weights if arch.role(key.role).per_expert and (key.layer or 0) < dims.layers}
    return Structure(
        model_type=str(config.get("model_type") or text_config(config).get("model_type")),
        record=arch.name,
        layers=dims.layers,
        hidden=dims.hidden,
        vocab=dims.vocab,
        heads=dims.heads,
        kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        v_head_dim=dims.v_head_dim,
        latent_rank=dims.kv_lora_rank,
        intermediate=dims.intermediate,
        experts=dims.experts,
        experts_per_token=dims.experts_per_token,
        moe_intermediate=dims.moe_intermediate,
        shared_intermediate=dims.shared_intermediate,
        moe_layers=len(moe) if weights else None,
        max_positions=dims.max_positions,
        tied_embeddings=dims.tied,
        rope=rope_text(config),
        window=max((layer.window for layer in layers), default=0),
        window_layers=sum(layer.window > 0 for layer in layers),
        linear_layers=sum(layer.attention == "linear" for layer in layers),
        indexed_layers=sum(layer.indexed for layer in layers),
        draft_layers=_draft_layers(config, dims, weights),
        vision="vision_config" in config or any(arch.role(key.role).column == "vision" for key in weights),
        scoring=str(text_config(config).get("scoring_func") or ""),
    )


def _draft_layers(config: Mapping[str, Any], dims: Dims, weights: Mapping[Key, Weight]) -> int:
    if not weights:
        return draft_layers(config)
    beyond = {key.layer for key in weights if key.layer is not None and key.layer >= dims.layers}
    return len(beyond) or int(any(key.role == "mtp" for key in weights))


def details_line(found: Inspection) -> str:
    """What a person should know beside sizes: positions, windows, other kinds of layers, parts beside the text."""
    s = found.structure
    parts = [f"positions {s.max_positions:,}, rope scaling {s.rope}"]
    parts += [f"{s.window_layers} layers with a window of {s.window:,}"] if s.window_layers else []
    parts += [f"{s.linear_layers} layers of linear attention"] if s.linear_layers else []
    parts += [f"{s.indexed_layers} layers with an indexer"] if s.indexed_layers else []
    parts += [f"router scores by {s.scoring}"] if s.scoring else []
    parts += [f"{s.draft_layers} draft layers"] if s.draft_layers else []
    parts += ["a vision tower"] if s.vision else []
    parts += ["tied embeddings"] if s.tied_embeddings else []
    return "; ".join(parts)


def inspect_line(found: Inspection) -> str:
    """The model in one line."""
    s = found.structure
    attention = f"latent attention of rank {s.latent_rank}" if s.latent_rank else f"{s.kv_heads} kv heads"
    parts = [f"{s.model_type}: {s.layers} layers of {s.hidden}", f"{s.heads} heads of {s.head_dim}, {attention}"]
    if s.experts:
        shared = f" + {s.shared_intermediate // s.moe_intermediate} shared" if s.shared_intermediate else ""
        parts.append(f"{s.experts} experts, top {s.experts_per_token}{shared}, width {s.moe_intermediate}")
    parts.append(f"vocabulary {s.vocab}")
    active = f" ({human_count(found.active_parameters)} active)" if s.experts else ""
    parts.append(f"{human_count(found.parameters)} parameters{active}{'' if found.tensors else ' by the config'}")
    if found.tensors:
        parts.append(f"{next(iter(found.dtypes), 'no tensors')}, {human_bytes(found.nbytes)}")
    return "; ".join(parts)
