"""Everything that goes wrong at a user's hands: exit code, what, where, the next step; and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.acceptance.conftest import MODELS, SMALL, cli, smoke_load, snapshot, split_checkpoint, succeeded

WRITERS = ("calibrate", "convert")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_checkpoint(MODELS / "tiny-minimax-m2", tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def source(intact: Path, tmp_path: Path) -> Path:
    """A copy in two shards that a test may damage."""
    return Path(shutil.copytree(intact, tmp_path / "model"))


def write(command: str, source: Path, out: Path, *options: str) -> Result:
    return cli(command, source, "-o", out, *options)


def refused(result: Result, code: int, *words: str) -> None:
    """The right exit code, no traceback, every word in the message, and a next step."""
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    assert isinstance(result.exception, SystemExit)
    assert any(line.startswith("error: ") for line in result.stderr.splitlines()), result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert "next: " in result.stderr or "choices: " in result.stderr, result.stderr


@pytest.mark.parametrize("command", WRITERS)
def test_wrong_path(command: str, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    refused(write(command, missing, tmp_path / "out"), 3, str(missing), "does not exist")
    assert not (tmp_path / "out").exists()


def test_wrong_path_for_readers(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    for result in (cli("inspect", missing), cli("verify", missing), smoke_load(missing)):
        refused(result, 3, str(missing))


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_unreadable_json(command: str, name: str, source: Path, tmp_path: Path) -> None:
    (source / name).write_text('{"model_type": ')
    before = snapshot(source)
    refused(write(command, source, tmp_path / "out"), 3, str(source / name), "not valid JSON")
    assert snapshot(source) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", WRITERS)
def test_missing_shard(command: str, source: Path, tmp_path: Path) -> None:
    (source / "model-00002-of-00002.safetensors").unlink()
    refused(write(command, source, tmp_path / "out"), 3, "model-00002-of-00002.safetensors", "not there")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", WRITERS)
def test_truncated_shard(command: str, source: Path, tmp_path: Path) -> None:
    path = source / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(write(command, source, tmp_path / "out"), 3, str(path), "truncated")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", WRITERS)
def test_output_folder_in_use(command: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("a user's file")
    refused(write(command, source, out), 2, str(out))
    assert (out / "notes.txt").read_text() == "a user's file"
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("place", [".", "inside", "link"])
def test_output_in_the_source(command: str, place: str, source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    out = source / place
    if place == "link":
        out = tmp_path / "link"
        out.symlink_to(source)
    refused(write(command, source, out), 2, "source", str(out))
    assert snapshot(source) == before
    assert not (source / "inside").exists()


@pytest.mark.parametrize("command", WRITERS)
def test_unknown_recipe_key(command: str, source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\ndescription: a test\nschema: w8a8\n")
    refused(write(command, source, tmp_path / "out", "--recipe", str(recipe)), 2, str(recipe), "schema", "choices: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", WRITERS)
def test_other_options_in_a_finished_folder(command: str, tmp_path: Path) -> None:
    small = SMALL if command == "calibrate" else ()
    out = tmp_path / "out"
    succeeded(write(command, MODELS / "tiny-minimax-m2", out, *small))
    before = snapshot(out)
    refused(write(command, MODELS / "tiny-minimax-m2", out, "--recipe", "bf16", *small), 2, str(out), "recipe")
    assert snapshot(out) == before
    succeeded(write(command, MODELS / "tiny-minimax-m2", out, *small))
    assert snapshot(out) == before


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_flipped_byte(form: str, tmp_path: Path, converted: Callable[[str, str, str], Path]) -> None:
    """One bit of one weight: `verify` names file and tensor, the loader refuses to run it."""
    folder = Path(shutil.copytree(converted("tiny-minimax-m2", form, "w8a8"), tmp_path / "out"))
    manifest = json.loads(next(folder.glob("*manifest.json")).read_text())
    record = next(row for row in manifest["tensors"] if row["dtype"] == "I8")
    flip(folder / record["file"], record["offset"] + record["nbytes"] // 2)
    result = cli("verify", folder)
    assert result.exit_code == 4
    assert record["file"] in result.output
    assert record["name"] in result.output.replace("\n", "")
    result = smoke_load(folder)
    assert result.exit_code in (3, 4)
    assert record["name"] in result.stderr


def test_flipped_byte_of_a_copied_file(tmp_path: Path, converted: Callable[[str, str, str], Path]) -> None:
    folder = Path(shutil.copytree(converted("tiny-minimax-m2", "checkpoint", "w8a8"), tmp_path / "out"))
    flip(folder / "tokenizer.json", 1000)
    result = cli("verify", folder)
    assert result.exit_code == 4
    assert "tokenizer.json" in result.output


def test_merge_of_what_is_no_shards(source: Path, tmp_path: Path) -> None:
    refused(cli("merge", source, "-o", tmp_path / "out"), 3, "no folder of rank shards", "--format sharded")
    refused(cli("merge", tmp_path / "nothing", "-o", tmp_path / "out"), 3, "no such folder")


def test_another_source(tmp_path: Path, converted: Callable[[str, str, str], Path]) -> None:
    done = cli("verify", converted("tiny-deepseek-v3", "checkpoint", "w8a8"), "--source", MODELS / "tiny-minimax-m2")
    assert done.exit_code == 4
    assert "next: give --source the model that was converted" in done.stdout


def test_nothing_quantized_of_an_int8_source(tmp_path: Path, converted: Callable[[str, str, str], Path]) -> None:
    source = converted("tiny-deepseek-v3", "checkpoint", "w8a8")
    done = cli("convert", source, "-o", tmp_path / "out", "--recipe", "bf16", "--dry-run")
    assert done.exit_code == 0
    text = " ".join((done.stdout + done.stderr).split())
    assert "low-bit weights of the source are written as floats" in text
    assert "bit for bit" not in text
