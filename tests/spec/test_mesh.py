"""Meshes: coordinates, stages and experts, against the published rules of the engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.spec.mesh import Mesh


def sizes(mesh: Mesh, layers: int) -> list[int]:
    return [len(stage) for stage in mesh.stage_layers(layers)]


def test_published_examples() -> None:
    assert sizes(Mesh(pp=4), 61) == [15, 15, 16, 15]
    assert sizes(Mesh(pp=4, pp_policy="last"), 61) == [15, 15, 15, 16]
    assert sizes(Mesh(pp=4), 62) == [15, 16, 16, 15]
    assert sizes(Mesh(pp=3, pp_policy="explicit", pp_layers=(1, 59, 1)), 61) == [1, 59, 1]


@given(pp=st.integers(1, 9), more=st.integers(0, 60), policy=st.sampled_from(["middle", "last"]))
def test_no_layer_lost_none_twice(pp: int, more: int, policy: str) -> None:
    layers = pp + more
    mesh = Mesh(pp=pp, pp_policy=policy)  # type: ignore[arg-type]
    stages = mesh.stage_layers(layers)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert mesh.problems(layers, 0) == []


@given(ep=st.integers(1, 9), more=st.integers(0, 60), policy=st.sampled_from(["first", "last", "round_robin"]))
def test_every_expert_once(ep: int, more: int, policy: str) -> None:
    experts = ep + more
    mesh = Mesh(dp=ep, ep=ep, ep_policy=policy)  # type: ignore[arg-type]
    held = mesh.rank_experts(experts)
    assert sorted(expert for rank in held for expert in rank) == list(range(experts))
    if policy != "last":
        assert max(map(len, held)) - min(map(len, held)) <= 1


@given(tp=st.integers(1, 4), pp=st.integers(1, 3), dp=st.integers(1, 4))
def test_coordinates_are_a_numbering(tp: int, pp: int, dp: int) -> None:
    for ep in (n for n in range(1, tp * dp + 1) if tp * dp % n == 0):
        mesh = Mesh(tp=tp, pp=pp, dp=dp, ep=ep)
        places = [mesh.coordinates(rank) for rank in range(mesh.world)]
        assert len({(at.pp, at.dp, at.tp) for at in places}) == mesh.world
        assert len({(at.pp, at.ep, at.moe_tp) for at in places}) == mesh.world
        assert places == sorted(places, key=lambda at: (at.pp, at.dp, at.tp))


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        (Mesh(pp=9), "pp=9: the model has 8 layers; legal pp: 1 to 8"),
        (Mesh(pp=2, pp_policy="explicit", pp_layers=(4, 5)), "give 2 positive sizes that add up to 8 layers"),
        (Mesh(pp=2, pp_policy="explicit", pp_layers=(8, 0)), "give 2 positive sizes that add up to 8 layers"),
        (Mesh(pp=2, pp_layers=(4, 4)), "legal: pp_policy explicit"),
        (Mesh(tp=2, dp=3, ep=4), "ep=4 does not divide tp * dp = 6; legal ep: 1, 2, 3, 6"),
        (Mesh(dp=8, ep=8), "ep=8: the model has 6 routed experts; legal ep: 1 to 6"),
        (Mesh(dp=2, ep=2, ep_policy="map", expert_map=((0, 1, 2), (3, 4))), "leaves out the experts 5"),
        (Mesh(dp=2, ep=2, ep_policy="map", expert_map=((0, 1, 2, 3, 4, 5, 6),)), "names the experts 6; legal: 0 to 5"),
        (
            Mesh(dp=2, ep=2, ep_policy="map", expert_map=((0, 1, 2, 3, 4, 5),)),
            "has 1 rows; legal: one for each of the 2",
        ),
        (Mesh(ep_policy="map", expert_map=((0, 0, 1, 2, 3, 4, 5),)), "names an expert twice"),
        (Mesh(expert_map=((0,),)), "ep_policy is not map"),
    ],
)
def test_misfits(mesh: Mesh, found: str) -> None:
    assert any(found in problem for problem in mesh.problems(8, 6)), mesh.problems(8, 6)


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        ("first", ((0, 1), (2, 3), (4,))),
        ("last", ((0,), (1,), (2, 3, 4))),
        ("round_robin", ((0, 3), (1, 4), (2,))),
    ],
)
def test_who_gets_the_remaining_experts(policy: str, held: tuple[tuple[int, ...], ...]) -> None:
    assert Mesh(dp=3, ep=3, ep_policy=policy).rank_experts(5) == held  # type: ignore[arg-type]
