"""How the weights of a layer are rounded: to nearest, or as a method has found and left in the artifact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.archs.modeling import parameter_key
from quantkit.arithmetic import dequantize
from quantkit.calibrate.fake_quant import Rounded, round_to_nearest
from quantkit.calibrate.weights import gemm_keys
from quantkit.checkpoint.reader import Source
from quantkit.spec.calibration import codes_name
from quantkit.spec.tensorfile import read_tensors


def rounds_to_nearest(_layer: int) -> Rounded:
    """Of every layer."""
    return round_to_nearest


def rounds_as_found(source: Source, artifact: Path) -> Callable[[int], Rounded]:
    """Layer -> its weights by the codes of the artifact; a GEMM without codes is rounded to nearest."""

    def of_layer(layer: int) -> Rounded:
        codes = read_tensors(artifact / codes_name(layer))

        def rounded(name: str, w_NK: Tensor) -> Tensor:
            keys = _keys(source, layer, name)
            if any(key.shard_name not in codes for key in keys):
                return round_to_nearest(name, w_NK)
            parts = [dequantize(codes[key.shard_name], codes[f"{key.shard_name}_scale"]) for key in keys]
            interleaved = source.arch.gate_up_interleaved and keys[0].expert is not None
            found = torch.stack(parts, 1).flatten(0, 1) if interleaved else torch.cat(parts)
            return found.to(w_NK)

        return rounded

    return of_layer


def _keys(source: Source, layer: int, name: str) -> list[Key]:
    """GEMMs of a parameter of a layer, in the order of its rows; of stacked experts `NAME.EXPERT`."""
    stored, _, expert = name.rpartition(".")
    known = source.arch.parse(f"model.layers.{layer}.{name}")
    if known is not None:
        return gemm_keys(source.arch, source.dims, known)
    key = parameter_key(source.arch, f"model.layers.{layer}.{stored}")
    return gemm_keys(source.arch, source.dims, key._replace(expert=int(expert)))
