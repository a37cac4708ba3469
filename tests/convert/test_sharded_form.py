"""The sharded form against slices cut by hand from the source, with torch indexing and numpy rounding only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.convert.run import convert
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe
from quantkit.spec.manifest import Manifest
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import assert_int8, ref_int8, tensors

LAYER = "model.layers.2"


def shard(out: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """What one rank reads."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for name in manifest.ranks[rank].files:
        found |= load_file(out / name)
    return found


def rounded(weight: Tensor, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """INT8 of some columns under the scales of whole rows."""
    q, scale = ref_int8(weight)
    return torch.from_numpy(q[..., columns].copy()), torch.from_numpy(scale)


def test_one_rank_is_fused_and_stacked(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", jobs=1)
    source, found = tensors(minimax), shard(tmp_path / "out", manifest, 0)
    qkv = torch.cat([source[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert_int8(qkv, found["layers.2.attn.qkv.weight"], found["layers.2.attn.qkv.weight_scale"])
    experts = f"{LAYER}.block_sparse_moe.experts"
    gate_up = torch.stack(
        [torch.cat([source[f"{experts}.{e}.{part}.weight"] for part in ("w1", "w3")]) for e in range(16)]
    )
    assert found["layers.2.expert.gate_up.weight"].shape == (16, 192, 160)
    assert_int8(gate_up, found["layers.2.expert.gate_up.weight"], found["layers.2.expert.gate_up.weight_scale"])
    down = torch.stack([source[f"{experts}.{e}.w2.weight"] for e in range(16)])
    assert_int8(down, found["layers.2.expert.down.weight"], found["layers.2.expert.down.weight_scale"])
    assert torch.equal(found["layers.2.router.weight"], source[f"{LAYER}.block_sparse_moe.gate.weight"])
    correction = source[f"{LAYER}.block_sparse_moe.e_score_correction_bias"]
    assert found["layers.2.router.correction.weight"].dtype == torch.float32
    assert torch.equal(found["layers.2.router.correction.weight"], correction)
    assert len(manifest.ranks) == 1
    assert manifest.ranks[0].layers == tuple(range(6))
    assert manifest.ranks[0].experts == tuple(range(16))


@pytest.mark.parametrize("tp", [2, 4])
def test_attention_splits_by_head_and_kv_heads_replicate(tp: int, minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """4 query heads and 2 kv heads of width 32: with four ranks, two ranks share each kv head."""
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=Mesh(tp=tp), jobs=1)
    source = tensors(minimax)
    heads = 4 // tp
    for rank in range(tp):
        found = shard(tmp_path / "out", manifest, rank)
        queries = slice(32 * heads * rank, 32 * heads * (rank + 1))
        keys = slice(32 * (rank * 2 // tp), 32 * (rank * 2 // tp) + 32)
        q, k, v = (source[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv")
        fused = torch.cat([q[queries], k[keys], v[keys]])
        assert_int8(fused, found["layers.2.attn.qkv.weight"], found["layers.2.attn.qkv.weight_scale"])
        assert torch.equal(found["layers.2.attn.q_norm.weight"], source[f"{LAYER}.self_attn.q_norm.weight"][queries])
        assert torch.equal(found["layers.2.attn.k_norm.weight"], source[f"{LAYER}.self_attn.k_norm.weight"][keys])
        out_q, out_scale = rounded(source[f"{LAYER}.self_attn.o_proj.weight"], queries)
        assert torch.equal(found["layers.2.attn.o.weight"], out_q)
        assert torch.equal(found["layers.2.attn.o.weight_scale"], out_scale), "the scales of a ROW split are whole"


def test_vocabulary_is_padded_with_zeros(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    """131 rows over 2 ranks: padded to 192, so rank 1 holds 35 rows and 61 of zeros."""
    manifest = convert(tiny("llama"), tmp_path / "out", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    source = tensors(tiny("llama"))
    for name, original in (("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        padded = torch.cat([source[original], torch.zeros(61, 48, dtype=torch.bfloat16)])
        for rank in range(2):
            found = shard(tmp_path / "out", manifest, rank)[f"{name}.weight"]
            assert torch.equal(found, padded[96 * rank : 96 * (rank + 1)])
    assert manifest.vocab_size == 131


def test_latent_attention_splits_by_head(deepseek: Path, tmp_path: Path, w8a8: Recipe) -> None:
    manifest = convert(deepseek, tmp_path / "out", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    source = tensors(deepseek)
    for rank in range(2):
        found = shard(tmp_path / "out", manifest, rank)
        for role, name, rows in (("mla.q_b", "q_b_proj", 2 * 48), ("mla.kv_b", "kv_b_proj", 2 * 64)):
            weight = source[f"{LAYER}.self_attn.{name}.weight"][rows * rank : rows * (rank + 1)]
            assert_int8(weight, found[f"layers.2.{role}.weight"], found[f"layers.2.{role}.weight_scale"])
        for role, name in (("mla.q_a", "q_a_proj"), ("mla.kv_a", "kv_a_proj_with_mqa")):
            assert torch.equal(found[f"layers.2.{role}.weight"], source[f"{LAYER}.self_attn.{name}.weight"])
        shared = [source[f"{LAYER}.mlp.shared_experts.{part}_proj.weight"][48 * rank :][:48] for part in ("gate", "up")]
        assert_int8(
            torch.cat(shared), found["layers.2.shared.gate_up.weight"], found["layers.2.shared.gate_up.weight_scale"]
        )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("first", [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (11, 12, 13, 14, 15)]),
        ("last", [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15)]),
        ("round_robin", [(0, 3, 6, 9, 12, 15), (1, 4, 7, 10, 13), (2, 5, 8, 11, 14)]),
    ],
)
def test_experts_go_where_the_policy_says(
    policy: str, expected: list[tuple[int, ...]], minimax: Path, tmp_path: Path, w8a8: Recipe
) -> None:
    mesh = Mesh(dp=3, ep=3, ep_policy=policy)  # type: ignore[arg-type]
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=mesh, jobs=1)
    source = tensors(minimax)
    for rank, experts in enumerate(expected):
        assert manifest.ranks[rank].experts == experts
        found = shard(tmp_path / "out", manifest, rank)
        down = torch.stack([source[f"{LAYER}.block_sparse_moe.experts.{e}.w2.weight"] for e in experts])
        assert_int8(down, found["layers.2.expert.down.weight"], found["layers.2.expert.down.weight_scale"])
    dense = {name for rank in manifest.ranks for name in rank.files if "-tp" in name}
    assert dense == {"stage0-tp0-00001.safetensors"}, "replicas share the dense files"


def test_experts_split_within_their_group(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """tp 2 x dp 2, ep 2: each group of two ranks splits its eight experts' width of 96 in two."""
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=Mesh(tp=2, dp=2, ep=2), jobs=1)
    source = tensors(minimax)
    for rank in range(4):
        found = shard(tmp_path / "out", manifest, rank)
        experts, half = range(8 * (rank // 2), 8 * (rank // 2) + 8), slice(48 * (rank % 2), 48 * (rank % 2) + 48)
        name = f"{LAYER}.block_sparse_moe.experts"
        gate_up = torch.stack(
            [torch.cat([source[f"{name}.{e}.{part}.weight"][half] for part in ("w1", "w3")]) for e in experts]
        )
        assert_int8(gate_up, found["layers.2.expert.gate_up.weight"], found["layers.2.expert.gate_up.weight_scale"])
        q, scale = rounded(torch.stack([source[f"{name}.{e}.w2.weight"] for e in experts]), half)
        assert torch.equal(found["layers.2.expert.down.weight"], q)
        assert torch.equal(found["layers.2.expert.down.weight_scale"], scale)


def test_biases_and_sinks(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    """gpt-oss: the bias of a ROW split counts once; under expert parallelism alone every rank has its experts'."""
    source_dir = tiny("gpt_oss")
    source = tensors(source_dir)
    split = convert(source_dir, tmp_path / "tp", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp.experts"
    for rank in range(2):
        found = shard(tmp_path / "tp", split, rank)
        out_bias, down_bias = source[f"{attention}.o_proj.bias"], source[f"{mlp}.down_proj_bias"]
        assert torch.equal(found["layers.1.attn.o.bias"], out_bias if rank == 0 else torch.zeros_like(out_bias))
        assert torch.equal(found["layers.1.expert.down.bias"], down_bias if rank == 0 else torch.zeros_like(down_bias))
        assert torch.equal(found["layers.1.attn.sinks.weight"], source[f"{attention}.sinks"][2 * rank :][:2])
        stacked = source[f"{mlp}.gate_up_proj_bias"]
        halves = [stacked[:, part::2][:, 16 * rank :][:, :16] for part in (0, 1)]
        assert torch.equal(found["layers.1.expert.gate_up.bias"], torch.cat(halves, 1))
        q, k, v = (source[f"{attention}.{part}_proj.bias"] for part in "qkv")
        assert torch.equal(
            found["layers.1.attn.qkv.bias"], torch.cat([q[32 * rank :][:32], k[16 * rank :][:16], v[16 * rank :][:16]])
        )
    spread = convert(source_dir, tmp_path / "ep", w8a8, form="sharded", mesh=Mesh(dp=2, ep=2), jobs=1)
    for rank, experts in enumerate([slice(0, 3), slice(3, 5)]):
        found = shard(tmp_path / "ep", spread, rank)
        assert torch.equal(found["layers.1.expert.down.bias"], source[f"{mlp}.down_proj_bias"][experts])


def test_tied_table(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    table = tensors(tiny("qwen2"))["model.embed_tokens.weight"]
    one = convert(tiny("qwen2"), tmp_path / "one", w8a8, form="sharded", jobs=1)
    (alias,) = [record for record in one.tensors if record.alias]
    (embed,) = [record for record in one.tensors if record.name == "embed.weight"]
    assert (alias.name, alias.alias, alias.offset, alias.file) == (
        "lm_head.weight",
        "embed.weight",
        embed.offset,
        embed.file,
    )
    assert "lm_head.weight" not in shard(tmp_path / "one", one, 0)
    two = convert(tiny("qwen2"), tmp_path / "two", w8a8, form="sharded", mesh=Mesh(pp=2), jobs=1)
    first, last = (shard(tmp_path / "two", two, rank) for rank in range(2))
    assert torch.equal(first["embed.weight"], table)
    assert torch.equal(last["lm_head.weight"], table)
    assert not [record for record in two.tensors if record.alias]
    assert "norm.final.weight" in last
    assert "norm.final.weight" not in first


def test_stages_hold_each_layer_once(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=Mesh(pp=4), jobs=1)
    held = [rank.layers for rank in manifest.ranks]
    assert held == [(0,), (1, 2), (3, 4), (5,)]
    for rank, layers in enumerate(held):
        names = shard(tmp_path / "out", manifest, rank)
        assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == set(layers)


def test_all_misfits_at_once(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    mesh = Mesh(tp=3, ep=2, pp=7)
    with pytest.raises(QuantkitError) as caught:
        convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=mesh, jobs=1)
    text = "\n".join(caught.value.items)
    assert "pp=7: the model has 6 layers; legal pp: 1 to 6" in text
    assert "ep=2 does not divide tp * dp = 3; legal ep: 1, 3" in text
    assert "tp=3 does not divide attn.q with 4 heads; legal tp: 1, 2, 4" in text
    assert "tp=3 does not divide attn.k with 2 kv_heads; legal tp: 1, 2, 4" in text
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_groups_must_not_be_cut(minimax: Path, tmp_path: Path) -> None:
    from quantkit.recipe import load_recipe

    recipe = load_recipe("w8a8-group128")
    with pytest.raises(
        QuantkitError, match=r"expert.down with 96 moe_intermediate in groups of 96; legal tp \* dp / ep: 1"
    ):
        convert(minimax, tmp_path / "out", recipe, form="sharded", mesh=Mesh(tp=2), jobs=1)
    manifest = convert(minimax, tmp_path / "ep", recipe, form="sharded", mesh=Mesh(tp=2, ep=2), jobs=1)
    schemes = {record.role: record.scheme for record in manifest.tensors if record.dtype == "I8"}
    assert schemes == {"attn.qkv": "w8a8", "attn.o": "w8a8", "expert.gate_up": "w8a8", "expert.down": "w8a8-group128"}


def test_draft_layers_stay_whole_beside_the_ranks(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    manifest = convert(tiny("deepseek_v3"), tmp_path / "out", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    extra = {record.sources[0] for record in manifest.tensors if record.file.startswith("extra-")}
    assert extra == {name for name in tensors(tiny("deepseek_v3")) if name.startswith("model.layers.3.")}
    assert not [name for rank in manifest.ranks for name in rank.files if name.startswith("extra-")]
