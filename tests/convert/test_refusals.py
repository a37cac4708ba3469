"""What is refused before anything is written, and how: message, items, exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.cli import main
from quantkit.convert.run import convert
from quantkit.errors import InputError, QuantkitError, UsageError
from quantkit.memory import grows
from quantkit.recipe import Recipe, Rule, load_recipe
from tests.convert.helpers import tree


@pytest.fixture
def source(minimax: Path, tmp_path: Path) -> Path:
    shutil.copytree(minimax, tmp_path / "source")
    return tmp_path / "source"


def refused(
    source: Path, out: Path, kind: type[QuantkitError], match: str, recipe: Recipe | None = None
) -> QuantkitError:
    with pytest.raises(kind) as caught:
        convert(source, out, recipe or load_recipe("w8a8"), jobs=1)
    assert match in str(caught.value), str(caught.value)
    assert not (out / "quantkit_manifest.json").exists()
    assert not (out / ".quantkit-work").exists()
    return caught.value


def test_wrong_paths(tmp_path: Path, source: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path / "out", InputError, "does not exist")
    refused(source / "config.json", tmp_path / "out", InputError, "is a file, not a folder")


def test_unreadable_json(tmp_path: Path, source: Path) -> None:
    (source / "config.json").write_text("{broken")
    refused(source, tmp_path / "out", InputError, "config.json is not valid JSON")


def test_missing_and_truncated_shards(tmp_path: Path, minimax: Path) -> None:
    convert(minimax, tmp_path / "source", load_recipe("bf16"), jobs=1, max_shard_bytes=2_000_000)
    first = tmp_path / "source/model-00001-of-00007.safetensors"
    whole = first.read_bytes()
    first.write_bytes(whole[:-10])
    refused(tmp_path / "source", tmp_path / "out", InputError, "truncated")
    first.unlink()
    error = refused(tmp_path / "source", tmp_path / "out", InputError, "files that are not there")
    assert error.items == (first.name,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.4.block_sparse_moe.experts.9.w2.weight",
        "model.layers.4.block_sparse_moe.gate.weight",
        "model.layers.4.input_layernorm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_weights_that_are_not_finite(name: str, value: float, tmp_path: Path, source: Path) -> None:
    """Quantized or kept: what the model computes with is finite."""
    weights = load_file(source / "model.safetensors")
    row = min(17, len(weights[name]) - 1)
    weights[name][row] = value
    save_file(weights, source / "model.safetensors")
    with pytest.raises(InputError, match=f"{name}: row {row} holds NaN or inf"):
        convert(source, tmp_path / "out", load_recipe("w8a8"), jobs=1)
    assert not (tmp_path / "out/quantkit_manifest.json").exists()


def test_output_places(tmp_path: Path, source: Path) -> None:
    before = tree(source)
    refused(source, source, UsageError, "is the source")
    refused(source, source / "int8", UsageError, "lies inside")
    refused(source, tmp_path, UsageError, "contains")
    (tmp_path / "link").symlink_to(source)
    refused(source, tmp_path / "link", UsageError, "is the source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    error = refused(source, tmp_path / "full", UsageError, "is not empty")
    assert error.items == ("thesis.txt",)
    assert (tmp_path / "full/thesis.txt").read_text() == "mine"
    assert tree(source) == before


def test_all_problems_at_once(tmp_path: Path, source: Path) -> None:
    """A tensor without a role, a rule that matches nothing, half of a fused group kept, a router to quantize."""
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.new_block.weight"] = torch.zeros(3, 3)
    save_file(weights, source / "model.safetensors")
    rules = (
        Rule(match="*.w7.weight", scheme="keep", reason="a name that is not there"),
        Rule(match="model.layers.0.self_attn.k_proj.weight", scheme="keep", reason="half a group"),
        Rule(match="router", scheme="w8a8", reason="never"),
    )
    recipe = load_recipe("w8a8").model_copy(update={"rules": rules})
    error = refused(source, tmp_path / "out", UsageError, "9 problems", recipe)
    text = "\n".join(error.items)
    assert "recipe rule '*.w7.weight' matches no tensor" in text
    assert "layer 0: parts of one fused GEMM have different schemes" in text
    assert text.count("a rule asks for w8a8, but a router (router) is kept") == 6
    assert "model.layers.1.new_block.weight: no role" in text
    assert not (tmp_path / "out").exists()


def test_group_wise_schemes_in_a_checkpoint(tmp_path: Path, source: Path) -> None:
    refused(source, tmp_path / "out", UsageError, "no engine loads scheme w8a8-group128", load_recipe("w8a8-group128"))


def test_too_long_sums(tmp_path: Path, source: Path) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(1, 133_145, dtype=torch.bfloat16)
    save_file(weights, source / "model.safetensors")
    refused(source, tmp_path / "out", UsageError, "K = 133145 overflows int32 sums; legal K: up to 133144")


def test_a_missing_expert(tmp_path: Path, source: Path) -> None:
    weights = load_file(source / "model.safetensors")
    del weights["model.layers.3.block_sparse_moe.experts.5.w1.weight"]
    save_file(weights, source / "model.safetensors")
    with pytest.raises(InputError, match=r"layers.3.expert.*lacks experts 5"):
        convert(source, tmp_path / "out", load_recipe("w8a8"), form="sharded", jobs=1)


def test_stale_index(tmp_path: Path, minimax: Path) -> None:
    source = tmp_path / "source"
    convert(minimax, source, load_recipe("bf16"), jobs=1, max_shard_bytes=2_000_000)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("lm_head.weight")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, tmp_path / "out", InputError, "lm_head.weight")
    convert(source, tmp_path / "out", load_recipe("w8a8"), jobs=1, ignore_index=True)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_a_config_that_counts_no_experts(form: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny("qwen3_next"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 0}))
    with pytest.raises(InputError, match="counts 0 experts, the tensors hold 5"):
        convert(model, tmp_path / "out", load_recipe("w8a8"), form=form, jobs=1)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("shape", [(1, 5, -1), (-1,)])
def test_a_bias_of_another_shape_than_its_weight(
    shape: tuple[int, ...], form: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny("gpt_oss"), tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.down_proj_bias"))
    tensors[name] = tensors[name].reshape(shape)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="biases are not of their weights") as caught:
        convert(model, tmp_path / "out", load_recipe("w8a8"), form=form, jobs=1)
    assert name in str(caught.value)


def test_unknown_recipe_key(tmp_path: Path, source: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: x\ndescription: y\nshceme: w8a8\n")
    arguments = ["convert", str(source), "-o", str(tmp_path / "out"), "--recipe", str(tmp_path / "r.yaml")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "shceme" in result.output
    assert not (tmp_path / "out").exists()


def test_larger_than_the_source_is_said_before(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Scales of very short rows outweigh what INT8 saves: every linear has K = 1."""
    result = CliRunner().invoke(main, ["convert", str(tiny("llama")), "-o", str(tmp_path / "a"), "--dry-run"])
    assert "larger than the source" not in result.output
    convert(tiny("llama"), tmp_path / "int8", load_recipe("w8a8"), jobs=1)
    result = CliRunner().invoke(
        main, ["convert", str(tmp_path / "int8"), "-o", str(tmp_path / "b"), "--recipe", "bf16", "--dry-run"]
    )
    assert "the output is larger than the source" in result.output


