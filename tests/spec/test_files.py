"""Foreign files are read within bounds, their names stay inside their folder, and links are told apart."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from quantkit.spec.files import exists, is_file, is_folder, is_inside, leads_out, read_whole


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_whole(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="100 bytes, more than 99"):
        read_whole(path, 99)


@pytest.mark.parametrize("name", ["/dev/zero", "a\0b", "missing", "."])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        read_whole(tmp_path / name, 1000)


def test_a_pipe_is_read_only_where_a_user_named_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe or device"):
        read_whole(pipe)  # without waiting for a writer
    writer = threading.Thread(target=pipe.write_bytes, args=(b"a: 1",))
    writer.start()
    assert read_whole(pipe, pipes=True) == b"a: 1"
    writer.join()


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a", "a../b", "...", "a//b", "./a"])
def test_names_inside(name: str) -> None:
    assert is_inside(name)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/a", "../a", "a/..", "a/../../b", "a\0", "//a"])
def test_names_outside(name: str) -> None:
    assert not is_inside(name)


def test_links(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (tmp_path / "other").write_text("x")
    (model / "own").write_text("x")
    (model / "sub/up").symlink_to("../own")
    (model / "out").symlink_to("../other")
    (model / "folder").symlink_to("..")
    (tmp_path / "view").symlink_to("model")
    for root in (model, tmp_path / "view"):
        assert not leads_out(root, root / "own")
        assert not leads_out(root, root / "sub/up")
        assert leads_out(root, root / "out")
        assert leads_out(root, root / "folder/other")


def test_the_hub_cache_lies_inside_of_itself(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, other = repository / "snapshots/0123", tmp_path / "models--org--other/blobs"
    for folder in (snapshot, repository / "blobs", other):
        folder.mkdir(parents=True)
    (repository / "blobs/a").write_text("x")
    (other / "b").write_text("x")
    (snapshot / "config.json").symlink_to("../../blobs/a")
    (snapshot / "tokenizer.json").symlink_to("../../../models--org--other/blobs/b")
    assert not leads_out(snapshot, snapshot / "config.json")
    assert leads_out(snapshot, snapshot / "tokenizer.json")


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30), "a\0b", "\ud800", "file/x", "loop"])
def test_a_name_that_no_file_can_have_is_of_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert not is_file(tmp_path / name)
    assert not is_folder(tmp_path / name)
    assert not exists(tmp_path / name)


def test_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert [is_file(tmp_path / name) for name in ("file", "link", ".", "none")] == [True, True, False, False]
    assert [is_folder(tmp_path / name) for name in ("file", "link", ".", "none")] == [False, False, True, False]
    assert [exists(tmp_path / name) for name in ("file", "link", ".", "none")] == [True, True, True, False]
