"""What a user does, by the same command lines; outputs are made once for all tests."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.cli import main

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
TINY = ("tiny-minimax-m2", "tiny-deepseek-v3")
SMALL = ("--samples", "8", "--seq-len", "96")
PIPE = {"COLUMNS": None}
"""Environment in which tables are as wide as they are, whatever terminal the tests were started from."""


def cli(*arguments: str | Path) -> Result:
    """A quantkit command in this process."""
    return CliRunner(env=PIPE).invoke(main, [str(argument) for argument in arguments])


def smoke_load(*arguments: str | Path) -> Result:
    """`runtime/smoke_load.py` in this process."""
    from quantkit.console import expected_failures
    from quantkit_instruments.commands.smoke_load import command

    class Script(type(command)):  # type: ignore[misc]
        def invoke(self, ctx: object) -> object:
            with expected_failures():
                return super().invoke(ctx)

    script = Script(command.name, callback=command.callback, params=command.params)
    return CliRunner(env=PIPE).invoke(script, [str(argument) for argument in arguments])


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result


def snapshot(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, quantkit's scratch folder left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".quantkit-work" not in path.parts
    }


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model name -> folder of a small calibration; do not change it."""

    @cache
    def make(name: str) -> Path:
        out = tmp_path_factory.mktemp("calibrated") / name
        succeeded(cli("calibrate", MODELS / name, "-o", out, *SMALL))
        return out

    return make


@pytest.fixture(scope="session")
def converted(
    tmp_path_factory: pytest.TempPathFactory, calibrated: Callable[[str], Path]
) -> Callable[[str, str, str], Path]:
    """(model name, form, recipe) -> converted folder, w8a8 with the scales of a calibration; do not change it."""

    @cache
    def make(name: str, form: str, recipe: str) -> Path:
        out = tmp_path_factory.mktemp("converted") / f"{name}-{form}-{recipe}"
        scales = ["--calibration", str(calibrated(name))] if recipe == "w8a8" else []
        arguments = ["--format", form, "--recipe", recipe, "--jobs", "1", *scales]
        succeeded(cli("convert", MODELS / name, "-o", out, *arguments))
        return out

    return make


def split_checkpoint(source: Path, out: Path) -> Path:
    """The same model in two shards with an index."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


PYTHON = sys.executable
