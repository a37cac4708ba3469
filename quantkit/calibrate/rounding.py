"""How the weights of a layer are rounded, and what makes up for it: as methods have found and left in the artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.archs.assemble import rows_in_fused
from quantkit.archs.modeling import parameter_key
from quantkit.calibrate.fake_quant import Codes, Corrected, Rounded, Rounding, round_to_nearest, uncorrected
from quantkit.calibrate.methods import method
from quantkit.calibrate.weights import gemm_keys
from quantkit.checkpoint.reader import OpenFiles, Source
from quantkit.spec.calibration import BIASES_NAME, bias_name, codes_name
from quantkit.spec.scheme import Scheme
from quantkit.spec.tensorfile import TensorInfo, read_header, read_tensors
from quantkit.spec.transform import MethodOptions


def rounds_to_nearest(_layer: int) -> Rounding:
    """Of every layer, with the biases as they are."""
    return Rounding()


def rounds_as_found(source: Source, artifact: Path, methods: Sequence[MethodOptions]) -> Callable[[int], Rounding]:
    """Layer -> its weights and biases as these methods have found them for the artifact.

    A GEMM without codes is rounded to nearest, one without a corrected bias keeps its own.
    """
    rows = [method(options.name) for options in methods]
    has_codes = any(row.rounds for row in rows)
    biases = _stored_biases(artifact) if any(row.corrects for row in rows) else {}
    files = OpenFiles(artifact)

    def of_layer(layer: int) -> Rounding:
        codes = layer_codes(artifact, layer) if has_codes else {}
        return Rounding(
            _weights(source, layer, codes) if codes else round_to_nearest,
            _biases(source, layer, biases, files) if biases else uncorrected,
        )

    return of_layer


def layer_codes(artifact: Path, layer: int) -> dict[str, Tensor]:
    """Codes and scales of a layer by name; see `quantkit.spec.calibration`."""
    return read_tensors(artifact / codes_name(layer))


def _stored_biases(artifact: Path) -> Mapping[str, TensorInfo]:
    return read_header(artifact / BIASES_NAME).tensors


def _weights(source: Source, layer: int, codes: Mapping[str, Tensor]) -> Rounded:
    def rounded(name: str, w_NK: Tensor) -> Codes:
        keys = _keys(source, layer, name)
        if any(key.shard_name not in codes for key in keys):
            return round_to_nearest(name, w_NK)
        parts = ([codes[f"{key.shard_name}{part}"] for key in keys] for part in ("", "_scale"))
        join = _interleave if _interleaved(source, keys) else torch.cat
        return Codes(*(join(each).to(w_NK.device) for each in parts))

    return rounded


def _interleave(parts: Sequence[Tensor]) -> Tensor:
    """The first rows of all parts, then their second ones, and so on."""
    return torch.stack(tuple(parts), 1).flatten(0, 1)


def _biases(source: Source, layer: int, stored: Mapping[str, TensorInfo], files: OpenFiles) -> Corrected:
    def corrected(name: str, bias: Tensor, scheme: Scheme) -> Tensor:
        keys = _keys(source, layer, name)
        found = bias.clone()
        for index, key in enumerate(keys):
            info = stored.get(bias_name(scheme.name, key.with_part("bias").shard_name))
            if info is not None:
                found[_rows(source, keys, index, len(bias))] = files.read(BIASES_NAME, info).to(bias)
        return found

    return corrected


def _rows(source: Source, keys: Sequence[Key], index: int, total: int) -> slice:
    """Rows of one of the GEMMs of a parameter."""
    if len(keys) == 1:
        return slice(total)
    if _interleaved(source, keys):
        return slice(index, None, len(keys))
    return slice(*rows_in_fused(source.arch, source.dims, keys[index].role, total))


def _interleaved(source: Source, keys: Sequence[Key]) -> bool:
    return source.arch.gate_up_interleaved and len(keys) > 1 and keys[0].expert is not None


def _keys(source: Source, layer: int, name: str) -> list[Key]:
    """GEMMs of a parameter of a layer, in the order of its rows; of stacked experts `NAME.EXPERT`."""
    stored, _, expert = name.rpartition(".")
    known = source.arch.parse(f"model.layers.{layer}.{name}")
    if known is not None:
        return gemm_keys(source.arch, source.dims, known)
    key = parameter_key(source.arch, f"model.layers.{layer}.{stored}")
    return gemm_keys(source.arch, source.dims, key._replace(expert=int(expert)))
