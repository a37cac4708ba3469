"""A candidate held against a baseline, from its first token to its last operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.archs.modeling import decoder_layers
from quantkit.archs.roles import Kind
from quantkit.compare.answers import by_kind, by_position, greedy_row, needle_rows, positions
from quantkit.compare.bisect import LayerComparison, LayerReport, per_token, rms
from quantkit.compare.candidate import Answer, Layers, LayerSeen, Measurement, Subject, read_layers
from quantkit.compare.distributions import Kept, divergence
from quantkit.compare.fingerprint import Explanation, explain, relative_error
from quantkit.compare.limits import Limits
from quantkit.compare.result import Comparison, Difference, Finding, Greedy
from quantkit.compare.verdict import checks, number
from quantkit.errors import InputError
from quantkit.spec.baseline import Baseline, read_outside, read_rows
from quantkit.spec.baseline import Sequence as Tokens
from quantkit.spec.baseline_checks import lacks

Decode = Callable[[Sequence[int], int], Sequence[int]]
"""(prompt ids, number of new tokens) -> the candidate's own greedy continuation with a cache."""


def compare(
    folder: Path,
    baseline: Baseline,
    subject: Subject,
    limits: Limits,
    *,
    facts: Mapping[str, str],
    companions: Sequence[Difference],
    text: Callable[[Sequence[int]], str],
    decode: Decode,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Comparison:
    """Measure and judge.

    Args:
        folder: of the baseline.
        facts: what the candidate is, for the report.
        companions: what differs beside the weights.
        text: token ids -> text.
        decode: the candidate's own decoding.
        advance: told the tokens of every sequence that was run.

    Raises:
        InputError: the candidate has another number of layers, or the baseline does not fit it or itself.
    """
    prefix, modules = decoder_layers(subject.arch, subject.model)
    if len(modules) != baseline.layers:
        raise InputError(
            f"the candidate has {len(modules)} layers, the baseline's source {baseline.layers}",
            "compare a candidate with a baseline of its own source",
        )
    if problems := lacks(baseline):
        raise InputError(f"{folder} lacks what a comparison needs", "make the baseline again", items=problems)
    rows, layers = Kept(**read_rows(folder, baseline)), read_layers(folder, baseline)
    _check_sizes(baseline, rows, layers, subject)
    measurement = Measurement(subject, baseline, rows, layers, advance)
    answers, routing, long = measurement.answers()
    seen, embedded, head = measurement.layers(routing, long)
    spans, probe = baseline.rows(), baseline.of_use("probe")[0]

    measured = positions(baseline, rows, answers, baseline.of_use("text", "long"))
    longest = max(len(sequence.ids) for sequence in baseline.sequences)
    kinds = tuple(by_kind(measured, longest))
    greedy = tuple(
        _greedy(prompt, rows.rows(*spans[prompt.name]), answers[prompt.name], limits, text, decode)
        for prompt in baseline.of_use("prompt")
    )
    needles = tuple(needle_rows(baseline, rows, answers))
    reports = list(_layers(subject, prefix, layers, seen, limits))
    embedding_error = rms(per_token(subject.basis(layers[0]["input"]), embedded))
    head_kl = float(divergence(rows.rows(*spans[probe.name]), head.kept).mean())
    outside = _outside(read_outside(folder), measurement.outside(), limits)
    findings = (
        *_embedding(embedding_error, limits),
        *(finding for report in reports for finding in report.findings),
        *outside,
        *_head(head_kl, limits),
    )
    found = tuple(
        checks(
            limits,
            companions=companions,
            kinds=kinds,
            decided=measured.decided(limits.decided_margin),
            greedy=greedy,
            needles=needles,
            layers=[report.row for report in reports],
            findings=findings,
            embedding_error=embedding_error,
            head_kl=head_kl,
        )
    )
    bad = next((report for report in reports if report.row.bad), None)
    return Comparison(
        tool_version=__version__,
        passed=all(check.passed for check in found) and not findings,
        model_type=baseline.model_type,
        source_digest=baseline.source_digest,
        candidate=dict(facts),
        companions=tuple(companions),
        checks=found,
        kinds=kinds,
        positions=tuple(by_position(measured, baseline.limits, longest)),
        greedy=greedy,
        needles=needles,
        layers=tuple(report.row for report in reports),
        first_bad_layer=bad.row.layer if bad else None,
        operators=tuple(bad.operators) if bad else (),
        findings=findings,
        notes=tuple(_notes(baseline, subject)),
    )


def _check_sizes(baseline: Baseline, rows: Kept, layers: Layers, subject: Subject) -> None:
    """Ids and hidden states of the baseline are those that the candidate can take.

    Raises:
        InputError: they are not.
    """
    model: Any = subject.model  # transformers' methods, which torch's stub of a module does not know
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    largest = max(max(sequence.ids) for sequence in baseline.sequences)
    widths = {int(layer["input"].shape[1]) for layer in layers}
    advice = "compare a candidate with a baseline of its own source"
    if max(largest, int(rows.top_ids.max())) >= vocabulary or int(rows.top_ids.min()) < 0:
        raise InputError(f"the baseline has token ids beyond the candidate's vocabulary of {vocabulary:,}", advice)
    if widths != {hidden}:
        raise InputError(f"the baseline's hidden states are {sorted(widths)} wide, the candidate's {hidden}", advice)


def _greedy(
    prompt: Tokens, source: Kept, answer: Answer, limits: Limits, text: Callable[[Sequence[int]], str], decode: Decode
) -> Greedy:
    continuation = decode(prompt.ids[: prompt.prompt_tokens], len(prompt.ids) - prompt.prompt_tokens)
    return greedy_row(prompt, source, answer, continuation, limits.decided_margin, text)


def _layers(
    subject: Subject, prefix: str, layers: Layers, seen: Sequence[LayerSeen], limits: Limits
) -> Iterator[LayerReport]:
    unit = torch.finfo(subject.dtype).eps / 2
    for index, (source, found) in enumerate(zip(layers, seen, strict=True)):
        hidden = {name: subject.basis(source[name]) for name in ("input", "output", "long") if name in source}
        compared = {
            name: value for name, value in source.items() if not (subject.corrected and _is_bias(subject, name))
        }
        yield LayerComparison(subject.arch, prefix, index, {**compared, **hidden}, found, limits, unit).report()


def _is_bias(subject: Subject, name: str) -> bool:
    """Whether a tensor of a baseline's layer, `weight.layers.3.expert.gate.bias`, is the bias of a GEMM."""
    if not (name.startswith("weight.layers.") and name.endswith(".bias")):
        return False
    role = ".".join(field for field in name.split(".")[3:-1] if not field.isdigit())
    return subject.arch.role(role).kind is Kind.LINEAR


def _embedding(error: float, limits: Limits) -> Iterator[Finding]:
    if error > limits.weight_error:
        yield Finding(layer=None, operator="embed", what="embedding", error=error)


def _outside(source: Mapping[str, Tensor], found: Mapping[str, Tensor], limits: Limits) -> Iterator[Finding]:
    """Weights outside the layers; none are given when they have other values by design."""
    for name, want in source.items() if found else ():
        if not name.startswith("weight."):
            continue
        new = found.get(name)
        sound = new is not None and new.shape == want.shape
        error = relative_error(want, new) if sound and new is not None else math.inf
        if error > limits.weight_error:
            known = explain(name, source, found) if sound else Explanation()
            operator = name.removeprefix("weight.").removesuffix(".weight")
            yield Finding(layer=None, operator=operator, what="weight", error=number(error), **known._asdict())


def _head(kl: float, limits: Limits) -> Iterator[Finding]:
    if not kl <= limits.head_kl:
        yield Finding(layer=None, operator="norm.final, lm_head", what="head", error=number(kl))


def _notes(baseline: Baseline, subject: Subject) -> Iterator[str]:
    if subject.transformed:
        yield "transforms"
    elif subject.corrected:
        yield "biases"
    if not baseline.full:
        yield "top_k"
    if not baseline.of_use("long"):
        yield "no_long"
