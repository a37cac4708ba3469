"""Sound files that cases damage: made once in a folder, by the commands themselves, small and random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.calibrate.run import make_plan, run_plan
from quantkit.convert.run import convert
from quantkit.recipe import Recipe, load_recipe
from quantkit.report import calibration as report
from quantkit.spec.mesh import Mesh
from quantkit_instruments.cli import main as runtime
from tests.baseline.helpers import make_baseline, with_tokenizer
from tests.checkpoint.native import CONFIGS
from tests.checkpoint.test_source_formats import pack
from tests.families import make_tiny
from tests.fuzz.mutate import BAIT
from tests.stopped import COMMANDS, small_model, stopped, to_the_end

MODELS = Path(__file__).parents[1] / "models"
FAMILIES = ("llama", "deepseek_v3", "gpt_oss", "gemma3_vl", "qwen3_next")
"""Beside MiniMax-M2: dense, latent attention, stacked experts with biases, a vision tower, linear attention."""

INDEX = "model.safetensors.index.json"


def make(root: Path) -> Path:
    """The corpus in `root`, made unless it is there.

    `model` (two files and an index, tokenizer, generation config), `family-NAME`, `int8` (checkpoint), `shards` (of two
    ranks), `calibration`, `baseline`,
    `compared` (unquantized, with a saved comparison), `small` (a model), and of every command of `stopped.COMMANDS`
    what it makes of that, `whole-NAME`, and what it left when it was stopped, `stopped-NAME`.
    """
    if (root / "done").is_file():
        return root
    root.mkdir(parents=True, exist_ok=True)
    donor = MODELS / "tiny-minimax-m2"
    model = in_two(with_tokenizer(make_tiny("minimax_m2", root / "raw"), donor, root / "model"))
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in FAMILIES:
        make_tiny(name, root / f"family-{name}")
    for fmt in ("fp8-block", "fp8-channel"):
        _native(model, root / fmt, fmt)
    small = {"samples": 18, "seq_len": 48, "min_tokens_per_expert": 1, "held_out": 0}
    values = load_recipe("w8a8").model_dump()
    recipe = Recipe.model_validate({**values, "calibration": {**values["calibration"], **small}})
    _without_drawing(lambda: run_plan(make_plan(model, recipe), root / "calibration"))
    convert(model, root / "int8", load_recipe("w8a8"), calibration=root / "calibration", jobs=1)
    convert(model, root / "shards", load_recipe("w8a8"), form="sharded", mesh=Mesh(tp=2, ep=2), jobs=1)
    convert(model, root / "one", load_recipe("w8a8"), form="sharded", jobs=1)
    make_baseline(model, root / "baseline")
    convert(model, root / "compared", load_recipe("bf16"), jobs=1)
    done = CliRunner().invoke(runtime, ["compare", str(root / "baseline"), str(root / "compared"), "--save"])
    if done.exit_code:
        raise RuntimeError(done.output) from done.exception
    small_model(root)
    for name in COMMANDS:
        to_the_end(name, root / "small", root / f"whole-{name}")
        stopped(name, root / "small", root / f"stopped-{name}")
    (root / "done").write_text("")
    return root


def _native(model: Path, out: Path, fmt: str) -> None:
    """The model with its experts in a native format, in one file."""
    copy(model, out)
    tensors = {name: tensor for path in sorted(model.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    for path in (*out.glob("*.safetensors"), out / INDEX):
        path.unlink()
    packed, _ = pack(tensors, [name for name in tensors if ".experts." in name], fmt)
    save_file(packed, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    replace(out / "config.json", json.dumps({**config, "quantization_config": CONFIGS[fmt]}).encode())


def _without_drawing(run: Callable[[], object]) -> None:
    """A report takes longer than the calibration of a tiny model."""
    drawn, report.render = report.render, lambda _summary: "report"  # type: ignore[assignment]  # a function for a while
    try:
        run()
    finally:
        report.render = drawn


def in_two(model: Path) -> Path:
    """The checkpoint in two files with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, half in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, model / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return model


def workspace(root: Path, corpus: Path) -> Path:
    """A folder for the cases of one process: the bait lies in it, with files that would be read with success."""
    root.mkdir(parents=True, exist_ok=True)
    if not (root / BAIT).is_dir():
        copy(corpus / "model", root / BAIT)
        shutil.copyfile(corpus / "family-llama" / "model.safetensors", root / BAIT / "model.safetensors")
    return root


def copy(source: Path, target: Path) -> Path:
    """A copy that shares the files' data; whoever changes one replaces it."""
    shutil.copytree(source, target, copy_function=_link)
    return target


def _link(source: str, target: str) -> str:
    Path(target).hardlink_to(source)
    return target


def replace(path: Path, content: bytes) -> None:
    """Other content for a file of a copy; the original stays."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
