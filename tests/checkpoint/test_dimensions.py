"""Weights with too few or too many sizes, as of a damaged header: every command says so, none fails over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.archs import Key
from quantkit.checkpoint.reader import Source
from quantkit.cli import main as quantkit
from quantkit.inspect import inspect
from quantkit_instruments.cli import main as runtime
from tests.baseline.helpers import with_tokenizer

STACKED = "model.layers.1.mlp.experts."
SMALL = ("--samples", "6", "--seq-len", "16", "--dry-run")
COMMANDS = {
    "inspect": (quantkit, "inspect", "{model}"),
    "plan": (quantkit, "plan", "{model}", "--card-memory", "64"),
    "convert": (quantkit, "convert", "{model}", "-o", "{out}"),
    "kept": (quantkit, "convert", "{model}", "-o", "{out}", "--recipe", "bf16"),
    "sharded": (quantkit, "convert", "{model}", "-o", "{out}", "--format", "sharded", "--tp", "2"),
    "calibrate": (quantkit, "calibrate", "{model}", "-o", "{out}", *SMALL),
    "baseline": (quantkit, "baseline", "{model}", "-o", "{out}", "--texts", "1", "--tokens", "16", "--prompts", "0"),
    "smoke-load": (runtime, "smoke-load", "{model}", "--max-new-tokens", "2"),
}
SIZES_ALONE = ("plan",)
"""Adds up what the headers say, whatever that is."""


@pytest.fixture
def damaged(tiny: Callable[[str], Path], minimax: Path, tmp_path: Path) -> Callable[[str, tuple[int, ...]], Path]:
    """gpt-oss, whose experts are stacked, transposed and interleaved, with one tensor of another shape."""

    def make(name: str, shape: tuple[int, ...]) -> Path:
        model = with_tokenizer(tiny("gpt_oss"), minimax, tmp_path / "model")
        tensors = load_file(model / "model.safetensors")
        tensors[name] = torch.ones(shape, dtype=tensors[name].dtype)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return model

    return make


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{STACKED}down_proj", ()),
        (f"{STACKED}down_proj", (5,)),
        (f"{STACKED}down_proj", (5, 64)),
        (f"{STACKED}gate_up_proj", (5,)),
        (f"{STACKED}gate_up_proj", (5, 0)),
        (f"{STACKED}gate_up_proj", (5, 64, 2, 32)),
        ("model.layers.1.self_attn.o_proj.weight", (64, 64, 1)),
        ("model.layers.1.mlp.router.weight", (320,)),
        ("model.embed_tokens.weight", (131,)),
        ("lm_head.weight", (131, 64, 1)),
    ],
)
def test_a_weight_of_another_number_of_sizes(
    name: str, shape: tuple[int, ...], command: str, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    model = damaged(name, shape)
    program, *words = COMMANDS[command]
    done = CliRunner().invoke(program, [word.format(model=model, out=tmp_path / "out") for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    codes = (0, 3) if command in SIZES_ALONE else (2, 3) if command == "sharded" else (3,)  # 2: nor does it split
    assert done.exit_code in codes, done.output
    if command not in SIZES_ALONE:
        assert name.removesuffix(".weight").rpartition(".")[2] in done.output.replace("\n", "")
        assert str(list(shape)) in done.output


@pytest.mark.parametrize("command", [*COMMANDS])
@pytest.mark.parametrize("shape", [(), (5,), (5, 0), (5, 3), (5, 64, 1)])
def test_a_bias_of_stacked_experts_of_another_shape(
    shape: tuple[int, ...], command: str, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    model = damaged(f"{STACKED}gate_up_proj_bias", shape)
    program, *words = COMMANDS[command]
    done = CliRunner().invoke(program, [word.format(model=model, out=tmp_path / "out") for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == (0 if command in ("inspect", *SIZES_ALONE) else 3), done.output


@pytest.mark.parametrize("shape", [(), (5,), (5, 64), (5, 64, 2, 32)])
def test_an_entry_is_transposed_only_where_it_stacks_matrices(
    shape: tuple[int, ...], damaged: Callable[..., Path]
) -> None:
    source = Source(damaged(f"{STACKED}down_proj", shape))
    entry = source.entries[Key(1, "expert.down")]
    assert not entry.transposed
    assert entry.canonical_shape == shape
    assert entry.int8_nbytes > 0
    sound = source.entries[Key(0, "expert.down")]
    assert sound.transposed
    assert sound.canonical_shape == (sound.shape[0], sound.shape[2], sound.shape[1])


def test_all_of_them_are_listed_once(damaged: Callable[..., Path], tmp_path: Path) -> None:
    model = damaged(f"{STACKED}down_proj", (5, 64))
    (found,) = (problem for problem in inspect(model).problems if "no matrices" in problem.what)
    assert found.items == (f"{STACKED}down_proj: [5, 64] is no matrix of 3 sizes",)
    done = CliRunner().invoke(quantkit, ["convert", str(model), "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 3
    assert done.output.count(f"{STACKED}down_proj: [5, 64]") == 1, json.dumps(done.output)
