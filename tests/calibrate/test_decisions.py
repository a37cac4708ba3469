"""The choice of exceptions on invented errors, where the right answer is known."""

from __future__ import annotations

import pytest

from quantkit.archs.base import Architecture
from quantkit.calibrate.decisions import ALL, ANCHOR, Decider
from quantkit.calibrate.groups import Group
from quantkit.calibrate.trial import LayerTrial, alone_name
from quantkit.recipe import Recipe
from quantkit.spec.decisions import Decisions, HeldOut

KINDS = ("code", "prose")


def group(layer: int, role: str, weights: int = 100, **flags: object) -> Group:
    return Group(f"layers.{layer}.{role}", layer, (role,), weights, "w8a8", **flags)  # type: ignore[arg-type]


def decide(
    groups: list[Group],
    errors: dict[str, tuple[float, float]],
    *,
    kl: tuple[float, float] = (0.1, 0.1),
    anchor: float = 0.0,
    grouped: dict[str, float] | None = None,
    growth: float = 1.0,
    **tables: object,
) -> Decisions:
    """Decide where group g alone adds errors[g] (by kind); an error that enters a layer leaves it times `growth`."""
    results, whole = [], [0.0, 0.0]
    for layer in range(1 + max(each.layer for each in groups)):
        rows: dict[str, dict[int, float]] = {}
        whole = [growth * value for value in whole]
        for each in groups:
            if each.layer == layer:
                rows[alone_name(each.name, "w8a8")] = dict(enumerate(errors[each.name]))
                other = (grouped or {}).get(each.name, 1.0)
                rows[alone_name(each.name, "w8a8-group128")] = {k: other * v for k, v in enumerate(errors[each.name])}
                whole = [a + b for a, b in zip(whole, errors[each.name], strict=True)]
        results.append(LayerTrial({0: 1, 1: 1}, {**rows, ALL: dict(enumerate(whole))}))
    both = dict(zip(KINDS, kl, strict=True))
    held_out = HeldOut(
        samples=2,
        tokens=2,
        positions={},
        kl={ALL: both, ANCHOR: dict.fromkeys(KINDS, anchor)},
        kl_error={},
        kl_by_position={},
        perplexity_source={},
        perplexity={},
        top1={},
        layer_error={},
        routing={},
    )
    recipe = Recipe.model_validate({"name": "n", "description": "d", **tables})
    return Decider(recipe, Architecture("x"), groups, results, held_out, KINDS).decide()


GROUPS = [group(layer, role) for layer in range(2) for role in ("attn.o", "mlp.down")]
ERRORS = {
    "layers.0.attn.o": (1.0, 1.0),
    "layers.0.mlp.down": (6.0, 6.0),
    "layers.1.attn.o": (1.0, 1.0),
    "layers.1.mlp.down": (2.0, 2.0),
}


def kept(found: Decisions, form: str = "checkpoint") -> list[str]:
    return [row.group for row in found.forms[form].exceptions]


def test_the_largest_share_goes_first_and_no_more_than_needed() -> None:
    found = decide(GROUPS, ERRORS, auto_keep={"kl": 0.05, "max_share": 1})
    assert kept(found) == ["layers.0.mlp.down"]
    form = found.forms["checkpoint"]
    assert form.predicted_kl == pytest.approx({"code": 0.04, "prose": 0.04})
    assert form.within_budget
    assert form.kept_share == 0.25


def test_every_kind_of_text_must_be_within_the_budget() -> None:
    errors = {**ERRORS, "layers.0.attn.o": (0.1, 9.0), "layers.0.mlp.down": (9.0, 0.1)}
    assert kept(decide(GROUPS, errors, auto_keep={"kl": 0.03, "max_share": 1})) == [
        "layers.0.attn.o",
        "layers.0.mlp.down",
    ]


def test_what_turns_out_unnecessary_is_taken_back() -> None:
    """The cheap group is the best start for each weight, the dear one is needed anyway and enough alone."""
    groups = [group(0, "attn.o", 1), group(0, "mlp.down", 1000), group(1, "attn.o", 1000)]
    errors = {"layers.0.attn.o": (0.5, 0.5), "layers.0.mlp.down": (8.0, 8.0), "layers.1.attn.o": (1.5, 1.5)}
    assert kept(decide(groups, errors, auto_keep={"kl": 0.021, "max_share": 1})) == ["layers.0.mlp.down"]


def test_dear_groups_are_left_when_there_is_no_room() -> None:
    found = decide(GROUPS, ERRORS, auto_keep={"kl": 0.001, "max_share": 0.3})
    assert kept(found) == ["layers.0.mlp.down"]
    assert not found.forms["checkpoint"].within_budget


def test_pinned_and_forbidden_groups_are_left_alone() -> None:
    groups = [
        group(0, "attn.o"),
        group(0, "mlp.down", pinned=True),
        group(1, "attn.o"),
        group(1, "mlp.down", never=frozenset({"auto_keep"})),
    ]
    found = decide(groups, ERRORS, auto_keep={"kl": 0.05, "max_share": 1})
    assert kept(found) == ["layers.0.attn.o", "layers.1.attn.o"]


def test_errors_of_early_layers_count_for_what_is_left_of_them() -> None:
    """Each layer passes on a tenth of what comes in, so the first layer's larger error matters less."""
    found = decide(GROUPS, ERRORS, growth=0.1, auto_keep={"kl": 0.06, "max_share": 1})
    assert kept(found) == ["layers.1.mlp.down"]
    share = {row.group: row.share["w8a8"]["code"] for row in found.groups}
    assert share["layers.0.mlp.down"] == pytest.approx(0.6 / 3.7)


def test_groups_come_before_kept_ones_in_shards() -> None:
    grouped = {"layers.0.mlp.down": 0.1, "layers.1.mlp.down": 0.5}
    found = decide(GROUPS, ERRORS, grouped=grouped, auto_group={"kl": 0.05}, auto_keep={"kl": 0.05, "max_share": 1})
    assert [(row.group, row.scheme) for row in found.forms["sharded"].exceptions] == [
        ("layers.0.mlp.down", "w8a8-group128")
    ]
    assert kept(found) == ["layers.0.mlp.down"]


def test_routed_models_gain_less_than_the_error_falls() -> None:
    """A quarter of the layers alone quantized still leaves half of the divergence: the exponent is 1/2."""
    groups = [group(layer, "mlp.down") for layer in range(4)]
    errors = {each.name: (1.0, 1.0) for each in groups}
    found = decide(groups, errors, anchor=0.05, auto_keep={"kl": 0.07, "max_share": 1})
    assert found.exponent == pytest.approx(0.5)
    assert len(kept(found)) == 3  # (1/4)^(1/2) = 0.5 <= 0.7 < 0.707 = (2/4)^(1/2)


def test_without_any_error_nothing_is_decided() -> None:
    found = decide(GROUPS, dict.fromkeys(ERRORS, (0.0, 0.0)), kl=(0.0, 0.0), auto_keep={"kl": 0.05})
    assert kept(found) == []
    assert found.forms["checkpoint"].within_budget
