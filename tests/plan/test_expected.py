"""What a config promises against what files hold: every family's tiny model, and the real ones of the tests."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers

from quantkit.archs import Architecture, Kind, architecture_for
from quantkit.archs.expected import expected_tensors
from quantkit.archs.modeling import build_skeleton
from quantkit.archs.roles import Key
from quantkit.archs.structure import layers_of
from quantkit.errors import InputError
from quantkit.memory import inventory
from quantkit.plan.cache import CacheFormat, LayerCache, layer_caches
from quantkit.plan.native import promised_weights
from quantkit.plan.weights import model_weights
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit.spec.tensorfile import read_header
from tests.families import FAMILIES, FAMILY_NAMES, make_tiny

MODELS = Path(__file__).parents[1] / "models"
REAL = ["tiny-minimax-m2", "tiny-deepseek-v3"]

JOINED = {"qkv": "qkvz", "z": "qkvz", "b": "ba", "a": "ba"}
"""Qwen3.5 stores apart what Qwen3-Next fuses; the promise is fused."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def elements(arch: Architecture, tensors: Iterable[tuple[Key, int]]) -> Counter[tuple[int | None, str, str, str]]:
    """Elements by layer, fused role, part and label: the same however parts and experts are stored."""
    found: Counter[tuple[int | None, str, str, str]] = Counter()
    for key, count in tensors:
        role = arch.role(key.role)
        if role.kind is Kind.OPAQUE and role.column == "vision":
            continue
        name = role.fuse or role.name
        head, _, tail = name.partition(".")
        found[
            key.layer, f"{head}.{JOINED.get(tail, tail)}" if head == "linear_attn" else name, key.part, key.label
        ] += count
    return found


def check(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    arch = architecture_for(config)
    dims = arch.dims(config)
    header = read_header(folder / "model.safetensors")
    stored = ((arch.parse(name), info.numel) for name, info in header.tensors.items())
    promised = expected_tensors(arch, dims, config)
    assert elements(arch, ((key, count) for key, count in stored if key)) == elements(
        arch, ((item.key, math.prod(item.shape)) for item in promised)
    )
    # and by rank: the same bytes from headers and from the config (routers' dtypes are a choice of the checkpoint)
    recipe = load_recipe("w8a8")
    sides = [inventory(arch, [header])[0], promised_weights(arch, dims, config)]
    for mesh in (Mesh(), Mesh(tp=2), Mesh(pp=3)):
        for stage, layers in enumerate(mesh.stage_layers(dims.layers)):
            real, guess = (model_weights(arch, dims, recipe, side).stage(mesh, stage, layers) for side in sides)
            for left, right in zip(real, guess, strict=True):
                left.pop("router", None)
                right.pop("router", None)
                assert left == right


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_families(family: str, folders: Path) -> None:
    folder = folders / family
    folder.mkdir()
    check(make_tiny(family, folder))


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    check(MODELS / name)


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if FAMILIES[name].draft.startswith("layer")])
def test_draft_layers(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path, mtp=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    check(tmp_path)


def test_shapes_are_canonical() -> None:
    """Spot checks against the header, shape by shape, where nothing is fused or stacked."""
    config = json.loads((MODELS / REAL[1] / "config.json").read_text())
    arch = architecture_for(config)
    header = read_header(MODELS / REAL[1] / "model.safetensors")
    stored = {arch.parse(name): info for name, info in header.tensors.items()}
    same = 0
    for item in expected_tensors(arch, arch.dims(config), config):
        key = item.key._replace(expert=3) if arch.role(item.key.role).per_expert else item.key
        assert stored[key].shape == item.shape[len(item.shape) - len(stored[key].shape) :]
        same += 1
        if key.expert is None:
            assert stored[key].name == item.name
    assert same > 80


def test_deepseek_v4_in_the_published_spelling_and_in_transformers() -> None:
    """Full size: the lists of its config.json, and the parameters of transformers' class on `meta`."""
    config = transformers.AutoConfig.for_model("deepseek_v4", num_nextn_predict_layers=0)
    theirs = config.to_dict()
    ratio = {"sliding_attention": 0, **config.compress_rates}
    ratios = [ratio[kind] for kind in config.layer_types]
    published = {key: value for key, value in theirs.items() if key not in ("layer_types", "mlp_layer_types")}
    published |= {"compress_ratios": [*ratios, 0], "num_hash_layers": 3, "compress_rates": None}
    arch = architecture_for(theirs)
    dims = arch.dims(theirs)
    assert arch.dims(published) == dims
    layers = layers_of(arch, dims, theirs)
    assert layers_of(arch, dims, published) == layers
    assert [layer.table for layer in layers] == [True] * 3 + [False] * 40
    with pytest.raises(InputError, match="compress_ratios is 'x', not a whole number"):
        layers_of(arch, dims, {**published, "compress_ratios": ["x"]})
    promised = expected_tensors(arch, dims, theirs)
    assert expected_tensors(arch, dims, published) == promised
    state = build_skeleton(config, dtype=torch.bfloat16).state_dict()
    assert sum(math.prod(item.shape) for item in promised) == sum(value.numel() for value in state.values())
    # a selected entry for 4 tokens: 512 values that are key and value, 128 of an index key; the other for 128 tokens
    form, recent = CacheFormat(), 128 * 1024
    found = set(layer_caches(dims, theirs, layers, form))
    assert found == {LayerCache((1024 + 256) // 4, 0, recent), LayerCache(1024 // 128, 0, recent)}
