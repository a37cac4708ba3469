"""Nothing that others wrote is executed: no pickle, no evaluated text, no code of a model; rules over our own code."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli import main as quantkit
from quantkit_instruments.cli import main as runtime

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("quantkit", "runtime", "tools") for path in (ROOT / folder).rglob("*.py"))

PICKLES = frozenset({"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"})
"""Modules that load pickles, or whose readers do."""

FORBIDDEN = {
    "eval": "runs text",
    "exec": "runs text",
    "torch.load": "unpickles",
    "torch.jit.load": "runs code of the file",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "yaml.load": "may build any object",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "builds many objects",
    "os.system": "runs a shell",
    "importlib.util.spec_from_file_location": "runs a file",
    "runpy.run_path": "runs a file",
}

SHELL = {"quantkit/acceptance/stability.py": "the user's own --restart-command"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Dotted names of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_runs_nothing_of_others(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & PICKLES, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).partition(".")[0] not in PICKLES, ast.unparse(node)
    for name, call in calls(tree):
        assert name not in FORBIDDEN, f"line {call.lineno}: {name} {FORBIDDEN.get(name)}"
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("allow_pickle", "False") == "False", f"line {call.lineno}"
        assert options.get("trust_remote_code", "False") == "False", f"line {call.lineno}"
        assert options.get("shell", "False") == "False" or name_of(path) in SHELL, f"line {call.lineno}"
        if name in ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained"):
            assert "trust_remote_code" in options, (
                f"line {call.lineno}: transformers asks at the terminal where it is not said"
            )


def test_the_rules_see_what_they_forbid() -> None:
    assert "quantkit/archs/modeling.py" in set(map(name_of, FILES))
    (found,) = calls(ast.parse("torch.load(path, weights_only=True)"))
    assert found[0] in FORBIDDEN


def test_the_shell_is_where_it_is_said() -> None:
    for name in SHELL:
        assert "shell=True" in (ROOT / name).read_text(encoding="utf-8")


def test_a_models_own_code_is_not_run(tmp_path: Path, minimax: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named for config, tokenizer and model; nobody is asked either, at a terminal as little as elsewhere."""
    model, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(minimax, model)
    (model / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Own: pass\n")
    maps = {
        "config.json": {"AutoConfig": "own.Own"},
        "tokenizer_config.json": {"AutoTokenizer": ["own.Own", "own.Own"]},
    }
    for name, auto_map in maps.items():
        values = {**json.loads((model / name).read_text()), "auto_map": auto_map, "tokenizer_class": "Own"}
        (model / name).write_text(json.dumps(values))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    out = tmp_path / "out"
    small = ("--samples", "6", "--seq-len", "16", "--dry-run")
    for program, words in (
        (quantkit, ("inspect", model)),
        (quantkit, ("calibrate", model, "-o", out, *small)),
        (quantkit, ("convert", model, "-o", out, "--dry-run")),
        (runtime, ("smoke-load", model, "--max-new-tokens", "1")),
    ):
        result = CliRunner().invoke(program, [str(word) for word in words])
        assert result.exit_code in (0, 3), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert not ran.exists(), words
