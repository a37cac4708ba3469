"""Every family over every mesh: the gathered shards are the unsharded INT8 model, bit for bit."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantkit.cli import main
from quantkit.convert.merge import merge
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import tensors
from tests.families import FAMILY_NAMES

MESHES = {
    "tp1": Mesh(),
    "tp2": Mesh(tp=2),
    "tp4": Mesh(tp=4),
    "pp2": Mesh(pp=2),
    "pp3-uneven": Mesh(pp=2, pp_policy="explicit", pp_layers=(2, 1)),
    "ep2": Mesh(dp=2, ep=2),
    "ep3": Mesh(dp=3, ep=3, ep_policy="last"),
    "tp2-pp2-ep2": Mesh(tp=2, pp=2, ep=2),
}


def of_dense(mesh: Mesh) -> Mesh:
    """The same mesh for a model without experts."""
    return mesh.model_copy(update={"ep": 1, "ep_policy": "first"})


def is_dense(source: Path) -> bool:
    return not any("experts." in name for name in tensors(source))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_gathering_gives_the_unsharded_model(
    family: str, tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe
) -> None:
    """One mesh for each family in turn here; `make bench` crosses all of them. Verified against the source too."""
    source = tiny(family)
    convert(source, tmp_path / "whole", w8a8, jobs=1)
    report = verify(tmp_path / "whole", source=source)
    assert report.passed, report.failures
    position = FAMILY_NAMES.index(family)
    for name in (list(MESHES)[position % len(MESHES)], "tp2-pp2-ep2"):
        mesh = of_dense(MESHES[name]) if is_dense(source) else MESHES[name]
        convert(source, tmp_path / name, w8a8, form="sharded", mesh=mesh, jobs=1)
        report = verify(tmp_path / name, source=source)
        assert report.passed, report.failures
        merge(tmp_path / name, tmp_path / f"{name}-merged", jobs=1)
        for file in ("model.safetensors", "config.json"):
            assert filecmp.cmp(tmp_path / "whole" / file, tmp_path / f"{name}-merged" / file, shallow=False), name


def test_tensors_without_elements_are_not_lost(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """No rank holds a part of them, and the merged checkpoint has them all the same."""
    model = tmp_path / "model"
    shutil.copytree(tiny("llama"), model)
    more = {"extra.none": torch.zeros(0, 5), "extra.narrow": torch.zeros(3, 0), "extra.scalar": torch.tensor(2.5)}
    save_file(tensors(model) | more, model / "model.safetensors", metadata={"format": "pt"})
    recipe = load_recipe("w8a8").model_copy(update={"roles": {"extra.**": "vision"}})
    convert(model, tmp_path / "whole", recipe, jobs=1)
    convert(model, tmp_path / "shards", recipe, form="sharded", mesh=Mesh(tp=2, pp=2), jobs=1)
    merge(tmp_path / "shards", tmp_path / "merged", jobs=1)
    assert filecmp.cmp(tmp_path / "whole/model.safetensors", tmp_path / "merged/model.safetensors", shallow=False)
    found = tensors(tmp_path / "merged")
    assert {name: found[name].shape for name in more} == {name: tensor.shape for name, tensor in more.items()}
    report = verify(tmp_path / "merged", source=model)
    assert report.passed, report.failures


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_on_a_real_model(name: str, minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """From bf16 and from the INT8 checkpoint the same bytes; another mesh from these shards too."""
    convert(minimax, tmp_path / "whole", w8a8, jobs=1)
    mesh = MESHES[name]
    if mesh.pp_policy == "explicit":
        mesh = Mesh(pp=3, pp_policy="explicit", pp_layers=(1, 3, 2))
    convert(minimax, tmp_path / "a", w8a8, form="sharded", mesh=mesh, jobs=1)
    convert(tmp_path / "whole", tmp_path / "b", w8a8, form="sharded", mesh=mesh, jobs=1)
    convert(tmp_path / "a", tmp_path / "c", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    convert(minimax, tmp_path / "d", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    for left, right in (("a", "b"), ("c", "d")):
        names = sorted(path.name for path in (tmp_path / left).glob("*.safetensors"))
        assert names == sorted(path.name for path in (tmp_path / right).glob("*.safetensors"))
        assert all(filecmp.cmp(tmp_path / left / file, tmp_path / right / file, shallow=False) for file in names)
    assert verify(tmp_path / "c", source=minimax).passed


def test_redundant_experts_by_map(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    mesh = Mesh(dp=2, ep=2, ep_policy="map", expert_map=((15, *range(8)), tuple(range(7, 16))))
    manifest = convert(minimax, tmp_path / "out", w8a8, form="sharded", mesh=mesh, jobs=1)
    assert [rank.experts for rank in manifest.ranks] == list(mesh.expert_map)
    assert verify(tmp_path / "out", source=minimax).passed
    merge(tmp_path / "out", tmp_path / "merged", jobs=1)
    convert(minimax, tmp_path / "whole", w8a8, jobs=1)
    assert filecmp.cmp(tmp_path / "whole/model.safetensors", tmp_path / "merged/model.safetensors", shallow=False)


def test_merge_command(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(minimax, tmp_path / "shards", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    convert(minimax, tmp_path / "whole", w8a8, jobs=1)
    result = CliRunner().invoke(main, ["merge", str(tmp_path / "shards"), "-o", str(tmp_path / "merged"), "--json"])
    assert result.exit_code == 0, result.output
    assert filecmp.cmp(tmp_path / "whole/model.safetensors", tmp_path / "merged/model.safetensors", shallow=False)
    report = verify(tmp_path / "merged", source=minimax)
    assert report.passed, report.failures
    wrong = CliRunner().invoke(main, ["merge", str(tmp_path / "whole"), "-o", str(tmp_path / "again")])
    assert wrong.exit_code == 3


def test_other_files_same_shards(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """The same tensors spread over other files, in another order, without an index."""
    weights = list(tensors(minimax).items())
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = tmp_path / "source"
    shuffled.mkdir()
    for number in range(3):
        part = dict(weights[index] for index in order[number::3])
        save_file(part, shuffled / f"model-{3 - number:05d}-of-00003.safetensors")
    (shuffled / "config.json").write_bytes((minimax / "config.json").read_bytes())
    mesh = Mesh(tp=2, ep=2)
    for form in ("checkpoint", "sharded"):
        for source, name in ((minimax, "a"), (shuffled, "b")):
            convert(source, tmp_path / form / name, w8a8, form=form, mesh=mesh if form == "sharded" else None, jobs=1)  # type: ignore[arg-type]
        for path in (tmp_path / form / "a").glob("*.safetensors"):
            assert filecmp.cmp(path, tmp_path / form / "b" / path.name, shallow=False)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Random sizes of a mixture of experts, and a random mesh that fits them."""
    tp, pp, dp = (
        data.draw(st.sampled_from(sizes), name)
        for sizes, name in (((1, 2, 4), "tp"), ((1, 2, 3), "pp"), ((1, 2, 3), "dp"))
    )
    ep = data.draw(st.sampled_from([n for n in range(1, tp * dp + 1) if (tp * dp) % n == 0]), "ep")
    moe_tp = tp * dp // ep
    kv_heads = data.draw(st.sampled_from([n for n in (1, 2, 4) if n % tp == 0 or tp % n == 0]), "kv_heads")
    sizes = {
        "heads": 4,
        "kv_heads": kv_heads,
        "head_dim": data.draw(st.integers(1, 9), "head_dim"),
        "hidden": data.draw(st.integers(1, 33), "hidden"),
        "width": moe_tp * data.draw(st.integers(1, 7), "width"),
        "experts": data.draw(st.integers(ep, ep + 4), "experts"),
        "layers": data.draw(st.integers(pp, pp + 2), "layers"),
        "vocab": data.draw(st.integers(2, 200), "vocab"),
    }
    policy = data.draw(st.sampled_from(["first", "last", "round_robin"]), "ep_policy")
    mesh = Mesh(tp=tp, pp=pp, dp=dp, ep=ep, ep_policy=policy, pp_policy=data.draw(st.sampled_from(["middle", "last"])))
    with TemporaryDirectory() as folder:
        root = Path(folder)
        _random_moe(root / "source", sizes)
        recipe = load_recipe("w8a8")
        convert(root / "source", root / "whole", recipe, jobs=1)
        convert(root / "source", root / "shards", recipe, form="sharded", mesh=mesh, jobs=1)
        report = verify(root / "shards", source=root / "source")
        assert report.passed, report.failures
        merge(root / "shards", root / "merged", jobs=1)
        assert filecmp.cmp(root / "whole/model.safetensors", root / "merged/model.safetensors", shallow=False)


