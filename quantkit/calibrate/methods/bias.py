"""`bias`: biases take off the mean of what rounding adds to the outputs of their GEMMs.

y = x w^T + b becomes y' = q(x) w_q^T + b', and b' = b + E[x w^T] - E[q(x) w_q^T] makes the means of both equal, channel
by channel: the bias correction of Nagel et al. 2019 (arXiv:1906.04721, section 4.2), in its empirical form (appendix
D), each GEMM by itself on what enters it in the float model. w_q are the weights as they will be written, after `gptq`;
q rounds activations per token or per group, as the GEMM's scheme says.

On the rows that a mean was taken from, subtracting it always helps, so nothing is judged there. The rows, which lie in
the order of the kinds of text, are cut into `_BLOCKS`; every block is judged with the mean of all others, rounded to
the dtype of the bias. A bias is changed where the squared error summed over the blocks falls, and what is written then
is the mean of all rows. GEMMs without a bias stay as they are, since engines have no place for a new one; they are
counted.

It is in no shipped recipe. On SmolLM2-135M, whose GEMMs have no biases and got biases of zero for this, it takes 1 to
2 % off the errors of q, k, v, o, gate and up under plain rounding (most: 5.6 % of one o) and 0.2 % off that of down;
the KL divergence falls from 0.0508 to 0.0496, which is less than its standard error. After `rotate`, `smooth` and
`gptq` (its first 10 layers) 0.2 % at most is left to take, a third of the biases stay, and the KL divergence is the
same: GPTQ fits to second moments that the mean is part of. So it may pay where weights are rounded to nearest, and a
model has biases.

A GEMM that is split along its inputs rounds each part of a token with a scale of its own: its activations have smaller
errors than those that its bias was corrected for.
Shape suffixes: N output channels, K input channels, n rows, B blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate.fake_quant import round_tokens
from quantkit.calibrate.methods.base import STARVED, Built, Found, LayerView, Learns, Method, MethodOptions, nothing
from quantkit.calibrate.rows import input_name
from quantkit.checkpoint.effects import matrix, pieces_of
from quantkit.checkpoint.reader import OpenFiles, Source
from quantkit.errors import UsageError
from quantkit.spec.calibration import BIASES_NAME, NOTHING, MethodRow, bias_name
from quantkit.spec.scheme import Scheme
from quantkit.spec.tensorfile import read_header, torch_dtype
from quantkit.spec.transform import CorrectBias

if TYPE_CHECKING:
    from quantkit.recipe import Recipe

_BLOCKS = 8
_CHUNK = 512
"""Rows whose outputs are held at once."""


class BiasOptions(MethodOptions):
    """Options of `bias`.

    Attributes:
        tokens: of the text that goes through the model.
        rows: sampled rows of each input; those of an expert are its share of them.
        min_rows: a GEMM that saw fewer keeps its bias, and is named.
    """

    name: Literal["bias"] = "bias"
    tokens: Annotated[int, Field(ge=1)] = 32768
    rows: Annotated[int, Field(ge=16)] = 16384
    min_rows: Annotated[int, Field(ge=2 * _BLOCKS)] = 64


class Errors(NamedTuple):
    """What rounding does to the outputs of one GEMM.

    Attributes:
        counts: float64 `[B]`, rows of each block.
        sums_BN: float64, sums of y - y' over them.
        square: sum of (y - y')^2 over all rows and channels.
        reference: sum of y^2.
    """

    counts: Tensor
    sums_BN: Tensor
    square: float
    reference: float


def errors_of(x: Tensor, w_NK: Tensor, rounded_NK: Tensor, bias_N: Tensor, written_N: Tensor, scheme: Scheme) -> Errors:
    """Errors on rows `[n, K]`, with activations rounded by `scheme`.

    Args:
        x, w_NK, rounded_NK: float32.
        bias_N: float64, of the float model.
        written_N: float64, the bias that the quantized GEMM has without a correction.
    """
    blocks = x.tensor_split(_BLOCKS)
    sums_BN = torch.zeros(_BLOCKS, len(w_NK), dtype=torch.float64, device=x.device)
    squares = torch.zeros(2, dtype=torch.float64, device=x.device)
    bias_N, written_N = bias_N.to(x.device), written_N.to(x.device)
    offset = bias_N - written_N
    for sum_N, block in zip(sums_BN, blocks, strict=True):
        for chunk in block.split(_CHUNK):
            exact = chunk @ w_NK.T
            error = (exact - round_tokens(chunk, scheme) @ rounded_NK.T).double().add_(offset)
            sum_N += error.sum(0)
            squares += torch.stack((error.square().sum(), exact.double().add_(bias_N).square().sum()))
    counts = torch.tensor([len(block) for block in blocks], dtype=torch.float64)
    square, reference = squares.tolist()
    return Errors(counts, sums_BN.cpu(), square, reference)


class Outcome(NamedTuple):
    """Of one GEMM: its new bias `[N]` in the dtype of the old one, None where it stays; relative errors before and
    after, the latter of blocks with the mean of the others."""

    bias: Tensor | None
    before: float
    after: float


_UNCHANGED = Outcome(None, 0.0, 0.0)


def correct(errors: Errors, written_N: Tensor, dtype: torch.dtype) -> Outcome:
    """The correction, if it holds on rows that it was not taken from.

    Args:
        errors: of the GEMM.
        written_N: float64, its bias without a correction, a number of `dtype`.
        dtype: of the bias.
    """

    def shifted(sum_N: Tensor, count: Tensor) -> Tensor:
        return (written_N + sum_N / count).to(dtype)

    total_N, rows = errors.sums_BN.sum(0), errors.counts.sum()
    gain = 0.0
    for sum_N, count in zip(errors.sums_BN, errors.counts, strict=True):
        change_N = shifted(total_N - sum_N, rows - count).double() - written_N
        gain += float(2 * sum_N @ change_N - count * (change_N @ change_N))  # sum of e^2 - (e - change)^2
    reference = errors.reference or 1.0
    before, after = (math.sqrt(max(0.0, square) / reference) for square in (errors.square, errors.square - gain))
    if not after < before:
        return Outcome(None, before, before)
    return Outcome(shifted(total_N, rows), before, after)


# ----------------------------------------------------------------------------------------------- layers


def search_layer(view: LayerView, options: BiasOptions) -> Found:
    """Corrected biases of one layer, for every scheme that their GEMMs may get."""
    keys = [key for key in view.weights if key in view.schemes]
    biased = {key: None for key in keys if has_bias(view.source, key)}
    tensors: dict[str, Tensor] = {}
    rows: list[MethodRow] = []
    found = view.map(lambda key: _correct_gemm(view, key, options), list(biased))
    for key, outcomes in zip(biased, found, strict=True):
        for scheme, (outcome, note) in outcomes.items():
            if outcome.bias is not None:
                tensors[bias_name(scheme, key.with_part("bias").shard_name)] = outcome.bias
            rows.append(_row(view.layer, key.shard_name.removesuffix(".weight"), note, outcome))
    without = Counter(key.role for key in keys if key not in biased)
    for role, count in without.items():
        rows.append(_row(view.layer, f"layers.{view.layer}.{role}", f"{NOTHING}no bias to correct", gemms=count))
    return Found(tensors, rows)


def _row(layer: int, name: str, note: str, outcome: Outcome = _UNCHANGED, gemms: int = 1) -> MethodRow:
    return MethodRow(
        method="bias", layer=layer, name=name, before=outcome.before, after=outcome.after, note=note, gemms=gemms
    )


def _correct_gemm(view: LayerView, key: Key, options: BiasOptions) -> dict[str, tuple[Outcome, str]]:
    """Scheme -> what was found, and what to say of it."""
    schemes = view.schemes[key]
    name = input_name(view.source.arch, key)
    x = view.rows[name].of(key.expert) if name in view.rows else torch.empty(0, 0)
    if len(x) < options.min_rows:
        note = f"{STARVED}{len(x)}, fewer than {options.min_rows}"
        return {schemes[0].name: (_UNCHANGED, note)}
    own = key.with_part("bias")
    bias_N, dtype = matrix(view.source, own).double(), _dtype(view.source, own)
    written_N = bias_N.to(dtype).double()
    weight, rounded = view.weight(key), view.rounded(key)
    found = {}
    for scheme in schemes:
        outcome = correct(errors_of(x, weight, rounded, bias_N, written_N, scheme), written_N, dtype)
        note = "left as it is: the error does not fall on rows that the mean is not of" if outcome.bias is None else ""
        about = "" if scheme is schemes[0] else f"as {scheme.name}"
        found[scheme.name] = outcome, ": ".join(filter(None, (about, note)))
    return found


def has_bias(source: Source, key: Key) -> bool:
    """Whether the GEMM of a weight has a bias."""
    return pieces_of(source, key.with_part("bias")) is not None


def _dtype(source: Source, bias: Key) -> torch.dtype:
    """In which a bias is written."""
    (piece,) = pieces_of(source, bias) or ()
    entry = source.entries[piece.key]
    return torch_dtype(entry.kept_dtype or entry.dtype)


# ------------------------------------------------------------------------------------ from and to the artifact


def places(source: Source, keys: Sequence[Key]) -> dict[str, int]:
    """How many of these GEMMs have a bias.

    Raises:
        UsageError: none has.
    """
    biases = sum(has_bias(source, key) for key in keys)
    if not biases:
        raise UsageError(
            f"no GEMM of {source.root} that the recipe quantizes has a bias, so the method bias has nothing to correct",
            "take it out of the recipe's methods; engines have no place for biases that a model does not have",
        )
    return {"biases": biases, "gemms_without_bias": len(keys) - biases}


def finish(records: Sequence[Path], out: Path) -> None:
    """All biases into the artifact."""
    from quantkit.calibrate.state import join_records

    join_records(out / BIASES_NAME, records)


def build_corrected(source: Source, artifact: Path, recipe: Recipe) -> Built:
    """The step that puts the biases of the artifact in their places, each for the scheme that its GEMM has now."""
    stored, files = read_header(artifact / BIASES_NAME).tensors, OpenFiles(artifact)

    def bias(_set: str, key: Key) -> Tensor | None:
        pieces = pieces_of(source, key.with_part("weight"))
        if pieces is None:
            return None
        weight = pieces[0].key
        scheme = recipe.scheme_for(source.arch, weight, source.entries[weight].name)
        info = stored.get(bias_name(scheme.name, key.shard_name))
        return None if info is None else files.read(BIASES_NAME, info)

    return Built((CorrectBias(),), bias)


METHOD = Method(
    BiasOptions,
    nothing,
    Learns(lambda options: options.tokens, lambda options: options.rows, search_layer, finish, places, weight_bytes=14),
    corrects=build_corrected,
)
