"""Dimension "performance": throughput, time to the first token, latency per token and errors under three loads."""

from __future__ import annotations

from collections import Counter

from quantkit.acceptance.load import LoadGenerator, Sample, figures
from quantkit.acceptance.outcome import Finding, missed, skipped
from quantkit.acceptance.session import Found, Session
from quantkit.acceptance.settings import Load

MIXED = "mixed"
_BOUNDS = (
    ("error_rate", "max_error_rate", "load_errors", max),
    ("ttft_p99_s", "max_ttft_p99_s", "load_ttft", max),
    ("token_p99_s", "max_token_p99_s", "load_token", max),
    ("tokens_per_s", "min_tokens_per_s", "load_throughput", min),
)
"""Figure, threshold, sentence, and which of both must be the threshold."""


def run_load(session: Session, name: str) -> Found:
    """One load of the settings, after full-length warm-ups."""
    load = session.settings.performance.loads.get(name)
    if load is None:
        raise skipped("load_not_set", name=name)
    shapes = _fitting(session, load)
    generator = LoadGenerator(session.endpoint, seed=f"{session.settings.seed} {name}")
    generator.warm_up(shapes, max(session.settings.performance.warm_up, 1))
    samples = generator.closed_loop(shapes, load.concurrency, load.requests)
    found = figures(samples)
    if name == MIXED:
        session.rate = found.get("requests_per_s", 0.0)
    if problems := judge(load, found):
        raise missed(problems, found, *worst_errors(samples))
    values = {key: round(found.get(key, 0.0), 4) for key in ("tokens_per_s", "ttft_p99_s", "token_p99_s")}
    return Found("load_done", dict(values), measured=found)


def judge(load: Load, found: dict[str, float]) -> list[Finding]:
    """Thresholds that the figures miss; a figure that could not be measured misses its threshold."""
    problems = []
    for figure, threshold, key, which in _BOUNDS:
        bound = getattr(load, threshold)
        if bound is None:
            continue
        value = found.get(figure)
        if value is None or which(value, bound) != bound:
            shown: str | float = "-" if value is None else round(value, 4)
            problems.append(Finding(key=key, values={"got": shown, "wanted": bound}))
    return problems


def worst_errors(samples: list[Sample]) -> list[str]:
    counts = Counter(sample.error for sample in samples if sample.error)
    return [f"{count} x {error}" for error, count in counts.most_common(3)]


def _fitting(session: Session, load: Load) -> list[tuple[int, int]]:
    """The load's shapes, cut to what the context holds: words may be two tokens, and a template adds some."""
    context = session.endpoint.context
    if context is None:
        return list(load.shapes)
    return [
        (min(prompt, max(1, (context - min(output, context // 4)) // 2)), min(output, context // 4))
        if 2 * prompt + output > context
        else (prompt, output)
        for prompt, output in load.shapes
    ]
