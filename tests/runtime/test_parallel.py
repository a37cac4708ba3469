"""Shards of a mesh against the same model in one process: logits, greedy tokens, the count of INT8 GEMMs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.convert.run import convert
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit_instruments.comm import COLLECTIVES
from tests.families import FAMILY_NAMES
from tests.runtime import outputs, tasks
from tests.runtime.world import World

MESHES = {"tp2": Mesh(tp=2), "pp2": Mesh(pp=2), "ep2": Mesh(tp=2, ep=2), "tp2-pp2": Mesh(tp=2, pp=2)}
DENSE = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_vl", "phi3", "qwen3_5", "glm4"}
Prepared = dict[str, tuple[Path, dict[str, str], dict[str, Any]]]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes."""
    found = World(4)
    yield found
    found.close()


@pytest.fixture(scope="session")
def families(world: World, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Family -> its folder with shards for each mesh, what was refused, and what one process computes."""
    root = tmp_path_factory.mktemp("families")
    meshes = {"one": Mesh(), **MESHES}
    refused = world.spread(tasks.prepare, [(name, root / name, meshes) for name in FAMILY_NAMES])
    alone = world.spread(tasks.run_model, [(root / name / "one", tasks.prompt()) for name in FAMILY_NAMES])
    return {name: (root / name, why, got) for name, why, got in zip(FAMILY_NAMES, refused, alone, strict=True)}


def require_equal(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every rank has the logits and tokens of the single process; together they ran its INT8 GEMMs and no fallback."""
    for rank in found:
        difference = np.linalg.norm(rank["logits"] - alone["logits"]) / np.linalg.norm(alone["logits"])
        assert difference < 1e-5
        assert rank["tokens"] == alone["tokens"]
        assert rank["expected"]
        assert not rank["fallbacks"]
        assert set(rank["missing"]) <= rank["routed"]
    assert frozenset().union(*(rank["expected"] for rank in found)) == alone["expected"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_on_every_mesh(families: Prepared, world: World, family: str, mesh: str) -> None:
    folder, refused, alone = families[family]
    assert set(refused) == ({"ep2"} if family in DENSE else set())
    if mesh in refused:
        assert "the model has 0 routed experts; legal ep: 1 to 1" in refused[mesh]
        return
    found = world.mesh(tasks.run_model, MESHES[mesh].world, folder / mesh, tasks.prompt())
    require_equal(found, alone)
    if MESHES[mesh].pp == 2:  # layers of another stage are not built, and their files are not read
        stages = [rank["layers"] for rank in found[:: len(found) - 1]]
        assert stages == [[0, 1], [2]]
        assert not found[0]["files"] & found[-1]["files"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", ["minimax_m2", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_fusions_on_every_mesh(families: Prepared, world: World, family: str, mesh: str) -> None:
    """What each rank proves for itself on the way, all of them run in step."""
    folder, _, alone = families[family]
    found = world.mesh(partial(tasks.run_model, fused=True), MESHES[mesh].world, folder / mesh, tasks.prompt())
    for rank in found:
        assert np.linalg.norm(rank["logits"] - alone["logits"]) / np.linalg.norm(alone["logits"]) < 1e-4
        assert rank["tokens"] == alone["tokens"]
        assert not rank["fallbacks"]
        assert rank["fused"].get("rope") == {"deepseek_v3": 0, "qwen3_next": None}.get(family, len(rank["layers"]))


# ------------------------------------------------------------------------------------------ the ways of one family


def converted(world: World, folder: Path, family: str, mesh: Mesh, recipe: str = "w8a8", **sizes: Any) -> Path:
    """Shards of a family's tiny model for one process (`one`) and a mesh (`many`)."""
    meshes = {"one": Mesh(), "many": mesh}
    (refused,) = world.spread(partial(tasks.prepare, **sizes), [(family, folder, meshes, recipe)])
    assert not refused
    return folder


@pytest.mark.parametrize("family", ["llama", "minimax_m2", "minimax_m3", "deepseek_v3"])
def test_kv_heads_are_replicated_where_ranks_outnumber_them(world: World, tmp_path: Path, family: str) -> None:
    """Four ranks, two kv heads (and two indexer heads): norms over all heads must not count a head twice."""
    folder = converted(world, tmp_path, family, Mesh(tp=4))
    (alone,) = world.spread(tasks.run_model, [(folder / "one", tasks.prompt())])
    require_equal(world.mesh(tasks.run_model, 4, folder / "many", tasks.prompt()), alone)


@pytest.mark.parametrize(
    ("recipe", "sizes"), [("bf16", {}), ("w8a8-group128", {"intermediate_size": 256})], ids=["float", "groups"]
)
def test_other_schemes_are_split_too(world: World, tmp_path: Path, recipe: str, sizes: dict[str, int]) -> None:
    """Unquantized row-parallel layers, and groups of activations, which lie within a rank."""
    folder = converted(world, tmp_path, "llama", Mesh(tp=2), recipe, **sizes)
    (alone,) = world.spread(tasks.run_model, [(folder / "one", tasks.prompt())])
    found = world.mesh(tasks.run_model, 2, folder / "many", tasks.prompt())
    assert bool(alone["expected"]) == (recipe != "bf16")
    for rank in found:
        assert np.linalg.norm(rank["logits"] - alone["logits"]) / np.linalg.norm(alone["logits"]) < 1e-5
        assert rank["tokens"] == alone["tokens"]
        assert rank["expected"] == alone["expected"]
        assert not rank["fallbacks"]


def test_in_bfloat16_each_rank_scales_its_part(families: Prepared, world: World) -> None:
    """No bit is the same, and the logits are as near to the float32 ones as those of one process."""
    for family in ("llama", "gpt_oss", "qwen3_moe"):
        folder, _, exact = families[family]
        run = partial(tasks.run_model, dtype="bfloat16")
        errors = [
            float(np.linalg.norm(found["logits"] - exact["logits"]) / np.linalg.norm(exact["logits"]))
            for found in (
                *world.mesh(run, 1, folder / "one", tasks.prompt()),
                *world.mesh(run, 2, folder / "tp2", tasks.prompt()),
            )
        ]
        assert errors[1] == errors[2]
        assert 0 < errors[1] < 1.5 * errors[0] < 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gpt_oss"])
def test_sums_that_overlap_with_computing_are_the_same(families: Prepared, world: World, family: str) -> None:
    """Prefill in two halves, decode whole: the same bits, and a further product for each half."""
    folder, _, _ = families[family]
    for dtype in ("float32", "bfloat16"):
        runs = [partial(tasks.run_model, overlap=overlap, dtype=dtype) for overlap in (0, tasks.TOKENS)]
        whole, halves = (world.mesh(run, 2, folder / "tp2", tasks.prompt()) for run in runs)
        for one, other in zip(whole, halves, strict=True):
            assert np.array_equal(one["logits"], other["logits"])
            assert one["tokens"] == other["tokens"]
            assert one["expected"] == other["expected"]
            assert other["calls"] > one["calls"]


def test_stages_with_and_without_windows_run_in_step(families: Prepared, world: World) -> None:
    """gpt-oss over two stages: layers 0 and 2 see 16 positions and keep rings of 7 blocks of 4, layer 1 sees all."""
    folder, _, _ = families["gpt_oss"]
    prompts = [tasks.prompt(tokens, seed=tokens)[0].tolist() for tokens in (45, 3, 70)]
    ask = prompts, 20, 7
    (alone,) = world.mesh(tasks.run_session, 1, folder / "one", *ask)
    first, last = world.mesh(tasks.run_session, 2, folder / "pp2", *ask)
    assert alone["blocks"] == {0: 1 + 3 * 7, 1: 1 + 3 * 23, 2: 1 + 3 * 7}
    assert {**first["blocks"], **last["blocks"]} == alone["blocks"]
    assert sorted(last["blocks"]) == [2]
    assert first["tokens"] == last["tokens"] == alone["tokens"]
    assert first["fits"] == last["fits"]


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_chunks_in_the_form_of_graphs_are_the_same(families: Prepared, world: World, family: str, mesh: str) -> None:
    """Forwards of 9 packed tokens, padded, against those of one process that fit."""
    folder, _, _ = families[family]
    prompts = [tasks.prompt(tokens, seed=tokens)[0].tolist() for tokens in (20, 3, 11)]
    (alone,) = world.mesh(tasks.run_session, 1, folder / "one", prompts, 5, 9)
    run = partial(tasks.run_session, recorded=True)
    for found in world.mesh(run, 2, folder / mesh, prompts, 5, 9):
        assert found["tokens"] == alone["tokens"]
        assert found["replays"] == 4
        assert alone["replays"] == 0


EXPERTS = {
    "ep": Mesh(tp=2, ep=2),
    "ep over replicas": Mesh(dp=2, ep=2),
    "ep over both": Mesh(tp=2, dp=2, ep=4),
    "copies": Mesh(tp=2, ep=2, ep_policy="map", expert_map=((0, 1, 2, 4), (3, 4, 1))),
}


@pytest.mark.parametrize("dispatch", [False, True], ids=["added", "dispatched"])
@pytest.mark.parametrize("mesh", EXPERTS)
def test_experts_by_sums_and_by_all_to_all(world: World, tmp_path: Path, mesh: str, dispatch: bool) -> None:
    """Replicas have prompts of different lengths; experts that two ranks hold are computed once."""
    folder = converted(world, tmp_path, "qwen3_moe", EXPERTS[mesh])
    prompts = [tasks.prompt(9, seed=1), tasks.prompt(13, seed=2)]
    alone = world.spread(tasks.run_model, [(folder / "one", ids) for ids in prompts])
    run = partial(tasks.run_model, dispatch=dispatch)
    found = world.mesh(run, EXPERTS[mesh].world, folder / "many", *prompts)
    for rank, result in enumerate(found):
        want = alone[EXPERTS[mesh].coordinates(rank).dp]
        assert result["dispatch"] == [dispatch] * 2
        assert result["load"] == want["load"]  # each replica counts its own tokens
        difference = np.linalg.norm(result["logits"] - want["logits"]) / np.linalg.norm(want["logits"])
        assert difference < 1e-5
        assert result["tokens"] == want["tokens"]
        assert not result["fallbacks"]
    assert frozenset().union(*(result["expected"] for result in found)) == alone[0]["expected"]


@pytest.mark.parametrize(
    ("failing", "refused", "prefill", "decode"),
    [(9, "", 2, 2), (2, "", 0, 2), (1, "", 0, 0), (0, "", 0, 0), (9, "too wide", 0, 2)],
)
def test_what_one_rank_cannot_record_none_replays(
    families: Prepared, world: World, failing: int, refused: str, prefill: int, decode: int
) -> None:
    """Steps of 2 and 1 sequences are recorded, then chunks of 24 tokens: a rank that is padded to 24 would add up its
    sums with those of one that is not."""
    folder, _, _ = families["llama"]
    prompts = [tasks.prompt(tokens, seed=tokens)[0].tolist() for tokens in (23, 9)]
    (alone,) = world.spread(tasks.run_recording, [(folder / "one", prompts, 3, (9, ""))])
    assert alone["replays"] == {"prefill": 2, "decode": 2}
    found = world.mesh(tasks.run_recording, 2, folder / "tp2", prompts, 3, (9, ""), (failing, refused))
    why = (
        f"rank 1: attention: torch ({refused})"
        if refused
        else "rank 1: operation not permitted when stream is capturing"
    )
    for rank in found:
        assert rank["tokens"] == alone["tokens"]
        assert rank["replays"] == {"prefill": prefill, "decode": decode}
        assert (rank["because"][1] == why) == (not prefill)
        assert (rank["because"][0] == why) == (not decode)


def test_loads_count_every_choice_of_the_router(families: Prepared) -> None:
    load = families["mixtral"][2]["load"]
    tokens = tasks.TOKENS + tasks.TOKENS + tasks.NEW_TOKENS - 1  # a forward, a prefill, and steps but for the last
    assert [sum(layer) for layer in load] == [2 * tokens] * 3  # top-2


# ------------------------------------------------------------------------------------------------ what can go wrong


def test_nothing_stays_unset_on_any_rank(families: Prepared, world: World) -> None:
    for family in ("gpt_oss", "deepseek_v3", "minimax_m2"):
        assert world.mesh(tasks.load_poisoned, 4, families[family][0] / "tp2-pp2") == [[]] * 4


def test_a_rank_that_fails_is_named_on_all(families: Prepared, world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families["llama"][0] / "tp2", tmp_path / "out"))
    mine = next(folder.glob("*tp1*.safetensors"))
    data = bytearray(mine.read_bytes())
    data[-9] ^= 1
    mine.write_bytes(data)
    found = world.mesh(tasks.failure, 2, folder)
    assert [kind for kind, _ in found] == ["BrokenShard"] * 2
    assert "loading" in found[1][1]
    assert "failed on 1 of 2 ranks" in found[1][1]
    assert "rank 1:" in found[0][1]
    assert "checksum of tensor" in found[0][1]
    assert mine.name in found[0][1]


def test_another_number_of_processes_is_refused(families: Prepared, world: World) -> None:
    for folder, processes in (("tp2", 1), ("tp2-pp2", 2), ("one", 2)):
        for kind, text in world.mesh(tasks.failure, processes, families["llama"][0] / folder):
            assert kind == "UsageError"
            assert f"{processes} process(es) run" in text
            assert "torchrun --nproc-per-node" in text


# ------------------------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards for tp 2 x pp 2 of a small real model, with its tokenizer."""
    out = tmp_path_factory.mktemp("speaking") / "out"
    mesh = Mesh(tp=2, pp=2, ep=2)
    convert(outputs.MODELS / "tiny-minimax-m2", out, load_recipe("w8a8"), form="sharded", mesh=mesh, jobs=1)
    return out


def test_smoke_load_reports_every_rank(speaking: Path, world: World, converted: Callable[..., Path]) -> None:
    options = ("--device", "cpu", "--prompt", "The king said", "--max-new-tokens", "8", "--json")
    wide = [{"COLUMNS": 160}] * 4
    found = world.mesh(tasks.command_line, 4, "smoke-load", str(speaking), *options, environments=wide)
    assert [code for code, _, _ in found] == [0] * 4
    assert [stdout + stderr for _, stdout, stderr in found[1:]] == [""] * 3
    report = json.loads(found[0][1])
    ((code, stdout, _),) = world.mesh(
        tasks.command_line, 1, "smoke-load", str(converted("tiny-minimax-m2", "sharded")), *options
    )
    alone = json.loads(stdout)
    assert code == 0
    assert report["generated"] == alone["generated"]
    assert report["mesh"] == {"tp": 2, "pp": 2, "ep": 2, "dp": 1}
    assert [rank["rank"]["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    assert [rank["rank"]["layers"] for rank in report["ranks"]] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert sorted({e for rank in report["ranks"][:2] for e in rank["rank"]["experts"]}) == list(range(16))
    for rank in report["ranks"]:
        assert rank["int8"]["run"] == rank["int8"]["expected"] > 0
        assert rank["checksums"]["bytes"] < alone["checksums"]["bytes"] / 3
    table = found[0][2]
    assert "Ranks" in table
    assert "pp1 dp0 tp1 ep1" in table


def test_generate_speaks_once(speaking: Path, world: World, converted: Callable[..., Path]) -> None:
    """Draws are the same on every rank, and so is the text."""
    options = ("--device", "cpu", "--prompt", "The sea", "--prompt", "Once", "--max-new-tokens", "6", "--json")
    drawn = ("--temperature", "0.8", "--top-p", "0.9", "--kv-keys", "float32")
    found = world.mesh(tasks.command_line, 4, "generate", str(speaking), *options, *drawn, "--overlap", "2")
    assert [code for code, _, _ in found] == [0] * 4
    assert [stdout + stderr for _, stdout, stderr in found[1:]] == [""] * 3
    whole = str(converted("tiny-minimax-m2", "sharded"))
    ((_, stdout, _),) = world.mesh(tasks.command_line, 1, "generate", whole, *options, *drawn)
    assert json.loads(found[0][1])["generated"] == json.loads(stdout)["generated"]


def test_smoke_load_fails_on_all_when_one_rank_has_a_broken_file(speaking: Path, world: World, tmp_path: Path) -> None:
    out = Path(shutil.copytree(speaking, tmp_path / "out"))
    next(out.glob("*stage1-tp0*.safetensors")).unlink()
    found = world.mesh(tasks.command_line, 4, "smoke-load", str(out), "--device", "cpu")
    assert [code for code, _, _ in found] == [3] * 4
    assert "failed on 1 of 4 ranks" in found[0][2]
    assert "rank 2:" in found[0][2]
    assert "No such file" in found[0][2]


def test_commcheck(world: World) -> None:
    options = ("--tp", "2", "--dp", "2", "--ep", "4", "--mib", "1", "--repeats", "2", "--device", "cpu", "--json")
    nodes = [{"GROUP_RANK": rank // 2} for rank in range(4)]
    found = world.mesh(tasks.command_line, 4, "commcheck", *options, environments=nodes)
    assert [code for code, _, _ in found] == [0] * 4
    report = json.loads(found[0][1])
    assert report["passed"]
    assert not report["warnings"]
    assert [row["teams"] for row in report["collectives"][::4]] == ["tp", "dp", "stage, ep, world"]
    assert [row["size"] for row in report["collectives"][::4]] == [2, 2, 4]
    assert [row["collective"] for row in report["collectives"][:4]] == list(COLLECTIVES)
    assert all(row["bandwidth"] > 0 and row["latency"] > 0 for row in report["collectives"])


def test_commcheck_of_shards_warns_when_tp_leaves_a_node(world: World, speaking: Path) -> None:
    nodes = [{"GROUP_RANK": rank % 2} for rank in range(4)]
    options = ("commcheck", str(speaking), "--mib", "1", "--repeats", "1", "--device", "cpu")
    found = world.mesh(tasks.command_line, 4, *options, environments=nodes)
    assert [code for code, _, _ in found] == [0] * 4
    assert "warning: the tp team of ranks 0 to 1 lies on 2 nodes (0, 1)" in found[0][1]
    assert "send/recv" in found[0][1]


def test_commcheck_finds_a_wrong_result(world: World) -> None:
    found = world.mesh(tasks.commcheck_with_a_fault, 2)
    assert found == [(4, ["all-reduce over tp, stage, moe_tp, world"])] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a mesh of one rank has no collectives"),
        (("--tp", "2"), "1 process(es) run"),
        (("--tp", "2", "--ep", "3"), "ep=3 does not divide"),
    ],
)
def test_commcheck_refuses(world: World, options: tuple[str, ...], message: str) -> None:
    ((code, _, stderr),) = world.mesh(tasks.command_line, 1, "commcheck", "--device", "cpu", *options)
    assert code == 2
    assert message in stderr
