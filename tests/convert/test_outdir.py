"""The output folder of long commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import UsageError
from quantkit.outdir import exclusive, options_digest, prepare_output


def test_new_continued_finished(tmp_path: Path) -> None:
    out, options = tmp_path / "a/b", {"seed": 1, "mesh": {"tp": 2}}
    first = prepare_output(out, options, final="done.json")
    assert not first.finished
    assert first.options_digest == options_digest(options)
    (first.work / "partial").mkdir()
    (out / "half").write_text("x")
    assert not prepare_output(out, options, final="done.json").finished
    (out / "done.json").write_text("{}")
    last = prepare_output(out, options, final="done.json")
    assert last.finished
    last.clear_work()
    assert sorted(path.name for path in last.work.iterdir()) == ["options.json"]


def test_the_differing_options_are_named(tmp_path: Path) -> None:
    prepare_output(tmp_path / "out", {"seed": 1, "mesh": {"tp": 2, "pp": 1}}, final="x")
    with pytest.raises(UsageError) as caught:
        prepare_output(tmp_path / "out", {"seed": 1, "mesh": {"tp": 4, "pp": 1}, "new": True}, final="x")
    assert caught.value.items == ("mesh.tp: 2 there, 4 now", "new: null there, true now")


def test_an_interrupted_start_is_continued(tmp_path: Path) -> None:
    (tmp_path / "out/.quantkit-work").mkdir(parents=True)
    assert not prepare_output(tmp_path / "out", {}, final="x").finished


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        prepare_output(tmp_path / "out", {}, final="x")


def test_one_writer(tmp_path: Path) -> None:
    out = prepare_output(tmp_path / "out", {}, final="x")
    with exclusive(out), pytest.raises(UsageError, match="another process"), exclusive(out):
        pass
    with exclusive(out):
        pass
