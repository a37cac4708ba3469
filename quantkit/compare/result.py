"""The outcome of a comparison: `comparison.json`, from which the report is rendered."""

from __future__ import annotations

from typing import Literal

from quantkit.spec.document import Strict


class Check(Strict):
    """One limit.

    Attributes:
        name: field of `Limits`, or "companions", "decoding" and "embeddings".
        value: worst that was found; None where there was nothing to measure.
        limit: what it is held against.
        passed: whether it keeps to it.
        where: kind of text, prompt, or layer and operator of the worst value.
    """

    name: str
    value: float | None
    limit: float
    passed: bool
    where: str = ""


class Distribution(Strict):
    """Next-token distributions on some positions; `kind` "" means all kinds. Fields as `distributions.summary`."""

    kind: str
    start: int
    stop: int
    tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    cosine_mean: float
    cosine_min: float
    top1_agreement: float
    source_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float


class Divergence(Strict):
    """The first token of a continuation where the candidate prefers another one.

    Attributes:
        step: index in the continuation.
        source, candidate: the tokens as text; `source_id`, `candidate_id` their ids.
        source_margin, candidate_margin: nats by which each prefers its token to its next one.
        decided: the source's margin makes it more than a coin toss.
    """

    step: int
    source: str
    candidate: str
    source_id: int
    candidate_id: int
    source_margin: float
    candidate_margin: float
    decided: bool


class Greedy(Strict):
    """One continued prompt.

    Attributes:
        prompt: name.
        kind: of text.
        tokens: of the continuation.
        agreed: steps where both have the same likeliest token, given the source's tokens before it.
        decoded: tokens that the candidate's own decoding with a cache has in common with the source's from the start.
        departs: the decoding parts from what its own forward over the whole text prefers, by a margin that decides.
        first: where source and candidate part, None when they do not.
        text: the source's continuation.
    """

    prompt: str
    kind: str
    tokens: int
    agreed: int
    decoded: int
    departs: bool
    first: Divergence | None
    text: str


class Needle(Strict):
    """The answer for a fact in a long text, log-probability per token.

    Attributes:
        name: where the fact stands, "nowhere" without one.
        distance: tokens between the two places of the answer, 0 without a fact.
        source, candidate: nats per token.
    """

    name: str
    distance: int
    source: float
    candidate: float


class Operator(Strict):
    """One module of a layer: relative error of what enters ("in") or leaves it ("out"), source's input to the layer."""

    name: str
    end: Literal["in", "out"]
    error: float
    bad: bool


class Layer(Strict):
    """One decoder layer.

    Attributes:
        cosine: mean over tokens, of what it returns on the source's input.
        error, error_max: ||difference|| / ||what the layer adds|| over tokens, root mean square and largest.
        own_error: ||difference|| / ||hidden state|| on the candidate's own input, root mean square.
        long_error: the same at sampled positions of the long text, 75th percentile; None without one.
        routing: share of the source's choices of experts on the texts that the candidate makes too; None without.
        flips: tokens of the probe that were sent to other experts; they are left out of `error` and `cosine`.
        bad: something in it is beyond its limit.
    """

    layer: int
    cosine: float
    error: float
    error_max: float
    own_error: float
    long_error: float | None
    routing: float | None
    flips: int
    bad: bool


class Finding(Strict):
    """Something beyond its limit, located.

    Attributes:
        layer: decoder layer, None outside.
        operator: role or module.
        expert: routed expert, None for others.
        what: "weight", "expert", "operator", "before", "routing", "ties", "long", "layer", "head", "embedding".
        error: relative error, or share of other choices.
        why: of a weight, see `fingerprint.Explanation`; "all" of experts: every one of them, so no single weight.
        detail: data for the sentence: that of the explanation, the operator before, the number of ties.
    """

    layer: int | None
    operator: str
    expert: int | None = None
    what: Literal["weight", "expert", "operator", "before", "routing", "ties", "long", "layer", "head", "embedding"]
    error: float
    why: Literal["", "factor", "other", "rows", "offset", "all"] = ""
    detail: str = ""


class Difference(Strict):
    """Something beside the weights that is not the source's.

    Attributes:
        what: "config", "tokenizer", "no_tokenizer", "template", "no_template" or "stop_tokens".
        name: key of the config.
        source, candidate: both values as text.
    """

    what: Literal["config", "tokenizer", "no_tokenizer", "template", "no_template", "stop_tokens"]
    name: str = ""
    source: str = ""
    candidate: str = ""


class Comparison(Strict):
    """All of `comparison.json`.

    Attributes:
        format_version: of this model.
        tool_version: quantkit's.
        passed: every check passed.
        model_type, source_digest: of the baseline.
        candidate: facts: form, scheme, dtype, device, transforms.
        companions: differences beside the weights.
        checks: limits, in their order.
        kinds, positions: distributions by kind of text and by range of positions.
        greedy, needles, layers: as their names say.
        first_bad_layer: None when there is none.
        operators: of that layer, in the order in which they run.
        findings: what is wrong, first layer first.
        notes: what was not compared, and why.
    """

    format_version: Literal[1] = 1
    tool_version: str
    passed: bool
    model_type: str
    source_digest: str
    candidate: dict[str, str]
    companions: tuple[Difference, ...]
    checks: tuple[Check, ...]
    kinds: tuple[Distribution, ...]
    positions: tuple[Distribution, ...]
    greedy: tuple[Greedy, ...]
    needles: tuple[Needle, ...]
    layers: tuple[Layer, ...]
    first_bad_layer: int | None
    operators: tuple[Operator, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
