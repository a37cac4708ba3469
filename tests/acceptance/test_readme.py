"""The README's commands run as they stand there, on the model that they name, and its figures are those of a run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quantkit.recipe import parse_recipe, shipped_recipes
from quantkit_instruments.cli import main as runtime
from tests.acceptance.conftest import ROOT, cli, smoke_load, succeeded

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (\w+) -->\n```\w*\n(.*?)```", re.DOTALL)


def blocks(mark: str) -> list[str]:
    return [text for found, text in BLOCK.findall(README) if found == mark]


def run(line: str) -> Result:
    program, *arguments = shlex.split(line)
    if program == "python":
        assert arguments.pop(0) == "runtime/smoke_load.py"
        return smoke_load(*arguments)
    if program == "quantkit-runtime":
        return CliRunner().invoke(runtime, arguments)
    assert program == "quantkit", f"README marks a command that the test cannot run: {line}"
    return cli(*arguments)


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("run") for line in block.splitlines()]
    assert {shlex.split(line)[1] for line in lines} >= {"inspect", "calibrate", "convert", "verify"}
    for line in lines:
        succeeded(run(line))


def test_shown_output_of_inspect_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = README.split("quantkit inspect tests/models/tiny-minimax-m2\n```\n\n```\n")[1].split("```")[0]
    output = succeeded(cli("inspect", "tests/models/tiny-minimax-m2")).output
    assert [line.split() for line in shown.splitlines()] == [line.split() for line in output.splitlines()]


def test_example_recipes_are_valid() -> None:
    careful, within_budget = (parse_recipe(text, "README.md") for text in blocks("recipe"))
    assert careful.rules[0].match == "expert.down"
    assert within_budget.auto_keep is not None


def test_shipped_recipes_are_named() -> None:
    assert all(f"`{name}`" in README for name in shipped_recipes())


def test_paths_exist() -> None:
    tree = README.split("## The tree\n\n```\n")[1].split("```")[0]
    folder = ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        folder = ROOT if not line.startswith(" ") else folder
        for name in names:
            assert (folder / name).exists(), f"{name} of the README's tree is not there"
        if not line.startswith(" "):
            folder = ROOT / names[0]
