"""What a stopped run left is damaged: the same command ends as if it had never been stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import InputError
from tests import stopped as runs
from tests.convert.helpers import tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=runs.COMMANDS)
def left(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A command's name, and a folder with what it makes (`whole`) and what it left when it was stopped (`stopped`)."""
    folder = tmp_path_factory.mktemp(request.param)
    runs.to_the_end(request.param, model, folder / "whole")
    runs.stopped(request.param, model, folder / "stopped")
    return request.param, folder


def emptied(paths: list[Path]) -> None:
    for path in paths:
        rewrite(path, b"")


def cut(paths: list[Path]) -> None:
    for path in paths:
        rewrite(path, path.read_bytes()[:-9])


def exchanged_bytes(paths: list[Path]) -> None:
    """The last byte that differs from its neighbour and that neighbour: a tensor's, where there are tensors."""
    for path in paths:
        raw = bytearray(path.read_bytes())
        at = next(index for index in range(len(raw) - 1, 0, -1) if raw[index] != raw[index - 1])
        raw[at - 1 : at + 1] = raw[at - 1 : at + 1][::-1]
        rewrite(path, bytes(raw))


def of_another(paths: list[Path]) -> None:
    """Each holds what the next one held, each of them whole."""
    held = [path.read_bytes() for path in paths]
    for path, raw in zip(paths, [*held[1:], held[0]], strict=True):
        rewrite(path, raw)


def other_values(paths: list[Path]) -> None:
    """Digits of the text that a note consists of or begins with, so that it stays JSON."""
    for path in paths:
        raw = path.read_bytes()
        at = next(
            index for index in range(len(raw) - 1, 8, -1) if raw[index : index + 1] in b"12345678" and index < 900
        )
        rewrite(path, raw[:at] + b"9" + raw[at + 1 :])


def rewrite(path: Path, raw: bytes) -> None:
    path.unlink()  # files of the artifact are links to records
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [emptied, cut, exchanged_bytes, of_another, other_values])
def test_damaged_notes_are_made_again(
    damage: Callable[[list[Path]], None], left: tuple[str, Path], model: Path, tmp_path: Path
) -> None:
    name, folder = left
    for first in (0, 1):
        out = tmp_path / f"out-{first}"
        shutil.copytree(folder / "stopped", out)
        notes = runs.notes_of(name, out)[first::2]
        assert len(notes) >= 2
        damage(notes)
        runs.to_the_end(name, model, out)
        assert tree(out) == tree(folder / "whole")


def test_the_report_of_a_finished_ladder_that_is_damaged_is_named(model: Path, tmp_path: Path) -> None:
    runs.to_the_end("ladder", model, tmp_path)
    for raw in (b"", b"{}", (tmp_path / "ladder.json").read_bytes()[:-9]):
        (tmp_path / "ladder.json").write_bytes(raw)
        with pytest.raises(InputError, match=r"ladder\.json is not a ladder") as caught:
            runs.to_the_end("ladder", model, tmp_path)
        assert "new folder" in caught.value.hint
