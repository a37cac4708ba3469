"""Limits of a comparison: the shipped ones (`limits.yaml`), single values replaced by a file of the user's.

Why the limits of one layer differ between the two sections. bf16 arithmetic changes what a layer adds to the hidden
states by 0.2 to 0.5 percent: 1e-2 with room, and a cosine of 0.999. INT8 rounds weights and inputs of every GEMM by
about one percent each (absmax / rms of 3 to 5, over 127 sqrt(12)), more where channels stand out. Measured on good
conversions of 26 families and two trained mixtures: 1 to 4 percent a layer, at most 7 percent an operator, 4
percent an expert, 1.1 percent a weight, cosines above 0.9997; of SmolLM2-135M, small and full of outliers: 9 percent a
layer, 21 percent an operator (averages over values that cancel), 1.2 percent a weight, cosines above 0.9991. The limits
are about twice the worst of these. Real faults (a scale off by two, a swapped pair, permuted rows) are at 50 to 140
percent of what they touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from quantkit.errors import UsageError
from quantkit.spec.document import Strict, problems_of, read_yaml

Kind = Literal["int8", "float"]


class Limits(Strict):
    """What must hold. Distributions are those on the texts, over all kinds and for each kind alone.

    Attributes:
        kl_mean, kl_p99: most nats of KL(source || candidate), mean and 99th percentile.
        cosine_mean: least mean cosine of the distributions.
        perplexity_ratio: largest perplexity of the candidate over the source's, less two standard errors of it.
        decided_margin: nats by which the source prefers its likeliest token to the next one for a position to count as
            decided; elsewhere the likeliest token is a coin toss.
        decided_agreement: least share of decided positions where both have the same likeliest token, on texts and on
            greedy continuations, plus two standard errors of it.
        routing_agreement: least share of the source's choices of experts that the candidate makes too, in any layer.
        needle_loss: most nats a token that the candidate loses on the answer for a fact in a long text.
        layer_cosine: least mean cosine of what a layer returns for the same input.
        layer_error: largest ||difference|| / ||what the layer adds||, root mean square over tokens.
        operator_error: the same for a single operator inside a layer.
        expert_error: the same for an expert alone.
        weight_error: largest ||difference|| / ||weight||.
        head_kl: most nats of KL where final norm and head get the source's hidden states, mean.
    """

    kl_mean: float = Field(gt=0)
    kl_p99: float = Field(gt=0)
    cosine_mean: float = Field(gt=0, le=1)
    perplexity_ratio: float = Field(ge=1)
    decided_margin: float = Field(ge=0)
    decided_agreement: float = Field(ge=0, le=1)
    routing_agreement: float = Field(ge=0, le=1)
    needle_loss: float = Field(gt=0)
    layer_cosine: float = Field(gt=0, le=1)
    layer_error: float = Field(gt=0)
    operator_error: float = Field(gt=0)
    expert_error: float = Field(gt=0)
    weight_error: float = Field(gt=0)
    head_kl: float = Field(gt=0)


class _Sections(Strict):
    int8: dict[str, Any] = Field(default_factory=dict)
    float: dict[str, Any] = Field(default_factory=dict)


def load_limits(kind: Kind, path: Path | None = None) -> Limits:
    """Limits for a candidate of this kind.

    Args:
        path: YAML with the sections of the shipped file; what it leaves out stays.

    Raises:
        UsageError: unreadable, no YAML, or keys and values that the models refuse (all listed), in either section.
    """
    file = resources.files("quantkit.compare") / "limits.yaml"
    shipped = read_yaml(file, "the shipped limits", "an installation that is whole")
    own = _own(path) if path is not None else _Sections()
    sections = {name: _checked({**shipped[name], **getattr(own, name)}, path, name) for name in shipped}
    return sections[kind]


def _own(path: Path) -> _Sections:
    try:
        return _Sections.model_validate(read_yaml(path, f"limits {path}", "a readable YAML file") or {})
    except ValidationError as error:
        raise _refused(error, path) from error


def _checked(values: Mapping[str, Any], path: Path | None, section: str) -> Limits:
    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        raise _refused(error, path, section) from error


def _refused(error: ValidationError, path: Path | None, section: str = "") -> UsageError:
    """Of a section: its keys are the choices. Of the whole file: its sections are."""
    lead = f"{section}." if section else ""
    return UsageError(
        f"limits {path}: {error.error_count()} problems",
        "correct the file, a mapping as `int8: {kl_mean: 0.2}`; quantkit/compare/limits.yaml is the shipped one",
        items=[f"{lead}{problem}" for problem in problems_of(error)],
        choices=sorted((Limits if section else _Sections).model_fields),
    )
