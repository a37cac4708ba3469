"""The checkpoint form: names as on disk, experts one by one and 2-D, what engines load as it is.

Quantized weights get `X.weight` I8 and `X.weight_scale` F32 `[N, 1]`; everything else keeps name and bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from quantkit.archs import Key, Kind
from quantkit.archs.assemble import Location, locate
from quantkit.checkpoint.reader import Entry, Source
from quantkit.convert.decide import Decisions
from quantkit.convert.units import How, PlannedFile, PlannedTensor
from quantkit.errors import InputError
from quantkit.spec.index import SINGLE_NAME
from quantkit.spec.scheme import quantization_config

_PROJECTIONS = {"expert.gate": "gate_proj", "expert.up": "up_proj", "expert.down": "down_proj"}
"""Names that stacked experts get when they are taken apart, as engines know them."""


def rows_of(source: Source, key: Key) -> int:
    """Canonical rows of a stored tensor, of one expert's matrix when it is stacked."""
    shape = source.canonical_shape(key)
    row_dim = 1 if source.is_stacked(key) else 0
    return shape[row_dim] if len(shape) > row_dim else 1  # a shape of too few is a problem that is told elsewhere


def kept_dtype(source: Source, entry: Entry) -> str:
    """Dtype in which a tensor is kept: its own, or the model's when a native low-bit format is decoded."""
    if entry.kept_dtype:
        return entry.kept_dtype
    if entry.format.name == "plain":
        return entry.dtype
    named = str(source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return {"float16": "F16", "float32": "F32"}.get(named, "BF16")


def checkpoint_tensors(source: Source, decisions: Decisions) -> list[tuple[PlannedTensor, ...]]:
    """Tensors in canonical order; those of one tuple (a weight and its scales) lie in one file."""
    found: list[tuple[PlannedTensor, ...]] = []
    for key in decisions.written:
        if not decisions.is_int8(key):
            found.append((keep_tensor(source, key),))
        elif source.is_stacked(key):
            found += _unstacked(source, decisions, key)
        elif key.part == "bias":
            found.append((keep_tensor(source, key),))
        else:
            entry = source.entries[key]
            whole = (Location(key, None, 0, entry.shape[0]),)
            found.append(_quantized(source, decisions, key, entry.module, whole))
    return found


def keep_tensor(source: Source, key: Key, name: str = "") -> PlannedTensor:
    """A tensor that is written as it is stored, under its own name or another."""
    entry = source.entries[key]
    plain = entry.format.name == "plain"
    shape = entry.shape
    return PlannedTensor(
        name=name or (entry.name if plain else f"{entry.module}.{key.part}"),
        key=key,
        how=How.COPY,
        dtype=kept_dtype(source, entry),
        shape=shape,
        pieces=(Location(key, None, 0, shape[0] if shape else 1),),
        sources=(entry.name,),
        global_shape=shape,
    )


def _quantized(
    source: Source, decisions: Decisions, key: Key, module: str, pieces: tuple[Location, ...]
) -> tuple[PlannedTensor, PlannedTensor]:
    stored = pieces[0].key
    rows, columns = sum(piece.rows for piece in pieces), source.canonical_shape(stored)[-1]
    sources = tuple(dict.fromkeys(source.entries[piece.key].name for piece in pieces))
    shared: dict[str, Any] = {"pieces": pieces, "sources": sources}
    scale_name = f"{module}.weight_scale"
    weight = PlannedTensor(
        f"{module}.weight",
        key,
        How.INT8,
        "I8",
        (rows, columns),
        scheme=decisions.schemes[stored].name,
        scale=scale_name,
        global_shape=(rows, columns),
        **shared,
    )
    scale_key = key.with_part("weight_scale")
    scale = PlannedTensor(scale_name, scale_key, How.SCALE, "F32", (rows, 1), global_shape=(rows, 1), **shared)
    return weight, scale


def _unstacked(source: Source, decisions: Decisions, key: Key) -> list[tuple[PlannedTensor, ...]]:
    """A stacked tensor, expert by expert and projection by projection, in canonical orientation."""
    entry = source.entries[key]
    found: list[tuple[PlannedTensor, ...]] = []
    for expert in range(entry.shape[0]):
        for member in source.arch.role(key.role).parts or (key.role,):
            own = key._replace(role=member, expert=expert)
            pieces = locate(source.arch, source.dims, own, source.has, lambda stored: rows_of(source, stored)) or ()
            module = expert_module(entry, member, expert)
            if key.part == "weight":
                found.append(_quantized(source, decisions, own, module, pieces))
                continue
            rows = sum(piece.rows for piece in pieces)
            name, dtype = f"{module}.{key.part}", kept_dtype(source, entry)
            found.append(
                (
                    PlannedTensor(
                        name, own, How.COPY, dtype, (rows,), pieces, sources=(entry.name,), global_shape=(rows,)
                    ),
                )
            )
    return found


def expert_module(entry: Entry, member: str, expert: int) -> str:
    """Module name of one expert of a stacked tensor: `...mlp.experts.7.gate_proj`."""
    return f"{entry.module.rpartition('.')[0]}.{expert}.{_PROJECTIONS[member]}"


def linear_modules(source: Source, is_int8: Callable[[Key], bool], keys: Iterable[Key]) -> tuple[str, ...]:
    """Every linear module of `keys` that is not quantized, by the exact name that engines give it."""
    found: list[str] = []
    for key in keys:
        entry, role = source.entries[key], source.arch.role(key.role)
        if key.part != "weight" or is_int8(key):
            continue
        if source.is_stacked(key):
            members = role.parts or (key.role,)
            found += [expert_module(entry, member, e) for e in range(entry.shape[0]) for member in members]
        elif role.kind in (Kind.LINEAR, Kind.ROUTER) or key.role == "lm_head" or _opaque_linear(role.kind, entry):
            found.append(entry.module)
    if source.tied:
        found.append(_tied_head(source))
    return tuple(sorted(found))


def _opaque_linear(kind: Kind, entry: Entry) -> bool:
    """Opaque subtrees do not say which of their modules are linear: every `.weight` matrix that is not an embedding
    table by its name is taken for one."""
    leaf = entry.module.rpartition(".")[2]
    return kind is Kind.OPAQUE and len(entry.shape) == 2 and entry.name.endswith(".weight") and "embed" not in leaf


def _tied_head(source: Source) -> str:
    """Name of the head that shares the embedding table and so has no tensor: it stands beside `model`."""
    table = source.entries.get(Key(None, "embed"))
    if table is None:
        raise InputError(f"{source.root} has neither an embedding table nor an output head", "complete the checkpoint")
    found = re.match(r"(.*\.)?model\.embed_tokens\.weight$", table.name)
    return f"{(found[1] if found else '') or ''}lm_head"


def config_bytes(
    source: Source, ignore: tuple[str, ...] | None, original: bytes, *, kv_cache_fp8: bool = False
) -> bytes:
    """config.json of the output; `ignore` is None when nothing is quantized.

    The source's own keys stay; its `quantization_config`, which no longer describes the weights, is replaced.
    `kv_cache_fp8`: see `quantization_config`.
    """
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    nested = config.get("text_config")
    if isinstance(nested, dict) and "quantization_config" in nested:
        config["text_config"] = {key: value for key, value in nested.items() if key != "quantization_config"}
    if ignore is not None:
        config["quantization_config"] = quantization_config(list(ignore), kv_cache_fp8=kv_cache_fp8)
    if config == json.loads(original):
        return original
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def index_bytes(files: tuple[PlannedFile, ...]) -> bytes | None:
    """`model.safetensors.index.json`; None for a single file."""
    if [file.name for file in files] == [SINGLE_NAME]:
        return None
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    table = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": dict(sorted(where.items())),
    }
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
