"""What calibration decided and what it measured on held-out text; fields of `calibration.json`."""

from __future__ import annotations

from pydantic import Field

from quantkit.spec.document import Strict

ByKind = dict[str, float]
"""Kind of text -> value."""


class HeldOut(Strict):
    """The model as it is and as it will be, side by side on text that no statistic saw.

    Quantized streams are named "checkpoint" and "sharded" after the form of output whose exceptions they have, or
    "all": every GEMM that the recipe converts, without exceptions. "bf16" is the source itself with what enters and
    leaves its GEMMs, norms and layers rounded to BF16: what engines at least lose when they run it, and so
    the yardstick.

    Attributes:
        samples, tokens: of the text.
        positions: tokens whose predictions were compared, by kind of text.
        kl: stream -> kind -> mean of KL(source || quantized) over the vocabulary, nats per token.
        kl_error: the same -> standard error of that mean over samples; 0 for a single sample.
        kl_by_position: stream -> first position of a bucket in the sample -> mean of the same, over all kinds.
        perplexity_source: kind -> perplexity of the source at those positions that have a next token.
        perplexity: stream -> kind -> that of the quantized model.
        top1: the same -> share of positions with the same likeliest token.
        layer_error: stream -> for each layer, mean over tokens of ||h - h'||^2 / ||h||^2 of what leaves it.
        routing: stream -> layer -> share of the source's choices of experts that the quantized model makes as well.
    """

    samples: int
    tokens: int
    positions: dict[str, int]
    kl: dict[str, ByKind]
    kl_error: dict[str, ByKind]
    kl_by_position: dict[str, dict[int, float]]
    perplexity_source: ByKind
    perplexity: dict[str, ByKind]
    top1: dict[str, ByKind]
    layer_error: dict[str, tuple[float, ...]]
    routing: dict[str, dict[int, float]]


class GroupError(Strict):
    """What one group of GEMMs costs alone: GEMMs that engines run as one share their scheme.

    Attributes:
        group: name, `layers.3.attn.qkv`, `layers.3.expert.down`, `layers.3.experts`.
        layer: decoder layer.
        roles: of its GEMMs.
        weights: their number, over all experts.
        errors: scheme -> kind -> mean over tokens of the relative squared error that the group, quantized alone, adds
            to what leaves its layer.
        share: scheme -> kind -> share of the model's predicted KL divergence.
    """

    group: str
    layer: int
    roles: tuple[str, ...]
    weights: int
    errors: dict[str, ByKind]
    share: dict[str, ByKind]


class Decision(Strict):
    """One exception.

    Attributes:
        group, layer, roles, weights: those of its `GroupError`.
        scheme: what it gets.
        reason: a sentence with the figures.
    """

    group: str
    layer: int
    roles: tuple[str, ...]
    weights: int
    scheme: str
    reason: str


class FormDecisions(Strict):
    """Exceptions of one form of output.

    Attributes:
        exceptions: in the order of the layers.
        budget: KL divergence that no kind of text may exceed.
        predicted_kl: kind -> KL divergence with them.
        measured_kl: kind -> the same, measured.
        kept_share: share of the weights to convert that stay in the source's dtype.
        within_budget: whether the measured KL divergence is within the budget on every kind.
    """

    exceptions: tuple[Decision, ...]
    budget: float
    predicted_kl: ByKind
    measured_kl: ByKind = Field(default_factory=dict)
    kept_share: float
    within_budget: bool


class Decisions(Strict):
    """All that was decided.

    Attributes:
        measured_kl: kind -> KL divergence without exceptions, weights rounded to nearest.
        exponent: of the predicted KL divergence over the share of the error that remains; 1 where nothing is routed.
        groups: every group that a decision could be about, in the order of the layers.
        forms: "checkpoint", "sharded" -> its exceptions.
    """

    measured_kl: ByKind
    exponent: float
    groups: tuple[GroupError, ...]
    forms: dict[str, FormDecisions]