def _random_moe(folder: Path, sizes: dict[str, int]) -> None:
    """A mixture of experts with the common names and odd sizes."""
    import json

    folder.mkdir()
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    hidden, width, head_dim = sizes["hidden"], sizes["width"], sizes["head_dim"]
    shapes = {
        "model.embed_tokens": (sizes["vocab"], hidden),
        "lm_head": (sizes["vocab"], hidden),
        "model.norm": (hidden,),
    }
    for layer in range(sizes["layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm": (hidden,),
            f"{at}.post_attention_layernorm": (hidden,),
            f"{at}.self_attn.q_proj": (sizes["heads"] * head_dim, hidden),
            f"{at}.self_attn.k_proj": (sizes["kv_heads"] * head_dim, hidden),
            f"{at}.self_attn.v_proj": (sizes["kv_heads"] * head_dim, hidden),
            f"{at}.self_attn.o_proj": (hidden, sizes["heads"] * head_dim),
            f"{at}.mlp.gate": (sizes["experts"], hidden),
        }
        for expert in range(sizes["experts"]):
            for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                shapes[f"{at}.mlp.experts.{expert}.{part}_proj"] = shape
    weights = {f"{name}.weight": torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": sizes["layers"],
        "hidden_size": hidden,
        "vocab_size": sizes["vocab"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": head_dim,
        "moe_intermediate_size": width,
        "num_experts": sizes["experts"],
        "num_experts_per_tok": 1,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
