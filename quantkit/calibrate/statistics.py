"""What is kept about the input of a GEMM: small, mergeable, summed in a fixed order.

Shape suffixes: T tokens (rows), K input channels, E experts (1 for an input that is not per expert), B histogram bins,
C kinds of text.

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

_CHUNK_ELEMENTS = 1 << 17  # 512 KiB of float32: a chunk and the scratch beside it stay in the cache
_ACCELERATOR_CHUNK_ELEMENTS = 1 << 25  # 128 MiB: there each operation has a price of its own


@dataclass(frozen=True)
class TokenStats:
    """Per row of one input `[T, K]`, float32 `[T]` each: absmax, sum x^2, sum (x - q(x))^2 per token and per group."""

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
    """`token_stats` and the largest magnitude of every channel, float32 `[K]`, NaN where it holds one, in one pass.

    Everything that is computed for each value is written into the same scratch of one chunk: new memory for each
    operation costs more than the operation.
    """
    tokens, k = x_TK.shape
    rows = max(1, (_CHUNK_ELEMENTS if x_TK.device.type == "cpu" else _ACCELERATOR_CHUNK_ELEMENTS) // k)
    scratch_TK = torch.empty(min(rows, tokens), k, device=x_TK.device)
    found_4T = torch.empty(4, tokens, device=x_TK.device)
    channels = []
    for start in range(0, tokens, rows):
        chunk_TK = x_TK[start : start + rows].float()
        found = found_4T[:, start : start + rows]
        channels.append(_chunk_stats(chunk_TK, scratch_TK[: len(chunk_TK)], found, group_size_for(k)))
    absmax_K = torch.stack(channels).amax(0) if channels else torch.zeros(k, device=x_TK.device)
    return TokenStats(*found_4T.cpu().numpy()), absmax_K  # one transfer


def _chunk_stats(x_TK: Tensor, scratch_TK: Tensor, found_4T: Tensor, group: int) -> Tensor:
    """Fill in the `TokenStats` of a chunk -> its largest magnitude of every channel `[K]`."""
    absmax, square, token_error, group_error = found_4T
    x_TGK, scratch_TGK = x_TK.unflatten(1, (-1, group)), scratch_TK.unflatten(1, (-1, group))
    torch.abs(x_TK, out=scratch_TK)
    absmax_K, absmax_TG = scratch_TK.amax(0), scratch_TGK.amax(2)
    torch.amax(absmax_TG, 1, out=absmax)
    _row_squares(x_TK, square)
    rounding_error(x_TK, scale_from_absmax(absmax).unsqueeze(1), out=scratch_TK)
    _row_squares(scratch_TK, token_error)
    if group == x_TK.shape[1]:
        group_error.copy_(token_error)
    else:
        rounding_error(x_TGK, scale_from_absmax(absmax_TG).unsqueeze(2), out=scratch_TGK)
        _row_squares(scratch_TK, group_error)
    return absmax_K


def _row_squares(x_TK: Tensor, out: Tensor) -> None:
    torch.linalg.vector_norm(x_TK, dim=-1, out=out).square_()


def channel_absmax(x: Tensor, dim: int = 0) -> Tensor:
    """Largest magnitude along `dim`, float32; NaN where the slice holds one."""
    # two vectorized passes: aminmax and the infinity norm are not vectorized on CPUs and 5 to 9 times slower
    return torch.maximum(x.amax(dim), -x.amin(dim)).float()


@dataclass
class InputStats:
    """Statistics of one GEMM input over all tokens seen, the first dimension by expert.

    Attributes:
        absmax: float32 `[E, K]`, largest magnitude per channel.
        absmax_by_kind: float32 `[C, K]`, the same by kind of text, over all experts.
        tokens: int64 `[E]`, rows that entered.
        histogram: int64 `[E, B]`, per-token absolute maxima, bins of `EDGES`.
        square, token_error, group_error: float64 `[E]`, sums of x^2 and of (x - q(x))^2 with one scale per token, and
            per token and group of `group_size_for(K)` channels.
    """

    absmax: Tensor
    absmax_by_kind: Tensor
    tokens: NDArray[np.int64]
    histogram: NDArray[np.int64]
    square: NDArray[np.float64]
    token_error: NDArray[np.float64]
    group_error: NDArray[np.float64]

    @property
    def group_size(self) -> int:
        """Channels that share a scale in `group_error`."""
        return group_size_for(self.absmax.shape[1])

    @classmethod
    def empty(cls, experts: int, k: int, kinds: int, device: torch.device) -> InputStats:
        return cls(
            absmax=torch.zeros(experts, k, device=device),
            absmax_by_kind=torch.zeros(kinds, k, device=device),
            tokens=np.zeros(experts, np.int64),
            histogram=np.zeros((experts, len(EDGES) + 1), np.int64),
            square=np.zeros(experts),
            token_error=np.zeros(experts),
            group_error=np.zeros(experts),
        )

    def add(self, absmax_EK: Tensor, kind: int, tokens: TokenStats, expert_of: NDArray[np.int64] | None = None) -> None:
        """Add rows of one kind of text.

        Args:
            absmax_EK: largest magnitude per channel of each expert's rows, 0 where it has none.
            kind: index of the kind of text.
            tokens: row statistics.
            expert_of: int64 `[T]`, expert of each row; None: all rows belong to row 0.
        """
        experts = len(self.tokens)
        owner = np.zeros(len(tokens.absmax), np.int64) if expert_of is None else expert_of
        bins = np.searchsorted(EDGES, tokens.absmax, side="right")
        self.absmax = torch.maximum(self.absmax, absmax_EK)
        self.absmax_by_kind[kind] = torch.maximum(self.absmax_by_kind[kind], absmax_EK.amax(0))
        self.tokens += np.bincount(owner, minlength=experts)
        width = len(EDGES) + 1
        self.histogram += np.bincount(owner * width + bins, minlength=experts * width).reshape(experts, width)
        self.square += np.bincount(owner, tokens.square, experts)
        self.token_error += np.bincount(owner, tokens.token_error, experts)
        self.group_error += np.bincount(owner, tokens.group_error, experts)

    def add_unrouted(self, row: int, absmax_K: Tensor, tokens: TokenStats) -> None:
        """Add rows to one expert that its router did not send there, of no kind of text in particular."""
        self.absmax[row] = torch.maximum(self.absmax[row], absmax_K)
        self.tokens[row] += len(tokens.absmax)
        bins = np.searchsorted(EDGES, tokens.absmax, side="right")
        self.histogram[row] += np.bincount(bins, minlength=len(EDGES) + 1)
        self.square[row] += tokens.square.sum(dtype=np.float64)
        self.token_error[row] += tokens.token_error.sum(dtype=np.float64)
        self.group_error[row] += tokens.group_error.sum(dtype=np.float64)

    def merge(self, other: InputStats) -> InputStats:
        """Statistics of both sets of tokens."""
        return InputStats(
            torch.maximum(self.absmax, other.absmax),
            torch.maximum(self.absmax_by_kind, other.absmax_by_kind),
            self.tokens + other.tokens,
            self.histogram + other.histogram,
            self.square + other.square,
            self.token_error + other.token_error,
            self.group_error + other.group_error,
        )

    def over_experts(self) -> InputStats:
        """One row for all experts together: what an expert without tokens falls back to."""
        return InputStats(
            self.absmax.amax(0, keepdim=True),
            self.absmax_by_kind,
            self.tokens.sum(keepdims=True),
            self.histogram.sum(0, keepdims=True),
            self.square.sum(keepdims=True),
            self.token_error.sum(keepdims=True),
            self.group_error.sum(keepdims=True),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything as CPU tensors by field name, for `activations.safetensors`."""
        arrays = {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}
        return {"absmax": self.absmax.cpu(), "absmax_by_kind": self.absmax_by_kind.cpu(), **arrays}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> InputStats:
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        return cls(absmax=tensors["absmax"], absmax_by_kind=tensors["absmax_by_kind"], **arrays)

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


_ARRAYS = ("tokens", "histogram", "square", "token_error", "group_error")


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
