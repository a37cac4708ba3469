"""What is kept about the input of a GEMM: small, mergeable, summed in a fixed order.

Shape suffixes: T tokens (rows), R measured rows, K input channels, G groups of them, E experts (1 for an input that is
not per expert), B histogram bins, C kinds of text.

Absolute maxima are exact. Rounding errors, which only the report shows, are measured on part of the rows of a large
batch (`measured_rows`): all of them took a fifth of the time of the forward.

Errors and sums of squares are computed per row in float32 and added in float64, one row after the other within a batch
and then batch by batch, so a sum does not depend on how many batches ran side by side (`parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.arithmetic import rounding_error, scale_from_absmax
from quantkit.spec.scheme import group_size_for

BINS_PER_OCTAVE = 4
MIN_EXPONENT, MAX_EXPONENT = -16, 16
EDGES: NDArray[np.float64] = 2.0 ** (
    np.arange(MIN_EXPONENT * BINS_PER_OCTAVE, MAX_EXPONENT * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE
)
"""Edges of the histogram of per-token absolute maxima: bin i holds EDGES[i-1] <= x < EDGES[i]; the first and the last
bin are open, so it has len(EDGES) + 1 bins."""

STATS_BYTES = 8 * (len(EDGES) + 1 + 4)
"""Of an input of one expert, beside its channels: the histogram, tokens and sums of `InputStats`."""

OUTLIER_FACTOR = 6.0
"""A channel is an outlier when its absolute maximum exceeds this many times the median channel's. The factor is that
of the outlier definition in LLM.int8() (Dettmers et al. 2022, magnitude 6), taken relative to the median because the
scale of an activation is arbitrary."""

SPARSEST, LEAST_ROWS = 8, 128
"""Of the rows of a batch every 8th is measured, and more where that would be fewer than 128."""

LARGEST = 16
"""The largest 1/16 of the rows are all measured: a few tokens, such as the first of each text, hold most of the sum of
squares of some inputs (Sun et al. 2024, "Massive Activations in Large Language Models"), 88 % in 1 % of the rows in a
layer of SmolLM2. So its relative errors of one batch are within 3 % of those of all rows; every 4th row missed by 39 %.
"""

_CHUNK_ELEMENTS = 1 << 17  # 512 KiB of float32: a chunk and the scratch beside it stay in the cache
_ACCELERATOR_CHUNK_ELEMENTS = 1 << 25  # 128 MiB: there each operation has a price of its own


@dataclass(frozen=True)
class TokenStats:
    """Per row of one input `[T, K]`, float32 `[T]` each: absmax, sum x^2, sum (x - q(x))^2 per token and per group.

    All but absmax are 0 for a row that was not measured; a measured one stands for others too and counts for them, so
    that sums over rows are estimates of those over all.
    """

    absmax: NDArray[np.float32]
    square: NDArray[np.float32]
    token_error: NDArray[np.float32]
    group_error: NDArray[np.float32]

    def take(self, rows: NDArray[np.int64]) -> TokenStats:
        return TokenStats(self.absmax[rows], self.square[rows], self.token_error[rows], self.group_error[rows])


def token_stats(x_TK: Tensor) -> TokenStats:
    """Row statistics of `x_TK`, groups of `group_size_for(K)` channels; a non-finite row has a non-finite absmax."""
    return input_stats(x_TK)[0]


def input_stats(x_TK: Tensor) -> tuple[TokenStats, Tensor]:
    """`token_stats` and the largest magnitude of every channel, float32 `[K]`, NaN where it holds one."""
    tokens, k = x_TK.shape
    chunk = max(1, (_CHUNK_ELEMENTS if x_TK.device.type == "cpu" else _ACCELERATOR_CHUNK_ELEMENTS) // k)
    absmax_T, absmax_K = _extremes(x_TK, chunk)
    absmax = absmax_T.float().cpu().numpy()
    rows, stands_for = measured_rows(absmax)
    pieces = torch.from_numpy(rows).to(x_TK.device).split(chunk)
    squares_3R = torch.cat([_squares(x_TK.index_select(0, piece).float(), group_size_for(k)) for piece in pieces], 1)
    found_3T = np.zeros((3, tokens), np.float32)
    found_3T[:, rows] = squares_3R.cpu().numpy() * stands_for
    return TokenStats(absmax, *found_3T), absmax_K.float()


def _extremes(x_TK: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of rows `[T]` and of channels `[K]`, in x's dtype.

    Magnitudes are written into the same scratch of `chunk` rows: new memory costs more than the operation.
    """
    tokens, k = x_TK.shape
    scratch_TK = x_TK.new_empty(min(chunk, tokens), k)
    absmax_T, channels = x_TK.new_empty(tokens), []
    for x, absmax in zip(x_TK.split(chunk), absmax_T.split(chunk), strict=True):
        magnitude = torch.abs(x, out=scratch_TK[: len(x)])
        channels.append(magnitude.amax(0) if tokens else x_TK.new_zeros(k))
        torch.amax(magnitude, 1, out=absmax)
    return absmax_T, channels[0] if len(channels) == 1 else torch.stack(channels).amax(0)