def test_plan_and_convert_warn_of_the_same_growth(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tiny("llama"), tmp_path / "int8", load_recipe("w8a8"), jobs=1)
    commands = (
        ("plan", tmp_path / "int8", "--recipe", "bf16", "--card-memory", 64),
        ("convert", tmp_path / "int8", "--recipe", "bf16", "-o", tmp_path / "out", "--dry-run"),
    )

    def warnings() -> list[bool]:
        outputs = [CliRunner().invoke(main, [*map(str, command)]).output for command in commands]
        return ["larger" in output for output in outputs]

    assert warnings() == [True, True]
    monkeypatch.setattr("quantkit.memory.LARGER", 9.0)
    assert warnings() == [False, False]
    monkeypatch.undo()
    assert [grows(1000, size) for size in (900, 1001, 1020, 1021)] == [False, False, False, True]


def test_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(source), "-o", str(tmp_path / "out"), "--format", "sharded", "--tp", "2", "--dry-run"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "stage0-tp1-00001.safetensors" in result.output
    plan = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert plan["quantized"] == 312
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    assert not (tmp_path / "out").exists()


def test_json_stands_alone_on_stdout(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantkit", "convert", str(source), "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["quantized"] == 312


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1000", 1000), ("3k", 3000)]
)
def test_sizes(text: str, expected: int) -> None:
    from quantkit.commands.convert import _bytes

    assert _bytes(text) == expected


@pytest.mark.parametrize("text", ["", "2XB", "0", "-5", "GiB"])
def test_bad_sizes(text: str) -> None:
    from quantkit.commands.convert import _bytes

    with pytest.raises(UsageError, match="is no size"):
        _bytes(text)


def test_inspect_and_plan_refuse_a_rule_that_matches_nothing_as_convert_does(minimax: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: n\ndescription: d\nrules:\n- {match: mla.*, scheme: keep, reason: r}\n")
    said = []
    for words in (
        ["inspect", str(minimax)],
        ["plan", str(minimax), "--card-memory", "64"],
        ["convert", str(minimax), "-o", str(tmp_path / "o")],
    ):
        found = CliRunner().invoke(main, [*words, "--recipe", str(recipe)])
        assert found.exit_code == 2, found.output
        said.append(next(line for line in found.output.splitlines() if "mla.*" in line))
    assert len(set(said)) == 1, said


def test_one_cause_in_many_layers_is_said_once(minimax: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["convert", str(minimax), "-o", str(tmp_path / "o"), "--recipe", "w8a8-group128"])
    assert found.exit_code == 2
    assert found.output.count("  - ") == 1, found.output
    assert "no engine loads scheme w8a8-group128" in found.output


@pytest.mark.parametrize("below", ["", "folder"])
def test_an_output_behind_a_dangling_link_is_refused(minimax: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    found = CliRunner().invoke(main, ["convert", str(minimax), "-o", str(tmp_path / "link" / below)])
    assert found.exit_code == 2
    assert "symbolic link" in found.output
    assert not (tmp_path / "unmounted").exists()
