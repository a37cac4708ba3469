"""Meshes: legal exactly where `convert` takes them, and figures that a person can work out."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.archs import architecture_for
from quantkit.archs.structure import layers_of
from quantkit.checkpoint.reader import Source
from quantkit.convert.plan import plan as convert_plan
from quantkit.errors import UsageError
from quantkit.plan.estimate import Model, Workload, longest_context, rank_weights, stage_memory
from quantkit.plan.native import promised_weights
from quantkit.plan.proposals import Proposal, illegal, meshes, propose, rate
from quantkit.plan.source import read_source
from quantkit.plan.weights import model_weights
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from tests.plan.facts import CONFIGS

MODELS = Path(__file__).parents[1] / "models"
CARD = 65520 << 20
WORK = Workload(4096, 4)


def model_of(name: str) -> Model:
    config = CONFIGS[name]
    arch = architecture_for(config)
    dims = arch.dims(config)
    weights = model_weights(arch, dims, load_recipe("w8a8"), promised_weights(arch, dims, config))
    return Model(dims, config, layers_of(arch, dims, config), weights)


def rated(name: str, mesh: Mesh, work: Workload = WORK) -> Proposal:
    return rate(model_of(name), mesh, 8, work, CARD)


@pytest.mark.parametrize("name", ["tiny-minimax-m2", "tiny-deepseek-v3"])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-group128"])
def test_legal_is_what_convert_takes(name: str, recipe: str) -> None:
    """Every mesh of 4, 6 and 8 cards, both ways."""
    chosen = load_recipe(recipe)
    source = Source(MODELS / name)
    model = read_source(MODELS / name, chosen).model
    verdicts = set()
    for cards in (4, 6, 8):
        for mesh in meshes(cards, has_experts=True):
            try:
                convert_plan(source, chosen, form="sharded", mesh=mesh)
                refused = ""
            except UsageError as error:
                refused = str(error)
            reasons = illegal(model, mesh, cards_per_node=8)
            assert bool(reasons) == bool(refused), (mesh, reasons, refused)
            assert all(reason in refused for reason in reasons)
            verdicts.add(bool(refused))
    assert verdicts == {True, False}


def test_a_ring_all_reduce_twice_a_layer() -> None:
    """Llama-3-70B, 8 ranks: 2 all-reduces x 2 (8 - 1) / 8 x 8192 values of 2 bytes."""
    found = rated("Llama-3-70B", Mesh(tp=8))
    assert (found.tp_bytes, found.ep_bytes, found.pp_bytes) == (2 * 2 * 7 * 8192 * 2 // 8, 0, 0)
    assert rated("Llama-3-70B", Mesh(pp=4)).pp_bytes == 3 * 8192 * 2
    assert rated("Llama-3-70B", Mesh()).tp_bytes == 0


def test_experts_of_other_replicas_cost_a_way_there_and_back() -> None:
    """Kimi-K2, 8 replicas, one group of experts each: 7 of 8 slots lie elsewhere, each 7168 values of 2 bytes."""
    found = rated("Kimi-K2", Mesh(dp=8, ep=8))
    assert found.ep_bytes == 2 * 8 * 7168 * 2 * 7 // 8
    assert rated("Kimi-K2", Mesh(tp=8, ep=8)).ep_bytes == 0


def test_replicas_are_counted_and_said() -> None:
    m3 = rated("MiniMax-M3", Mesh(tp=8, pp=2))
    assert m3.replicas == 2
    assert "tp=8 exceeds 4 kv heads: each stands on 2 ranks" in m3.notes
    assert rated("MiniMax-M3", Mesh(tp=4, pp=4)).replicas == 1
    assert rated("Kimi-K2", Mesh(tp=8, pp=4)).replicas == 8


def test_balance_of_stages() -> None:
    found = rated("Kimi-K2", Mesh(tp=8, pp=4))
    assert found.balance == pytest.approx(16 * 4 / 61)
    assert "stages of 15, 15, 16, 15 layers" in found.notes


def test_experts_that_do_not_divide_are_said() -> None:
    found = rated("GLM-4.5", Mesh(tp=3, dp=1, ep=3))
    assert "160 experts over 3: 54 on some ranks, 53 on others" in found.notes


def test_the_fullest_card_is_that_of_the_fullest_rank() -> None:
    model = model_of("MiniMax-M2.7")
    for mesh in (Mesh(tp=4, pp=3, ep=4), Mesh(dp=6, ep=6), Mesh(tp=8)):
        ranks = [sum(columns.values()) for columns in rank_weights(model, mesh)]
        stages = [card.weight_bytes for card in stage_memory(model, mesh, WORK, CARD)]
        assert max(stages) == max(ranks)
        assert len(ranks) == mesh.world


def test_more_cards_never_hold_less() -> None:
    model = model_of("MiniMax-M2.7")
    lengths = [longest_context(model, Mesh(tp=8, pp=pp), WORK, CARD) for pp in (1, 2, 4)]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0


def test_nothing_is_both_proposed_and_rejected() -> None:
    found, rejected = propose(model_of("Mixtral-8x7B"), 8, 8, WORK, CARD)
    refused = [mesh for row in rejected for mesh in row.meshes]
    every = list(meshes(8, has_experts=True))
    assert len(found) + len(refused) == len(every)
    assert {row.mesh.model_dump_json() for row in found}.isdisjoint(mesh.model_dump_json() for mesh in refused)
    assert all(row.memory.free >= 0 for row in found)
