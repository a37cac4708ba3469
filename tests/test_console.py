"""What a terminal would obey is shown as an escape, wherever it comes from: names, patterns, values, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.table import Table
from safetensors.torch import load_file, save_file

from quantkit.archs import roles_snippet
from quantkit.cli import main
from quantkit.console import console, print_json
from quantkit.errors import InputError, first_line, one_line, printable

EVIL = "\x1b[2J\x9b31m\x07\x7f\u202egpj"
SHOWN = r"\x1b[2J\x9b31m\x07\x7f\u202egpj"


def harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x9b\x07\x7f\u202e\r")


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_control_characters_become_escapes_and_everything_else_stays() -> None:
    assert printable(EVIL) == SHOWN
    assert printable(printable(EVIL)) == SHOWN
    plain = "层 é 😀 [red]:smile:\ttab\nnext line \\x1b"
    assert printable(plain) == plain
    assert one_line("a\nb\x00") == r"a\nb\x00"


def test_no_name_forges_a_line_of_an_error() -> None:
    text = str(InputError("bad\nnext: forged", "real", items=["one\nnext: forged"]))
    assert [line for line in text.splitlines() if line.startswith("next:")] == ["next: real"]


def test_an_error_keeps_the_beginning_of_a_text_that_is_a_whole_file() -> None:
    whole = "x" * 10**6
    error = InputError(f"answered {whole}", whole, items=[whole] * 99, choices=[whole] * 9)
    assert len(str(error)) < 24 * 4200
    assert str(error).count(" more characters)") == 1 + 20 + 1 + 1
    assert error.message.startswith("answered xxx")
    assert error.message.endswith("... (995,913 more characters)")
    assert len(error.items) == 99
    assert first_line(ValueError(whole)).endswith("... (995,904 more characters)")


def test_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", EVIL)
    table.add_row(EVIL, "[red]:smile:[/nothing]")
    console().print(table)
    console().print(EVIL)
    said = capsys.readouterr().out
    assert harmless(said)
    assert said.count(SHOWN) == 3
    assert "[red]:smile:[/nothing]" in said


def test_json_holds_the_value_without_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({EVIL: EVIL})
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x9b\x07\x7f")
    assert json.loads(said) == {EVIL: EVIL}


def test_a_snippet_of_odd_names_is_yaml_that_holds_them() -> None:
    name = f'tower."{EVIL}\n'
    snippet = roles_snippet([name])
    assert harmless(snippet)
    assert yaml.safe_load(snippet) == {"roles": {name: "ROLE"}}


@pytest.fixture
def odd(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint of which one tensor, one file and one value of the config are named to harm."""
    root = tmp_path / "model"
    root.mkdir()
    weights = load_file(tiny("llama") / "model.safetensors")
    save_file(weights, root / f"{EVIL}.safetensors")
    save_file({f"{EVIL}.weight": weights["model.norm.weight"]}, root / "more.safetensors")
    config = json.loads((tiny("llama") / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "dtype": EVIL, "rope_parameters": {"rope_type": EVIL}}))
    return root


@pytest.mark.parametrize("command", ["inspect", "convert", "calibrate", "verify"])
def test_commands(command: str, odd: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"]
    said = run(command, odd, *(out if command in ("convert", "calibrate") else []))
    assert said.exit_code
    assert harmless(said.output)
    assert r"\x1b" in said.output


def test_recipes_and_paths(odd: Path, tmp_path: Path) -> None:
    recipe = tmp_path / f"{EVIL}.yaml"
    recipe.write_text(json.dumps({"name": "x", EVIL: 1, "rules": [{"match": EVIL, "scheme": EVIL}]}))
    for words in (["convert", odd, "-o", tmp_path / "out", "--recipe", recipe], ["inspect", tmp_path / EVIL]):
        said = run(*words)
        assert said.exit_code in (2, 3)
        assert harmless(said.output)
        assert r"\x1b" in said.output