def measured_rows(absmax: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows whose errors are measured, and how many rows each of them stands for, `[R]` each.

    All rows of few; of many the largest, and of the others, in the order of their size, every n-th.
    """
    tokens = len(absmax)
    step = max(1, min(SPARSEST, tokens // LEAST_ROWS))
    if step == 1:
        return np.arange(tokens), np.ones(tokens, np.float32)
    order, largest = np.argsort(-absmax, kind="stable"), tokens // LARGEST
    rows = np.concatenate((order[:largest], order[largest + step // 2 :: step]))
    stands_for = np.full(len(rows), step, np.float32)
    stands_for[:largest] = 1
    return rows, stands_for


def _squares(x_RK: Tensor, group: int) -> Tensor:
    """Sums of squares of rows, of their errors under one scale per token, and per token and group -> `[3, R]`."""
    x_RGK = x_RK.unflatten(1, (-1, group))
    absmax_RG = x_RGK.abs().amax(2)
    absmax_2RG = torch.stack((absmax_RG.amax(1, keepdim=True).expand_as(absmax_RG), absmax_RG))
    found_3RGK = x_RGK.new_empty(3, *x_RGK.shape)  # one tensor: on an accelerator each operation has a price of its own
    found_3RGK[0] = x_RGK
    rounding_error(x_RGK, scale_from_absmax(absmax_2RG).unsqueeze(3), out=found_3RGK[1:])
    squares: Tensor = torch.linalg.vector_norm(found_3RGK.flatten(2), dim=2).square_()
    return squares


def channel_absmax(x: Tensor, dim: int = 0) -> Tensor:
    """Largest magnitude along `dim`, float32; NaN where the slice holds one."""
    # two vectorized passes: aminmax and the infinity norm are not vectorized on CPUs and 5 to 9 times slower
    return torch.maximum(x.amax(dim), -x.amin(dim)).float()


@dataclass
class BatchStats:
    """Statistics of one GEMM input over rows of one kind of text, the first dimension by expert.

    Attributes:
        absmax: float32 `[E, K]`, largest magnitude per channel, 0 for an expert without rows.
        tokens: int64 `[E]`, rows that entered.
        histogram: int64 `[E, B]`, per-token absolute maxima, bins of `EDGES`.
        square, token_error, group_error: float64 `[E]`, sums of x^2 and of (x - q(x))^2 with one scale per token, and
            per token and group of `group_size_for(K)` channels, from the measured rows.
    """

    absmax: Tensor
    tokens: NDArray[np.int64]
    histogram: NDArray[np.int64]
    square: NDArray[np.float64]
    token_error: NDArray[np.float64]
    group_error: NDArray[np.float64]

    @classmethod
    def of(cls, absmax_EK: Tensor, rows: TokenStats, expert_of: NDArray[np.int64] | None = None) -> BatchStats:
        """Statistics of rows.

        Args:
            absmax_EK: float32, of each expert's rows.
            rows: their statistics.
            expert_of: int64 `[T]`, expert of each row; None: all rows belong to row 0.
        """
        experts, width = len(absmax_EK), len(EDGES) + 1
        owner = np.zeros(len(rows.absmax), np.int64) if expert_of is None else expert_of
        bins = np.searchsorted(EDGES, rows.absmax, side="right")
        return BatchStats(
            absmax=absmax_EK,
            tokens=np.bincount(owner, minlength=experts),
            histogram=np.bincount(owner * width + bins, minlength=experts * width).reshape(experts, width),
            **{name: np.bincount(owner, getattr(rows, name), experts).astype(np.float64) for name in _SUMS},
        )

    def merge(self, other: BatchStats) -> None:
        """Add other rows of the same experts."""
        self.absmax = torch.maximum(self.absmax, other.absmax)
        for name in _ARRAYS:
            mine = getattr(self, name)
            mine += getattr(other, name)

    def add_rows(self, expert: int, absmax_K: Tensor, rows: TokenStats) -> None:
        """Add rows to one expert."""
        one = BatchStats.of(absmax_K.unsqueeze(0), rows)
        self.absmax[expert] = torch.maximum(self.absmax[expert], absmax_K)
        for name in _ARRAYS:
            getattr(self, name)[expert] += getattr(one, name)[0]


@dataclass
class InputStats(BatchStats):
    """Statistics of one GEMM input over all tokens seen.

    Attributes:
        absmax_by_kind: float32 `[C, K]`, largest magnitude per channel by kind of text, over all experts.
    """

    absmax_by_kind: Tensor

    @property
    def group_size(self) -> int:
        """Channels that share a scale in `group_error`."""
        return group_size_for(self.absmax.shape[1])

    @classmethod
    def empty(cls, experts: int, k: int, kinds: int, device: torch.device) -> InputStats:
        return cls(
            absmax=torch.zeros(experts, k, device=device),
            tokens=np.zeros(experts, np.int64),
            histogram=np.zeros((experts, len(EDGES) + 1), np.int64),
            square=np.zeros(experts),
            token_error=np.zeros(experts),
            group_error=np.zeros(experts),
            absmax_by_kind=torch.zeros(kinds, k, device=device),
        )

    def add(self, batch: BatchStats, kind: int) -> None:
        """Add rows of one kind of text, by its index."""
        self.merge(batch)
        seen_K = self.absmax_by_kind[kind]
        torch.maximum(seen_K, batch.absmax[0] if len(batch.absmax) == 1 else batch.absmax.amax(0), out=seen_K)

    def over_experts(self) -> InputStats:
        """One row for all experts together: what an expert without tokens falls back to."""
        return InputStats(
            absmax=self.absmax.amax(0, keepdim=True),
            **{name: getattr(self, name).sum(0, keepdims=True) for name in _ARRAYS},
            absmax_by_kind=self.absmax_by_kind,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything as CPU tensors by field name, for `activations.safetensors`."""
        arrays = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        return {"absmax": self.absmax.cpu(), "absmax_by_kind": self.absmax_by_kind.cpu(), **arrays}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> InputStats:
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        return cls(absmax=tensors["absmax"], absmax_by_kind=tensors["absmax_by_kind"], **arrays)

    def is_measured(self, row: int) -> bool:
        """Whether errors of an expert are known: some of its rows were measured, or all are zero."""
        return bool(self.square[row] > 0) or not bool(self.absmax[row].any())

    def token_relative(self, row: int) -> float:
        """||x - q(x)|| / ||x|| with one scale per token; 0 for an input that is all zero."""
        return _relative(self.token_error[row], self.square[row])

    def group_relative(self, row: int) -> float:
        """The same with one scale per token and group."""
        return _relative(self.group_error[row], self.square[row])

    def outlier_channels(self, row: int) -> NDArray[np.int64]:
        """Indices of outlier channels (see `OUTLIER_FACTOR`)."""
        channels = self.absmax[row].cpu().numpy().astype(np.float64)
        return np.flatnonzero(channels > OUTLIER_FACTOR * np.median(channels))


_SUMS = ("square", "token_error", "group_error")
_ARRAYS = ("tokens", "histogram", *_SUMS)


def _relative(error: float, square: float) -> float:
    return float(np.sqrt(error / square)) if square > 0 else 0.0


def clipping_shares(by_kind: Iterable[Tensor]) -> NDArray[np.float64]:
    """Share of channels where one kind of text exceeds the range seen on another.

    Args:
        by_kind: `absmax_by_kind` `[C, K]` of each input to pool.

    Returns:
        float64 `[C, C]`: row a, column b: share of channels whose absolute maximum on kind b exceeds that on kind a.
    """
    exceeded: NDArray[np.float64] | None = None
    channels = 0
    for absmax_CK in by_kind:
        over = (absmax_CK[None, :, :] > absmax_CK[:, None, :]).sum(-1).numpy().astype(np.float64)
        exceeded = over if exceeded is None else exceeded + over
        channels += absmax_CK.shape[1]
    if exceeded is None:
        return np.zeros((0, 0))
    return exceeded / channels
