"""Two next-token distributions at the same positions, the source's known by its likeliest tokens and the rest's mass.

With k tokens kept, KL is taken over k + 1 outcomes, the last being "any other token". That is a lower bound of the KL
over the vocabulary (data-processing inequality), and equal to it when all tokens are kept. The cosine is taken over the
same outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORST = 1e30
"""What stands for infinity and not-a-number, which JSON cannot say."""

WORST_LOGPROB = -700.0
"""The same for a log-probability: `exp` of its negative is still a number."""


@dataclass(frozen=True)
class Kept:
    """Rows of `logprobs.safetensors`: P positions, k tokens.

    Attributes:
        top_ids: int32 `[P, k]`, likeliest first.
        top_logprobs: float32 `[P, k]`.
        rest_logprob: float32 `[P]`; minus infinity when every token is kept.
        next_logprob: float32 `[P]` of the token that follows.
    """

    top_ids: Tensor
    top_logprobs: Tensor
    rest_logprob: Tensor
    next_logprob: Tensor

    def rows(self, start: int, stop: int) -> Kept:
        return Kept(*(getattr(self, name)[start:stop] for name in FIELDS))

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).contiguous() for name in FIELDS}

    @property
    def margin(self) -> Tensor:
        """Nats between the likeliest token and the next one, `[P]`."""
        return self.top_logprobs[:, 0] - self.top_logprobs[:, 1]


FIELDS = ("top_ids", "top_logprobs", "rest_logprob", "next_logprob")


def keep(logprobs: Tensor, following: Tensor, k: int) -> Kept:
    """The k likeliest tokens and the rest of log-probabilities `[P, V]`; ties go to the lower id.

    Args:
        following: int64 `[P]`, the tokens that follow.
    """
    ids = torch.sort(logprobs, dim=-1, descending=True, stable=True).indices[:, :k]
    return _gather(logprobs, ids, following)


def at_same_tokens(logprobs: Tensor, kept: Kept, following: Tensor) -> Kept:
    """A candidate's log-probabilities `[P, V]` at the tokens that are kept of the source."""
    return _gather(logprobs, kept.top_ids.long(), following)


def _gather(logprobs: Tensor, ids: Tensor, following: Tensor) -> Kept:
    rest = logprobs.scatter(-1, ids, -math.inf).logsumexp(-1)
    return Kept(
        ids.to(torch.int32), logprobs.gather(-1, ids), rest, logprobs.gather(-1, following[:, None]).squeeze(-1)
    )


def join(parts: list[Kept]) -> Kept:
    return Kept(*(torch.cat([getattr(part, name) for part in parts]) for name in FIELDS))


def divergence(source: Kept, candidate: Kept) -> Tensor:
    """KL(source || candidate) in nats over the kept tokens and the rest, float64 `[P]`."""
    log_p, log_q = _outcomes(source), _outcomes(candidate)
    terms = torch.where(torch.isneginf(log_p), 0.0, log_p.exp() * (log_p - log_q))
    return torch.nan_to_num(terms.sum(-1), nan=WORST, posinf=WORST).clamp(min=0)


def full_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats over the whole vocabulary, `[P]`, from log-probabilities `[P, V]`."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def cosine(source: Kept, candidate: Kept) -> Tensor:
    """Cosine of the two distributions over the kept tokens and the rest, float64 `[P]`."""
    found = torch.nn.functional.cosine_similarity(_outcomes(source).exp(), _outcomes(candidate).exp(), dim=-1)
    return torch.nan_to_num(found, nan=0.0)


def of_next(kept: Kept) -> Tensor:
    """Log-probabilities of the tokens that follow, float64 `[P]`, all of them numbers."""
    return torch.nan_to_num(kept.next_logprob.double(), nan=WORST_LOGPROB, neginf=WORST_LOGPROB)


def _outcomes(kept: Kept) -> Tensor:
    return torch.cat((kept.top_logprobs, kept.rest_logprob[:, None]), -1).double()


# ------------------------------------------------------------------------------------------------ summaries


def edges(limits: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Bounds of position buckets: powers of four from 64 on, and the model's own limits, below `longest`."""
    powers = (4**exponent for exponent in range(3, 16))
    inner = sorted({edge for edge in (*powers, *limits, *(2 * limit for limit in limits)) if 0 < edge < longest})
    return (0, *inner, longest)


def summary(kl: Tensor, cos: Tensor, same: Tensor, source_nll: Tensor, candidate_nll: Tensor) -> dict[str, Any]:
    """Figures of some positions, float64 `[P]` each; `same`: both have the same likeliest token."""
    change = candidate_nll - source_nll
    ratio = perplexity(change)
    return {
        "tokens": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(torch.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "cosine_mean": float(cos.mean()),
        "cosine_min": float(cos.min()),
        "top1_agreement": float(same.double().mean()),
        "source_perplexity": perplexity(source_nll),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": ratio * standard_error(change),
    }


def perplexity(nll: Tensor) -> float:
    """exp of the mean of negative log-likelihoods, or of differences of them; no more than `exp(-WORST_LOGPROB)`."""
    return math.exp(min(float(nll.mean()), -WORST_LOGPROB))


def standard_error(values: Tensor) -> float:
    """Standard error of the mean of values `[N]`; 0 for a single one."""
    return float(values.double().std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
