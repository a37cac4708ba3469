"""A family that nobody wrote a record for: everything unknown is listed, and the printed snippet solves it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from quantkit.archs import architecture_for, with_roles
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError, UsageError
from quantkit.recipe import parse_recipe
from tests.families import make_tiny

RENAMED = {
    r"^model\.norm\.": "model.final_ln.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".norm.",  # outside the layers `norm` means another thing
    r"\.mlp\.experts\.(\d+)\.gate_proj\.": r".moe.experts.\1.wi_0.",
    r"\.mlp\.experts\.(\d+)\.up_proj\.": r".moe.experts.\1.wi_1.",
    r"\.mlp\.experts\.(\d+)\.down_proj\.": r".moe.experts.\1.wo.",
    r"\.mlp\.gate\.": ".moe.selector.",
}

ANSWERS = {
    "final_ln": "norm.final",
    "layers.*.ln_1": "norm.input",
    "layers.*.norm": "norm.pre_mlp",
    "layers.*.moe.experts.*.wi_0": "expert.gate",
    "layers.*.moe.experts.*.wi_1": "expert.up",
    "layers.*.moe.experts.*.wo": "expert.down",
    "layers.*.moe.selector": "router",
    "layers.*.moe.score_shift": "router.correction",
    "audio_tower.**": "vision",
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("original"), mlp_only_layers=[])


@pytest.fixture(scope="module")
def invented(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invented")
    tensors = {}
    for name, value in load_file(original / "model.safetensors").items():
        for pattern, replacement in RENAMED.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = value
    for layer in range(3):
        tensors[f"model.layers.{layer}.moe.score_shift"] = torch.ones(5)
    for block in range(2):
        tensors[f"audio_tower.blocks.{block}.attn.weight"] = torch.ones(2, 2)
        tensors[f"audio_tower.blocks.{block}.attn.bias"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "invented"}))
    return folder


def _snippet(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        Source(folder).require_classified()
    return str(caught.value.hint[caught.value.hint.index("roles:") :])


def test_all_unknown_names_are_listed_and_each_pattern_once(invented: Path) -> None:
    source = Source(invented)
    unknown = [name for name in source.index.names if not re.search(r"self_attn|embed_tokens|lm_head", name)]
    with pytest.raises(InputError) as caught:
        source.require_classified()
    assert sorted(caught.value.items) == sorted(unknown)
    assert "router.correction" in caught.value.choices
    snippet = yaml.safe_load(_snippet(invented))
    assert snippet == {"roles": dict.fromkeys(ANSWERS, "ROLE")}
    assert _snippet(invented).count("\n") == len(ANSWERS)


def test_the_answered_snippet_classifies_everything(invented: Path, original: Path) -> None:
    answered = _snippet(invented)
    for pattern, role in ANSWERS.items():
        answered = answered.replace(f'"{pattern}": ROLE', f'"{pattern}": {role}')
    assert "ROLE" not in answered
    recipe = parse_recipe(f"name: mine\ndescription: of a new family\n{answered}", "mine.yaml")
    source = Source(invented, extra_roles=recipe.roles)
    source.require_classified()
    reference = Source(original)
    for key in reference.entries:
        assert torch.equal(source.get(key), reference.get(key)), key
    added = source.entries.keys() - reference.entries.keys()
    assert {key.role for key in added} == {"router.correction", "vision"}
    assert len(added) == 3 + 4


def test_the_snippet_as_printed_is_refused_with_the_choices(invented: Path) -> None:
    with pytest.raises(UsageError, match="unknown roles") as caught:
        Source(invented, extra_roles=yaml.safe_load(_snippet(invented))["roles"])
    assert len(caught.value.items) == len(ANSWERS)
    assert "norm.final" in caught.value.choices


def test_a_pattern_that_fits_nothing_is_an_error(invented: Path) -> None:
    with pytest.raises(UsageError, match="fit no tensor") as caught:
        Source(invented, extra_roles={**ANSWERS, "layers.*.moe.slector": "router", "video_tower.**": "vision"})
    assert caught.value.items == ("layers.*.moe.slector", "video_tower.**")


def test_a_subtree_cannot_be_one_tensor() -> None:
    with pytest.raises(UsageError, match="whole subtree"):
        with_roles(architecture_for({"model_type": "invented"}), {"layers.*.moe.**": "router"})


def test_a_layer_pattern_leaves_names_outside_the_layers_alone() -> None:
    arch = with_roles(architecture_for({"model_type": "invented"}), {"layers.*.norm": "norm.pre_mlp"})
    inside, outside = arch.parse("model.layers.1.norm.weight"), arch.parse("model.norm.weight")
    assert inside is not None
    assert outside is not None
    assert (inside.role, outside.role) == ("norm.pre_mlp", "norm.final")
