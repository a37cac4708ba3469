"""What planning reads: a checkpoint's headers where there are any, else what its config promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.archs import Architecture, Dims, architecture_for, known_model_types, text_config
from quantkit.archs.structure import layers_of
from quantkit.errors import InputError
from quantkit.garbage import collection_paused
from quantkit.memory import columns, inventory, names_on_disk, native_dtypes
from quantkit.plan.estimate import Model
from quantkit.plan.native import promised_weights
from quantkit.plan.weights import model_weights
from quantkit.recipe import Recipe
from quantkit.spec.files import is_file, is_folder
from quantkit.spec.index import open_checkpoint, read_json


@dataclass(frozen=True)
class Source:
    """What was read: a model, its sizes before and after, and sentences about how far they can be trusted."""

    name: str
    place: str
    model: Model
    from_tensors: bool
    parameters: int
    source_bytes: int
    dtypes: dict[str, int]
    output_bytes: int
    warnings: tuple[str, ...]


@collection_paused()
def read_source(path: Path, recipe: Recipe) -> Source:
    """Headers where there are any, else what the config promises."""
    root = path.parent if is_file(path) else path
    if not is_file(path) and not is_folder(root):
        raise InputError(f"{path} is neither a folder nor a config.json", "give the model's folder or its config.json")
    config = read_json(path if is_file(path) else root / "config.json")
    arch = architecture_for(config)
    dims = arch.dims(config)
    place = path if is_file(path) else root / "config.json"
    dims.require_consistent(place)
    _require_routing(dims, place)
    from_tensors = is_folder(path) and any(root.glob("*.safetensors"))
    warnings: list[str] = []
    if from_tensors:
        weights, unknown = inventory(arch, open_checkpoint(root).headers.values())
        recipe.check_rules(names_on_disk(weights), root)
        if unknown:
            warnings.append(f"{len(unknown)} tensors have no role and are not counted: see quantkit inspect")
    else:
        weights = promised_weights(arch, dims, config)
        warnings += _doubts(arch, config)
    rows = columns(arch, dims, weights.values(), recipe)
    sizes = model_weights(arch, dims, recipe, weights, kept_bits=_kept_bits(config))
    return Source(
        root.resolve().name,
        str(root),
        Model(dims, config, layers_of(arch, dims, config), sizes),
        from_tensors,
        sum(row.parameters for row in rows),
        sum(row.nbytes for row in rows),
        native_dtypes(weights.values()),
        sum(row.output_nbytes for row in rows),
        tuple(warnings),
    )


def _require_routing(dims: Dims, place: Path) -> None:
    """Active parameters and traffic follow from these; a guess of them would be a silent one.

    Raises:
        InputError: the config has experts, and neither it nor transformers' class says one of them.
    """
    items = []
    if dims.experts and not dims.experts_per_token:
        items.append(f"how many of its {dims.experts} experts each token is routed to: add num_experts_per_tok")
    if dims.experts and not dims.moe_intermediate:
        items.append(f"how wide each of its {dims.experts} experts is: add moe_intermediate_size")
    if items:
        raise InputError(f"{place} does not say all that a plan needs", "complete it, or a copy", items=items)


def _doubts(arch: Architecture, config: Mapping[str, Any]) -> Iterator[str]:
    types = {str(part.get("model_type", "")) for part in (config, text_config(config))}
    if not types & set(known_model_types()):
        yield f"model type {', '.join(sorted(types))} has no record of its own: its tensors were guessed as usual ones"
    if "vision_config" in config:
        yield "config.json alone does not tell the vision tower's size: it is not counted"


def _kept_bits(config: Mapping[str, Any]) -> int:
    text = text_config(config)
    stated = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"))
    return 32 if "float32" in stated else 16
