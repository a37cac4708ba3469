"""The tensors of a bare config.json as if their headers had been read, in the storage that the config declares.

So the same tables (`quantkit.memory`) serve a checkpoint and a config. Scales of the native form are counted as they
are published: one per block, per row, or per group of 32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from quantkit.archs import Architecture, Dims, Key, Kind, text_config
from quantkit.archs.dims import MAX_SIZE
from quantkit.archs.expected import Expected, expected_tensors
from quantkit.errors import InputError
from quantkit.memory import Weight
from quantkit.spec.tensorfile import TensorInfo, tensor_nbytes

Shape = tuple[int, ...]
Stored = dict[str, tuple[str, Shape]]
"""Part -> (dtype, shape)."""


def promised_weights(arch: Architecture, dims: Dims, config: Mapping[str, Any]) -> dict[Key, Weight]:
    """All logical tensors by key, experts stacked, in the orientation in which such a checkpoint stores them."""
    declared = config.get("quantization_config") or text_config(config).get("quantization_config")
    store = _storage(arch, declared if isinstance(declared, Mapping) else {})
    found = {}
    for item in expected_tensors(arch, dims, config):
        parts = store(item) or {"weight": (item.dtype, _as_stored(arch, item))}
        infos = {
            part: TensorInfo(item.name, dtype, shape, 0, tensor_nbytes(dtype, shape))
            for part, (dtype, shape) in parts.items()
        }
        found[item.key] = Weight(item.key, infos)
    return found


def _as_stored(arch: Architecture, item: Expected) -> Shape:
    transposed = arch.experts_transposed and arch.role(item.key.role).per_expert and len(item.shape) == 3
    return (item.shape[0], item.shape[2], item.shape[1]) if transposed else item.shape


def _storage(arch: Architecture, declared: Mapping[str, Any]) -> Callable[[Expected], Stored | None]:
    """How a tensor is stored by `quantization_config`; None is as it is."""
    form, experts_only = _form(declared)
    if form is None:
        return lambda item: None
    ignored = [name for key in ("ignore", "modules_to_not_convert") for name in _patterns(declared, key)]

    def store(item: Expected) -> Stored | None:
        role = arch.role(item.key.role)
        wrong_kind = role.kind is not Kind.LINEAR or item.key.part != "weight" or len(item.shape) < 2
        if wrong_kind or (experts_only and not role.per_expert) or _is_ignored(item, ignored):
            return None
        return form(item.shape)

    return store


def _patterns(declared: Mapping[str, Any], key: str) -> list[str]:
    """Names and `re:` patterns of a list in `quantization_config`.

    Raises:
        InputError: it is no list of text, or a pattern is none.
    """
    found = declared.get(key) or []
    try:
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ValueError("it is no list of module names")
        for name in found:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except (ValueError, OverflowError, re.error, RecursionError) as error:
        raise InputError(
            f"config.json: `{key}` of its quantization_config cannot be used: {error}",
            "correct it, or copy config.json again",
        ) from error
    return list(found)


def _is_ignored(item: Expected, patterns: list[str]) -> bool:
    module = item.name.rpartition(".")[0].replace("*", "0")
    return any(
        re.match(pattern[3:], module) if pattern.startswith("re:") else _covers(pattern, module) for pattern in patterns
    )


def _covers(pattern: str, module: str) -> bool:
    """Whether a plain entry names the module or what it lies in; a `*` stands for a layer."""
    return re.search(rf"(?:^|\.){re.escape(pattern).replace(chr(92) + '*', '[^.]+')}(?:\.|$)", module) is not None


def _form(declared: Mapping[str, Any]) -> tuple[Callable[[Shape], Stored] | None, bool]:
    """Shape -> stored tensors, and whether only experts are stored so."""
    method = str(declared.get("quant_method", ""))
    block = declared.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        block = None
    if method == "mxfp4":
        return _mxfp4, True
    if method == "mxfp8" or block == [1, 32]:
        return _mxfp8, False
    if method == "fp8":
        return (_fp8_block(block[0], block[1]) if block else _fp8_tensor), False
    if method == "compressed-tensors":
        return _compressed(declared), False
    return None, False


def _compressed(declared: Mapping[str, Any]) -> Callable[[Shape], Stored] | None:
    groups = declared.get("config_groups")
    rows = [row for row in groups.values() if isinstance(row, Mapping)] if isinstance(groups, Mapping) else []
    weights = next((row["weights"] for row in rows if isinstance(row.get("weights"), Mapping)), None)
    if weights is None:
        return None
    group = weights.get("group_size")
    if type(group) is not int or not 0 < group <= MAX_SIZE:  # -1, None and the like: the whole row
        group = 0
    if weights.get("num_bits") == 4:
        return lambda shape: _packed4(shape, group or shape[-1], weights.get("type") == "float")
    dtype = "F8_E4M3" if weights.get("type") == "float" else "I8"
    return lambda shape: {"weight": (dtype, shape), "weight_scale": ("F32", (*shape[:-1], 1))}


def _mxfp4(shape: Shape) -> Stored:
    groups = math.ceil(shape[-1] / 32)
    return {"blocks": ("U8", (*shape[:-1], groups, 16)), "scales": ("U8", (*shape[:-1], groups))}


def _mxfp8(shape: Shape) -> Stored:
    return {"weight": ("F8_E4M3", shape), "weight_scale_inv": ("U8", (*shape[:-1], math.ceil(shape[-1] / 32)))}


def _fp8_block(rows: int, columns: int) -> Callable[[Shape], Stored]:
    def store(shape: Shape) -> Stored:
        blocks = (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns))
        return {"weight": ("F8_E4M3", shape), "weight_scale_inv": ("F32", blocks)}

    return store


def _fp8_tensor(shape: Shape) -> Stored:
    return {"weight": ("F8_E4M3", shape), "weight_scale": ("F32", (*shape[:-2], 1, 1))}


def _packed4(shape: Shape, group: int, is_float: bool) -> Stored:
    groups = math.ceil(shape[-1] / group)
    if is_float:
        return {"weight_packed": ("U8", (*shape[:-1], shape[-1] // 2)), "weight_scale": ("U8", (*shape[:-1], groups))}
    packed = (*shape[:-1], math.ceil(shape[-1] / 8))
    return {"weight_packed": ("I32", packed), "weight_scale": ("BF16", (*shape[:-1], groups))}
