"""What methods that round weights share: second moments of the inputs, fallbacks, and the codes in the artifact.

The second moments are those of the inputs as the engines see them, rounded per token: what rounding adds to a channel
counts like what the channel carries, so channels that drown in it are not fitted to.
Shape suffixes: N output channels, K input channels, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from quantkit.archs import Key
from quantkit.arithmetic import channel_scales, dequantize, quantize, represented
from quantkit.calibrate.methods.base import FALLBACK, Found, LayerView, Learns, Method, MethodOptions, nothing
from quantkit.calibrate.rows import input_name
from quantkit.checkpoint.writer import read_chunks, write_atomic
from quantkit.errors import QuantkitError
from quantkit.spec.calibration import MethodRow, codes_name
from quantkit.spec.files import is_file

MOMENTS_BYTES = 24
"""For each of the K^2 second moments of a job: they twice and their factor, in float64."""

WEIGHT_BYTES = 46
"""For each weight of a job, measured: most when the errors of both roundings are computed."""

_CHUNK = 2048
"""Rows that are multiplied at once in float32 before they are added in float64."""


class RoundingOptions(MethodOptions):
    """Options that all of them have.

    Attributes:
        tokens: of the text that goes through the model.
        rows: sampled rows of each input; those of an expert are its share of them.
        min_rows: a GEMM that saw fewer is rounded to nearest, and named.
    """

    tokens: Annotated[int, Field(ge=1)] = 32768
    rows: Annotated[int, Field(ge=16)] = 16384
    min_rows: Annotated[int, Field(ge=1)] = 64


Round = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, str]]
"""(weight float32 `[N, K]`, second moments float64 `[K, K]`) -> (int8 `[N, K]`, scales float32 `[N, 1]`, note).

Raises `NoFactorError` where the second moments cannot be used.
"""


class NoFactorError(Exception):
    """Second moments that a method cannot work with; the GEMM is rounded to nearest, and counted."""


class _Job(NamedTuple):
    """GEMMs that read the same rows."""

    keys: tuple[Key, ...]
    name: str
    expert: int | None


class _Rounded(NamedTuple):
    codes: Tensor
    scale: Tensor
    before: float
    after: float
    note: str


def round_layer(view: LayerView, options: RoundingOptions, rounds: Round) -> Found:
    """Codes and scales of all quantized GEMMs of a layer."""
    jobs = list(_jobs(view))
    results = view.map(lambda job: _round_job(view, job, options, rounds), jobs)
    tensors: dict[str, Tensor] = {}
    rows = []
    for job, found in zip(jobs, results, strict=True):
        for key, rounded in zip(job.keys, found, strict=True):
            tensors[key.shard_name], tensors[f"{key.shard_name}_scale"] = rounded.codes, rounded.scale
            name = key.shard_name.removesuffix(".weight")
            rows.append(
                MethodRow(
                    method=options.name,
                    layer=view.layer,
                    name=name,
                    before=rounded.before,
                    after=rounded.after,
                    note=rounded.note,
                )
            )
    return Found(tensors, rows)


def _jobs(view: LayerView) -> Iterator[_Job]:
    sets: dict[tuple[str, int | None], list[Key]] = {}
    for key in view.weights:
        if key in view.schemes:
            sets.setdefault((input_name(view.source.arch, key), key.expert), []).append(key)
    for (name, expert), keys in sets.items():
        yield _Job(tuple(keys), name, expert)


def _round_job(view: LayerView, job: _Job, options: RoundingOptions, rounds: Round) -> list[_Rounded]:
    """The GEMMs of a job at once, as one matrix."""
    weights = [view.weight(key) for key in job.keys]
    rows = view.rows.get(job.name)
    x = rows.of(job.expert) if rows is not None else weights[0].new_zeros(0, weights[0].shape[1])
    if len(x) < options.min_rows:
        return [_plain(w_NK, f"{FALLBACK}{len(x)} rows, fewer than {options.min_rows}") for w_NK in weights]
    h_KK = second_moments(x)
    try:
        codes, scale, note = rounds(torch.cat(weights), h_KK)
    except NoFactorError:
        return [_plain(w_NK, f"{FALLBACK}its second moments have no factor") for w_NK in weights]
    sizes = [len(w_NK) for w_NK in weights]
    return [
        _better(w_NK, q, s, h_KK, note)
        for w_NK, q, s in zip(weights, codes.split(sizes), scale.split(sizes), strict=True)
    ]


def _plain(w_NK: Tensor, note: str) -> _Rounded:
    scale = channel_scales(w_NK)
    return _Rounded(quantize(w_NK, scale), scale, 0.0, 0.0, note)


def _better(w_NK: Tensor, codes: Tensor, scale: Tensor, h_KK: Tensor, note: str) -> _Rounded:
    """What a method found, unless rounding to nearest has the smaller error."""
    plain = _plain(w_NK, "to nearest: no smaller error was found")
    before, after = relative_errors(w_NK, h_KK, *(dequantize(*each) for each in (plain[:2], (codes, scale))))
    if not after < before:
        return plain._replace(before=before, after=before)
    return _Rounded(codes, scale, before, after, note)


def second_moments(x: Tensor) -> Tensor:
    """Mean of q(x)^T q(x) over rows float32 `[n, K]`, float64 `[K, K]`."""
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for chunk in x.split(_CHUNK):
        rounded = represented(chunk, channel_scales(chunk))
        total += rounded.T @ rounded
    return total / len(x)


def relative_errors(w_NK: Tensor, h_KK: Tensor, *rounded_NK: Tensor) -> list[float]:
    """||x (w - q)^T|| / ||x w^T|| of each q, over the rows behind the second moments."""
    matrices, h_KK = (w_NK, *(w_NK - each for each in rounded_NK)), h_KK.float()
    square, *errors = torch.stack([(each @ h_KK).mul_(each).sum(dtype=torch.float64) for each in matrices]).tolist()
    return [(max(error, 0.0) / square) ** 0.5 if square > 0 else 0.0 for error in errors]


def rounding_method(options: type[RoundingOptions], layer: Callable[[LayerView, Any], Found]) -> Method:
    """The row of a method that rounds; `layer` finds the codes of one."""
    learns = Learns(lambda given: given.tokens, lambda given: given.rows, layer, write_codes, weight_bytes=WEIGHT_BYTES)
    return Method(options, nothing, learns, rounds=True)


def write_codes(records: Sequence[Path], out: Path) -> None:
    """The layers' records are the files of the artifact."""
    for layer, path in enumerate(records):
        target = out / codes_name(layer)
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(path)
        except OSError:  # no hard links there
            write_atomic(target, read_chunks(path))
        if not is_file(target):
            raise QuantkitError(f"{target} could not be written", "check the disk or the mount")
