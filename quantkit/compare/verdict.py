"""The limits, one by one: worst value, where it was found, passed or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from quantkit.compare.distributions import WORST
from quantkit.compare.limits import Limits
from quantkit.compare.result import Check, Difference, Distribution, Finding, Greedy, Layer, Needle

_FINDING_OF = {
    "operator_error": ("operator", "before", "long"),
    "expert_error": ("expert",),
    "weight_error": ("weight",),
}


def checks(
    limits: Limits,
    *,
    companions: Sequence[Difference],
    kinds: Sequence[Distribution],
    decided: tuple[int, int],
    greedy: Sequence[Greedy],
    needles: Sequence[Needle],
    layers: Sequence[Layer],
    findings: Sequence[Finding],
    embedding_error: float,
    head_kl: float,
) -> Iterator[Check]:
    """Every check, in the order of the report.

    Args:
        decided: positions of the texts that the source decides, and those of them where both agree.
        greedy: a first divergence at a decided step counts as a position that differs.
        embedding_error: relative error of what enters the first layer.
        head_kl: mean KL where the head gets the source's hidden states.
    """
    yield Check(name="companions", value=float(len(companions)), limit=0.0, passed=not companions)
    yield _most("kl_mean", limits.kl_mean, ((row.kl_mean, row.kind) for row in kinds))
    yield _most("kl_p99", limits.kl_p99, ((row.kl_p99, row.kind) for row in kinds))
    yield _least("cosine_mean", limits.cosine_mean, ((row.cosine_mean, row.kind) for row in kinds))
    yield _most("perplexity_ratio", limits.perplexity_ratio, ((_significant(row), row.kind) for row in kinds))
    yield _agreement(limits, decided, greedy)
    departing = [row.prompt for row in greedy if row.departs]
    where = departing[0] if departing else ""
    yield Check(name="decoding", value=float(len(departing)), limit=0.0, passed=not departing, where=where)
    routing = ((row.routing, f"layers.{row.layer}") for row in layers if row.routing is not None)
    yield _least("routing_agreement", limits.routing_agreement, routing)
    yield _most("needle_loss", limits.needle_loss, ((row.source - row.candidate, row.name) for row in needles))
    yield _most("embeddings", limits.weight_error, [(embedding_error, "")])
    yield _least("layer_cosine", limits.layer_cosine, ((row.cosine, f"layers.{row.layer}") for row in layers))
    yield _most("layer_error", limits.layer_error, ((row.error, f"layers.{row.layer}") for row in layers))
    for name, kinds_of_finding in _FINDING_OF.items():
        yield _none_found(name, getattr(limits, name), findings, kinds_of_finding)
    yield _most("head_kl", limits.head_kl, [(head_kl, "")])


def _significant(row: Distribution) -> float:
    """The ratio that the candidate exceeds but for chance: texts of one kind are few."""
    return row.perplexity_ratio - 2 * row.perplexity_ratio_error


def _most(name: str, limit: float, found: Iterable[tuple[float, str]]) -> Check:
    values = list(found)
    if not values:
        return Check(name=name, value=None, limit=limit, passed=True)
    value, where = max(values, key=lambda pair: number(pair[0]))
    return Check(name=name, value=number(value), limit=limit, passed=number(value) <= limit, where=where)


def _least(name: str, limit: float, found: Iterable[tuple[float, str]]) -> Check:
    values = list(found)
    if not values:
        return Check(name=name, value=None, limit=limit, passed=True)
    value, where = min(values, key=lambda pair: -number(-pair[0]))
    value = -number(-value)
    return Check(name=name, value=value, limit=limit, passed=value >= limit, where=where)


def _agreement(limits: Limits, decided: tuple[int, int], greedy: Sequence[Greedy]) -> Check:
    total, same = decided
    parted = [row for row in greedy if row.first is not None and row.first.decided]
    total, where = total + len(parted), parted[0].prompt if parted else ""
    share = same / total if total else None
    if share is not None and total:  # few positions: two standard errors in favour
        share = min(1.0, share + 2 * math.sqrt(share * (1 - share) / total))
    return Check(
        name="decided_agreement",
        value=share,
        limit=limits.decided_agreement,
        passed=share is None or share >= limits.decided_agreement,
        where=where,
    )


def _none_found(name: str, limit: float, findings: Sequence[Finding], kinds: tuple[str, ...]) -> Check:
    """Limits whose excess is a finding: the first one is named."""
    found = [finding for finding in findings if finding.what in kinds]
    if not found:
        return Check(name=name, value=None, limit=limit, passed=True)
    first = found[0]
    where = first.operator if first.layer is None else f"layers.{first.layer}.{first.operator}"
    where += "" if first.expert is None else f".{first.expert}"
    return Check(name=name, value=first.error, limit=limit, passed=False, where=where)


def number(value: float) -> float:
    """Not-a-number and infinity as the worst value that JSON can say."""
    return value if value == value and value < WORST else WORST
