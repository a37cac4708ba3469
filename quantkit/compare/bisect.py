"""Where a candidate departs from its source: the first bad layer, and in it the first operator, expert or weight.

Every layer ran on the source's input (`quantkit.compare.candidate`), so the first operator that is beyond its limit is
the one at fault, or what is computed between it and the one before. Tokens that the router sent elsewhere have other
outputs for that reason alone; they count as flips and are left out after the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.archs import Architecture
from quantkit.compare.candidate import LayerSeen
from quantkit.compare.distributions import WORST
from quantkit.compare.fingerprint import explain, relative_error
from quantkit.compare.limits import Limits
from quantkit.compare.result import Finding, Layer, Operator

LONG_GROWTH = 3.0
"""On the long text errors of the layers before add up; an operator is at fault there when its error is this many times
that of what its layer was given."""

_TIE = 1e-6
"""Router logits this near are equal."""


@dataclass
class LayerReport:
    """One layer: its row, its operators, what is wrong in it."""

    row: Layer
    operators: list[Operator] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class LayerComparison:
    """One layer of the source and of the candidate.

    Attributes:
        arch: the family's record.
        prefix: of the layer's parameter names.
        index: of the layer.
        source: tensors of the layer's file, hidden states in the candidate's basis.
        seen: what the candidate did.
        limits: what it must keep to.
        unit: rounding unit of the dtype that hidden states are stored in.
    """

    arch: Architecture
    prefix: str
    index: int
    source: Mapping[str, Tensor]
    seen: LayerSeen
    limits: Limits
    unit: float

    def report(self) -> LayerReport:
        """Everything about this layer."""
        operators = list(self._operators())
        early, late = self._operator_findings(operators)
        experts = list(self._expert_findings())
        findings = [  # weights, then what runs first; a wrong expert is what makes their sum wrong
            *self._weight_findings(),
            *early,
            *self._routing_findings(),
            *(experts or late),
            *(() if early or late else self._long_findings()),  # "only the long text shows it"
        ]
        row = self._row(bad=bool(findings))
        if not findings and (row.cosine < self.limits.layer_cosine or row.error > self.limits.layer_error):
            findings.append(self._finding("layer", "", max(row.error, 1 - row.cosine)))
            row = row.model_copy(update={"bad": True})
        return LayerReport(row, operators, findings)

    # ------------------------------------------------------------------------------------------------ the layer

    def _row(self, *, bad: bool) -> Layer:
        entered, want, got = self.source["input"], self.source["output"], self.seen.output
        same = self._same_routing()
        errors = self._update_errors(entered, want, got)[same]
        cosines = torch.nn.functional.cosine_similarity(want, got, dim=-1)[same]
        own = per_token(want, self.seen.own_output)
        long = None
        if "long" in self.source and self.seen.long is not None and self.seen.long.output is not None:
            long = min(float(per_token(self.source["long"], self.seen.long.output).quantile(0.75)), WORST)
        return Layer(
            layer=self.index,
            cosine=float(cosines.nan_to_num(0.0).mean()) if len(cosines) else 1.0,
            error=rms(errors),
            error_max=min(float(errors.max()), WORST) if len(errors) else 0.0,
            own_error=rms(own),
            long_error=long,
            routing=self._routing_agreement(),
            flips=int((~same).sum()),
            bad=bad,
        )

    def _update_errors(self, entered: Tensor, want: Tensor, got: Tensor) -> Tensor:
        """||difference|| / ||what the layer adds|| by token, without what rounding the hidden state itself costs."""
        distance = (got - want).norm(dim=-1) - self.unit * want.norm(dim=-1)
        added = (want - entered).norm(dim=-1) if want.shape == entered.shape else want.norm(dim=-1)
        return finite(distance.clamp(min=0) / added.clamp(min=1e-30))

    def _same_routing(self) -> Tensor:
        """Tokens of the probe that were sent to the same experts, bool `[T]`."""
        tokens = len(self.source["input"])
        if "probe.routing" not in self.source or self.seen.probe.routing is None:
            return torch.ones(tokens, dtype=torch.bool)
        return (self.source["probe.routing"].long() == self.seen.probe.routing).all(-1)

    def _routing_agreement(self) -> float | None:
        if "routing" not in self.source or self.seen.own_routing is None:
            return None
        return agreement(self.source["routing"].long(), self.seen.own_routing)

    # ---------------------------------------------------------------------------------------------- inside of it

    def _operators(self) -> Iterator[Operator]:
        """Operators of the probe in the order in which the source ran them."""
        if not self.seen.weights:  # other values by design
            return
        same, chosen = self._same_routing(), False
        for name in sorted(name for name in self.source if name.startswith("probe.") and name[6].isdigit()):
            module, _, end = name.split(".", 2)[2].rpartition(".")
            chosen = chosen or (module.rpartition(".")[2] == "experts" and end == "out")
            found = self.seen.probe.events.get(name.removeprefix("probe."))
            errors = per_token(self.source[name], found) if found is not None else torch.tensor([math.inf])
            error = rms(errors[same] if chosen and len(errors) == len(same) else errors)
            yield Operator(
                name=module, end="in" if end == "in" else "out", error=error, bad=error > self._limit(module)
            )

    def _limit(self, module: str) -> float:
        return self.limits.expert_error if module.rpartition(".")[2] == "experts" else self.limits.operator_error

    def _operator_findings(self, operators: list[Operator]) -> tuple[list[Finding], list[Finding]]:
        """The first operator beyond its limit: in the first list when it runs before the experts."""
        chosen = False
        for before, operator in zip([None, *operators], operators, strict=False):
            chosen = chosen or operator.name.rpartition(".")[2] == "experts"
            if operator.bad:
                what = "before" if operator.end == "in" else "operator"
                detail = self.role(before.name) if before else ""
                found = [self._finding(what, self.role(operator.name), operator.error, detail)]
                return ([], found) if chosen else (found, [])
        return [], []

    def _weight_findings(self) -> Iterator[Finding]:
        for name, want in self.source.items():
            if not name.startswith("weight.") or not self.seen.weights:
                continue
            operator = name.removeprefix(f"weight.layers.{self.index}.").removesuffix(".weight")
            found = self.seen.weights.get(name)
            if found is None or found.shape != want.shape:
                yield self._finding("weight", operator, math.inf)
                continue
            for expert in range(len(want)) if want.ndim == 3 else [None]:
                error = relative_error(want, found) if expert is None else relative_error(want[expert], found[expert])
                if error > self.limits.weight_error:
                    known = explain(name, self.source, self.seen.weights, expert)
                    yield self._finding("weight", operator, error, expert=expert, known=known)

    def _expert_findings(self) -> Iterator[Finding]:
        """Experts that give other values on the same rows."""
        if self.seen.experts is None or "experts.output" not in self.source:
            return
        errors = [
            rms(per_token(want, got))
            for want, got in zip(self.source["experts.output"], self.seen.experts, strict=True)
        ]
        bad = [expert for expert, error in enumerate(errors) if error > self.limits.expert_error]
        if len(bad) > 1 and len(bad) == len(errors):
            yield self._finding("expert", "experts", max(errors), known=("all", ""))
            return
        for expert in bad:
            yield self._finding("expert", "experts", errors[expert], expert=expert)

    def _routing_findings(self) -> Iterator[Finding]:
        """Other choices of experts on the same input: by other scores, or between equal ones."""
        if "probe.routing" not in self.source or self.seen.probe.routing is None:
            return
        want, found = self.source["probe.routing"].long(), self.seen.probe.routing
        share = agreement(want, found)
        ties, differing = self._ties(want, found)
        if differing and ties == differing and ties > 1:
            yield self._finding("ties", "router", 1 - share, f"{ties} of {differing}")
        elif share < self.limits.routing_agreement:
            yield self._finding("routing", "router", 1 - share)

    def _ties(self, want: Tensor, found: Tensor) -> tuple[int, int]:
        """(differing choices between experts of equal scores, differing choices)."""
        logits = self.source.get("probe.router")
        differing = ties = 0
        for token in (want != found).any(-1).nonzero().squeeze(1).tolist():
            lost = sorted(set(want[token].tolist()) - set(found[token].tolist()))
            won = sorted(set(found[token].tolist()) - set(want[token].tolist()))
            differing += len(lost)
            if logits is not None and logits.shape[-1] > max([*lost, *won], default=0):
                old, new = logits[token, lost].sort().values, logits[token, won].sort().values
                ties += int(((old - new).abs() <= _TIE * (1 + old.abs())).sum()) if len(old) == len(new) else 0
        return ties, differing

    def _long_findings(self) -> Iterator[Finding]:
        """The first operator on the long text that is beyond its limit and far worse than what its layer was given."""
        if not self.seen.weights or self.seen.long is None:
            return
        given = before = None
        for name in sorted(name for name in self.source if name.startswith("long.")):
            found = self.seen.long.events.get(name.removeprefix("long."))
            if found is None:
                continue
            module, _, end = name.split(".", 2)[2].rpartition(".")
            error = float(per_token(self.source[name], found).quantile(0.75))
            given = error if given is None else given
            if module.rpartition(".")[2] == "experts" and end == "out":
                return  # single tokens may have gone to other experts, whose outputs are others
            if error > max(self._limit(module), LONG_GROWTH * given):
                yield self._finding("long", self.role(module), error, self.role(before or "") if end == "in" else "")
                return
            before = module

    def _finding(
        self,
        what: str,
        operator: str,
        error: float,
        detail: str = "",
        *,
        expert: int | None = None,
        known: tuple[str, str] | None = None,
    ) -> Finding:
        return Finding.model_validate(
            {
                "layer": self.index,
                "operator": operator,
                "expert": expert,
                "what": what,
                "error": min(error, WORST),
                "why": known[0] if known else "",
                "detail": known[1] if known else detail,
            }
        )

    def role(self, module: str) -> str:
        """Role of a module's weight, else its name."""
        key = self.arch.parse(f"{self.prefix}.{self.index}.{module}.weight") if module else None
        return module if key is None or key.label else key.role


def per_token(want: Tensor, got: Tensor) -> Tensor:
    """||difference|| / ||want|| of every row; `WORST` where `got` is not finite or of another shape.

    Rows smaller than the median one are divided by that: a gate of one number that passes through zero says nothing.
    """
    if want.shape != got.shape:
        return torch.full((len(want),), WORST)
    size = want.norm(dim=-1)
    return finite((got - want).norm(dim=-1) / torch.maximum(size, size.median()).clamp(min=1e-30))


def finite(errors: Tensor) -> Tensor:
    return torch.where(torch.isfinite(errors), errors, WORST)


def rms(errors: Tensor) -> float:
    """Root mean square; `WORST` stands for infinity, which JSON cannot say."""
    return min(float(errors.double().square().mean().sqrt()), WORST) if len(errors) else 0.0


def agreement(want: Tensor, found: Tensor) -> float:
    """Share of the choices `[T, k]` that were made in `found` too."""
    return float((want.unsqueeze(-1) == found.unsqueeze(-2)).any(-1).double().mean())
