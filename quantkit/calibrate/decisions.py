"""Exceptions by rule: the cheapest set of groups whose other scheme brings the predicted divergence under a budget.

What a group costs: quantized alone, it adds a relative squared error s to what leaves its layer. How much of that
reaches the end is seen in the stream in which everything is quantized: when E_l is its relative squared error after
layer l and S_l the sum of what the groups of layer l add, a_l = (E_l - S_l) / E_(l-1) is what the layer makes of errors
that come in. So the group's part of the final error is s times the product of the a of all layers after its own, its
share is that divided by the sum over all groups, and a set of exceptions is predicted to leave

    KL = KL(everything quantized, measured) x (sum of the shares that remain) ^ g.

Errors of different groups are nearly orthogonal, so that their squares add up, and KL divergence is quadratic in a
small error: g is 1. Not so behind a router: a token that goes to another expert changes by a lot, and how many do so
grows with the error itself, not with its square. So g is measured, with a second quantized stream (`ANCHOR`) in which
every fourth layer alone is quantized. The prediction is measured afterwards; both stand in the artifact.

Choice: greedily by what an exception takes off the kinds of text that are over the budget, for each weight that it
concerns; then exceptions that turned out to be unnecessary are taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quantkit.archs import Architecture
from quantkit.calibrate.fake_quant import Schemes
from quantkit.calibrate.groups import Group, joined_experts
from quantkit.calibrate.trial import Alone, LayerTrial, alone_name
from quantkit.recipe import GROUPED, AutoGroup, Recipe
from quantkit.spec.decisions import ByKind, Decision, Decisions, FormDecisions, GroupError, HeldOut
from quantkit.spec.scheme import SCHEMES, Scheme

ALL = "all"
"""Name of the variant in which everything is quantized that the recipe converts."""

ANCHOR = "anchor"
"""Name of the variant in which only the groups of `is_anchored` layers are quantized."""


def is_anchored(layer: int) -> bool:
    """Every fourth layer, and not the first ones, whose errors are often most of all: a small share tells g best."""
    return layer % 4 == 2


_LARGEST_SHARE = 0.7
"""Of the anchored layers, above which the exponent is all noise."""

_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 0.2, 1.0
"""Bounds of g. Above 1 would promise more than the square of the error; below 0.2 hardly anything helps."""

KEPT = "keep"

_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.05, 4.0
"""Bounds of a_l, for layers whose own error hides what they make of errors that come in."""

Shares = Mapping[str, NDArray[np.float64]]
"""Scheme -> share of the predicted KL divergence by kind of text `[C]`; what is kept has none."""


def schemes_of(groups: Iterable[Group], exceptions: Iterable[Decision] = ()) -> dict[int, Schemes]:
    """Layer -> schemes of its roles, with exceptions."""
    found: dict[int, dict[str, Scheme]] = {}
    for group in groups:
        found.setdefault(group.layer, {}).update(dict.fromkeys(group.roles, SCHEMES[group.scheme]))
    for each in exceptions:
        found[each.layer].update(dict.fromkeys(each.roles, SCHEMES[each.scheme]))
    return dict(found)


def to_run_alone(recipe: Recipe, groups: Iterable[Group]) -> list[Alone]:
    """Groups and the schemes under which they are run alone."""

    def schemes(group: Group) -> list[str]:
        return list(dict.fromkeys([group.scheme, *([GROUPED] if recipe.auto_group else [])]))

    return [Alone(group, tuple(SCHEMES[name] for name in schemes(group))) for group in groups]


@dataclass
class _Option:
    """A group and what it may become.

    Attributes:
        group: see `Group`.
        shares: as `Shares`.
        scheme: what it has now.
    """

    group: Group
    shares: Shares
    scheme: str = field(init=False)

    def __post_init__(self) -> None:
        self.scheme = self.group.scheme

    def share(self, scheme: str) -> NDArray[np.float64]:
        found = self.shares.get(scheme)
        return np.zeros_like(self.shares[self.group.scheme]) if found is None else found

    @property
    def now(self) -> NDArray[np.float64]:
        return self.share(self.scheme)


class Decider:
    """Decides for one model.

    Args:
        recipe: its budgets.
        arch: record of the model.
        groups: all of them.
        results: of every layer, with the variant `ALL` and every group alone.
        held_out: of that trial.
        kinds: names of the kinds of text.
    """

    def __init__(
        self,
        recipe: Recipe,
        arch: Architecture,
        groups: Sequence[Group],
        results: Sequence[LayerTrial],
        held_out: HeldOut,
        kinds: Sequence[str],
    ) -> None:
        self._recipe, self._arch, self._groups, self._results = recipe, arch, groups, results
        self._kinds = [kind for kind in kinds if kind in held_out.kl[ALL]]
        self._index = [kinds.index(kind) for kind in self._kinds]
        self._kl = np.array([held_out.kl[ALL][kind] for kind in self._kinds])
        self._alone = {each.group.name: each for each in to_run_alone(recipe, groups)}
        self._shares = self._predicted_shares()
        self._exponent = self._measured_exponent(held_out)

    def decide(self) -> Decisions:
        """Exceptions of every form that the recipe has a budget for."""
        recipe = self._recipe
        forms: dict[str, FormDecisions] = {}
        if recipe.auto_keep:
            joined = joined_experts(self._arch, self._groups)
            options = [_Option(group, self._sum(members)) for group, members in joined]
            self._choose(options, recipe.auto_keep, "auto_keep", KEPT, recipe.auto_keep.max_share)
            forms["checkpoint"] = self._form(options, recipe.auto_keep.kl)
        if recipe.auto_group:
            options = [_Option(group, self._shares[group.name]) for group in self._groups]
            self._choose(options, recipe.auto_group, "auto_group", GROUPED, 1.0)
            if recipe.auto_keep:
                self._choose(options, recipe.auto_keep, "auto_keep", KEPT, recipe.auto_keep.max_share)
            forms["sharded"] = self._form(options, (recipe.auto_keep or recipe.auto_group).kl)
        return Decisions(
            measured_kl=self._by_kind(self._kl),
            exponent=self._exponent,
            groups=tuple(map(self._group_error, self._groups)),
            forms=forms,
        )

    # ---------------------------------------------------------------------------------------------- prediction

    def _errors(self, group: Group, scheme: str) -> NDArray[np.float64]:
        layer, name = self._results[group.layer], alone_name(group.name, scheme)
        return np.array([layer.mean_error(name, kind) for kind in self._index])

    def _predicted_shares(self) -> dict[str, Shares]:
        """Group -> its shares; those of the recipe's schemes add up to 1 for every kind."""
        reach = self._reach()
        parts = {
            group.name: {
                scheme.name: self._errors(group, scheme.name) * reach[group.layer]
                for scheme in self._alone[group.name].schemes
            }
            for group in self._groups
        }
        total = sum((parts[group.name][group.scheme] for group in self._groups), np.zeros(len(self._kinds)))
        total = np.where(total > 0, total, 1.0)
        return {name: {scheme: value / total for scheme, value in part.items()} for name, part in parts.items()}

    def _reach(self) -> NDArray[np.float64]:
        """`[L, C]`: how much of an error that leaves a layer is left at the end."""
        layers = len(self._results)
        factors = np.ones((layers, len(self._kinds)))
        own = np.zeros((layers, len(self._kinds)))
        for group in self._groups:
            own[group.layer] += self._errors(group, group.scheme)
        whole = np.array([[layer.mean_error(ALL, kind) for kind in self._index] for layer in self._results])
        for layer in range(1, layers):
            before = np.maximum(whole[layer - 1], 1e-30)
            factors[layer] = np.clip((whole[layer] - own[layer]) / before, _SMALLEST_FACTOR, _LARGEST_FACTOR)
        reach = np.ones_like(factors)
        for layer in range(layers - 2, -1, -1):
            reach[layer] = reach[layer + 1] * factors[layer + 1]
        return reach

    def _sum(self, members: Sequence[str]) -> Shares:
        rows = [self._shares[name] for name in members]
        return {scheme: sum((row[scheme] for row in rows), np.zeros(len(self._kinds))) for scheme in rows[0]}

    def _measured_exponent(self, held_out: HeldOut) -> float:
        """g of the prediction: the median over the kinds of text, few tokens of which may be most of a divergence."""
        anchored = [group for group in self._groups if is_anchored(group.layer)]
        share = sum((self._shares[group.name][group.scheme] for group in anchored), np.zeros(len(self._kinds)))
        kl = np.array([held_out.kl[ANCHOR][kind] for kind in self._kinds])
        tells = (kl > 0) & (self._kl > 0) & (share > 0) & (share < _LARGEST_SHARE)
        if not tells.any():
            return 1.0
        found = np.log(kl[tells] / self._kl[tells]) / np.log(share[tells])
        return float(np.clip(np.median(found), _SMALLEST_EXPONENT, _LARGEST_EXPONENT))

    def _left(self, options: Iterable[_Option]) -> NDArray[np.float64]:
        """Sum of the shares by kind `[C]`."""
        return sum((option.now for option in options), np.zeros(len(self._kinds)))

    def _allowed(self, kl: float) -> NDArray[np.float64]:
        """Sum of the shares by kind `[C]` at which the predicted KL divergence is `kl`."""
        allowed: NDArray[np.float64] = np.power(kl / np.maximum(self._kl, 1e-12), 1 / self._exponent)
        return allowed

    def _predicted(self, options: Iterable[_Option]) -> NDArray[np.float64]:
        """KL divergence by kind `[C]`."""
        return self._kl * np.power(self._left(options), self._exponent)

    # -------------------------------------------------------------------------------------------------- choice

    def _choose(self, options: list[_Option], budget: AutoGroup, table: str, scheme: str, max_share: float) -> None:
        """Give groups `scheme` until the budget is met, or nothing helps, or too many weights would have it."""
        total = sum(option.group.weights for option in options)
        room = max_share * total
        free = [each for each in options if not each.group.pinned and table not in each.group.never]
        taken: list[tuple[_Option, str]] = []
        allowed = self._allowed(budget.kl)
        while (over := self._left(options) - allowed).max(initial=0.0) > 0:
            open_ = [each for each in free if each.scheme != scheme and each.group.weights <= room]
            worth = [_worth(each, scheme, over) for each in open_]
            if max(worth, default=0.0) <= 0:
                break
            best = open_[int(np.argmax(worth))]
            taken.append((best, best.scheme))
            best.scheme = scheme
            room -= best.group.weights
        if (self._left(options) <= allowed).all():
            self._take_back(options, taken, allowed)

    def _take_back(
        self, options: list[_Option], taken: list[tuple[_Option, str]], allowed: NDArray[np.float64]
    ) -> None:
        """Undo what is not needed, the largest first."""
        for option, before in sorted(taken, key=lambda pair: -pair[0].group.weights):
            chosen, option.scheme = option.scheme, before
            if not (self._left(options) <= allowed).all():
                option.scheme = chosen

    # ------------------------------------------------------------------------------------------------ records

    def _form(self, options: list[_Option], budget: float) -> FormDecisions:
        predicted = self._predicted(options)
        total = sum(option.group.weights for option in options)
        kept = sum(option.group.weights for option in options if option.scheme == KEPT)
        return FormDecisions(
            exceptions=tuple(
                self._decision(option, budget, total) for option in options if option.scheme != option.group.scheme
            ),
            budget=budget,
            predicted_kl=self._by_kind(predicted),
            kept_share=round(kept / total, 6) if total else 0.0,
            within_budget=bool(predicted.max(initial=0.0) <= budget),
        )

    def _decision(self, option: _Option, budget: float, total: int) -> Decision:
        group = option.group
        worst = int(np.argmax(self._kl * option.share(group.scheme)))
        share, left = option.share(group.scheme)[worst], option.now[worst]
        reason = (
            f"as {group.scheme} it causes {share:.1%} of the error that reaches the output on {self._kinds[worst]}, as "
            f"{option.scheme} {left:.1%}, with {group.weights / total:.2%} of the weights (KL divergence without "
            f"exceptions {self._kl[worst]:.4f}, budget {budget:g})"
        )
        return Decision(
            group=group.name,
            layer=group.layer,
            roles=group.roles,
            weights=group.weights,
            scheme=option.scheme,
            reason=reason,
        )

    def _group_error(self, group: Group) -> GroupError:
        schemes = [scheme.name for scheme in self._alone[group.name].schemes]
        return GroupError(
            group=group.name,
            layer=group.layer,
            roles=group.roles,
            weights=group.weights,
            errors={name: self._by_kind(self._errors(group, name)) for name in schemes},
            share={name: self._by_kind(self._shares[group.name][name]) for name in schemes},
        )

    def _by_kind(self, values: NDArray[np.float64]) -> ByKind:
        return {kind: float(value) for kind, value in zip(self._kinds, values, strict=True)}


def _worth(option: _Option, scheme: str, over: NDArray[np.float64]) -> float:
    """What an exception takes off the excess over the budget, per weight."""
    gain = option.now - option.share(scheme)
    return float(np.minimum(gain, over)[over > 0].sum() / option.group.weights)
