"""A checkpoint folder by its index and headers: disagreement, absence, odd names, hostile JSON."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantkit.errors import InputError
from quantkit.inspect import read_headers
from quantkit.spec import index as index_module
from quantkit.spec.index import INDEX_NAME, SINGLE_NAME, open_checkpoint, read_json
from quantkit.spec.tensorfile import TensorInfo

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TENSORS = {FILES[0]: {"a": torch.zeros(2, 3), "b": torch.zeros(4)}, FILES[1]: {"c": torch.zeros(5)}}
WEIGHT_MAP = {name: file for file, tensors in TENSORS.items() for name in tensors}
TOTAL = 4 * (6 + 4 + 5)


def write_index(folder: Path, document: Any) -> None:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    (folder / INDEX_NAME).write_bytes(raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and their index, in a folder whose name needs care."""
    found = tmp_path / "模型 [v1] *"
    found.mkdir()
    for file, tensors in TENSORS.items():
        save_file(tensors, found / file)
    write_index(found, {"metadata": {"total_size": TOTAL}, "weight_map": WEIGHT_MAP})
    return found


def refused(folder: Path, *says: str, **options: bool) -> InputError:
    with pytest.raises(InputError) as error:
        open_checkpoint(folder, **options)
    for text in says:
        assert text in str(error.value)
    return error.value


def test_index_and_files_agree(folder: Path) -> None:
    found = open_checkpoint(folder)
    assert list(found.headers) == list(FILES)
    assert found.file_of == WEIGHT_MAP
    assert found.names == ("a", "b", "c")
    info = found.info("a")
    assert isinstance(info, TensorInfo)
    assert (info.dtype, info.shape) == ("F32", (2, 3))


@pytest.mark.parametrize(
    "metadata", [None, {}, {"total_size": float(TOTAL)}, {"total_size": "60"}, {"total_size": None}, 7]
)
def test_metadata_may_be_missing_or_odd(folder: Path, metadata: Any) -> None:
    write_index(folder, {"metadata": metadata, "weight_map": WEIGHT_MAP})
    assert open_checkpoint(folder).file_of == WEIGHT_MAP


def test_all_disagreements_are_listed_at_once(folder: Path) -> None:
    stale = {"a": FILES[1], "gone": FILES[0], "c": FILES[1]}
    write_index(folder, {"metadata": {"total_size": 61}, "weight_map": stale})
    error = refused(folder, "index and files disagree", "--ignore-index")
    assert sorted(error.items) == [
        f"a: in the index, not in {FILES[1]}",
        f"b: in {FILES[0]}, not in the index",
        f"gone: in the index, not in {FILES[0]}",
        "metadata.total_size: 61 in the index, the files' tensors hold 60",
    ]
    assert open_checkpoint(folder, ignore_index=True).file_of == WEIGHT_MAP


def test_files_that_the_index_names_are_missing(folder: Path) -> None:
    (folder / FILES[1]).unlink()
    assert refused(folder, "names files that are not there").items == (FILES[1],)
    assert refused(folder, "do not fit together", ignore_index=True).items == ("model: only 1 of 2 files are there",)


def test_a_tensor_twice_is_refused_with_another_remedy_than_the_option_in_use(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "other.safetensors")
    error = refused(folder, "do not fit together", ignore_index=True)
    assert error.items == (f"a: both in {FILES[0]} and in other.safetensors",)
    assert "--ignore-index" not in error.hint


def test_rank_shards_are_recognised(tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"embed.weight": torch.zeros(1)}, tmp_path / f"stage0-tp{rank}-00001.safetensors")
    assert "copy their manifest.json here too" in refused(tmp_path, "holds rank shards, not a checkpoint").hint
    (tmp_path / "manifest.json").write_text("{}")
    assert refused(tmp_path, "holds rank shards, not a checkpoint").hint.startswith("`quantkit verify` checks them")
    with pytest.raises(InputError, match="holds rank shards"):
        read_headers(tmp_path)


def test_a_file_of_the_series_that_the_index_leaves_out(folder: Path) -> None:
    write_index(folder, {"weight_map": {"a": FILES[0], "b": FILES[0]}})
    assert refused(folder).items == (f"{FILES[1]}: not in the index",)
    (folder / FILES[1]).rename(folder / "consolidated.safetensors")  # another form of the weights is not ours to judge
    assert list(open_checkpoint(folder).headers) == [FILES[0]]


@pytest.mark.parametrize(
    "names", [("00000-of-000002", "00001-of-000002"), ("1-of-2", "2-of-2"), ("00001-of-000002", "2-of-000002")]
)
def test_series_are_numbered_as_their_writers_like(tmp_path: Path, names: tuple[str, str]) -> None:
    for i, name in enumerate(names):
        save_file({f"t{i}": torch.zeros(1)}, tmp_path / f"model-{name}.safetensors")
    assert len(open_checkpoint(tmp_path).names) == 2
    (tmp_path / f"model-{names[0]}.safetensors").unlink()
    refused(tmp_path, "model: only 1 of 2 files are there", "copy the checkpoint again")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "holds list, not an object"),
        (b"null", "holds NoneType"),
        (b'"weight_map"', "holds str"),
        (b"\xff\xfe{}", "not valid JSON"),
        (json.dumps({"weight_map": WEIGHT_MAP}).encode("utf-16"), "not valid JSON"),
        (b'{"weight_map":' + b"[" * 300_000 + b"]" * 300_000 + b"}", "not valid JSON"),
        (b'{"weight_map":' + b'{"a":' * 300_000 + b"1" + b"}" * 300_000 + b"}", "not valid JSON"),
        (b'{"weight_map":{"a":"' + FILES[0].encode() + b'","a":"' + FILES[1].encode() + b'"}}', "'a' stands twice"),
        ({}, "no weight_map"),
        ({"weight_map": None}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": 1, "b": None, "c": [FILES[0]]}}, "a: 1"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "outside the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside the folder"),
        ({"weight_map": {"a": "sub/model.safetensors"}}, "outside the folder"),
        ({"weight_map": {"a": ".."}}, "outside the folder"),
        ({"weight_map": {"a": "."}}, "outside the folder"),
        ({"weight_map": {"a": ""}}, "outside the folder"),
        ({"weight_map": {"a": "nul\0.safetensors"}}, "not there"),
        ({"weight_map": {"a": "n" * 300}}, "not there"),
        ({"weight_map": {"a": INDEX_NAME}}, "not a sound safetensors file"),
    ],
)
def test_an_index_that_is_none(folder: Path, document: Any, says: str) -> None:
    write_index(folder, document)
    refused(folder, says)
    assert open_checkpoint(folder, ignore_index=True).file_of == WEIGHT_MAP


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file({"a": torch.ones(2, 3), "c": torch.zeros(5)}, folder / FILES[1])
    assert f"a: both in {FILES[0]} and in {FILES[1]}" in refused(folder).items
    refused(folder, "a: both in", ignore_index=True)


def test_all_broken_files_are_listed_at_once(folder: Path) -> None:
    for file in FILES:
        os.truncate(folder / file, (folder / file).stat().st_size - 1)
    error = refused(folder, "2 files cannot be read")
    assert len(error.items) == 2
    assert all(file in item and "truncated" in item for file, item in zip(FILES, error.items, strict=True))
    save_file(TENSORS[FILES[1]], folder / FILES[1])
    refused(folder, FILES[0], "truncated")


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE_NAME)
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert list(open_checkpoint(tmp_path).headers) == [SINGLE_NAME]
    refused(tmp_path, "a: both in", ignore_index=True)


def test_files_by_other_names_and_in_any_order(tmp_path: Path) -> None:
    names = ["z [1].safetensors", "模型 2.safetensors", "a b.safetensors", "-rf.safetensors", "*.safetensors"]
    random.Random(1).shuffle(names)
    for i, name in enumerate(names):
        save_file({f"t{i}": torch.zeros(1)}, tmp_path / name)
    (tmp_path / "._a b.safetensors").write_bytes(b"resource fork of another system")
    found = open_checkpoint(tmp_path)
    assert list(found.headers) == sorted(names)
    assert set(found.file_of) == {f"t{i}" for i in range(5)}
    write_index(tmp_path, {"weight_map": dict(reversed(found.file_of.items()))})
    assert open_checkpoint(tmp_path).file_of == found.file_of


def test_no_folder_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "does not exist", "give the folder")
    refused(tmp_path, "holds no *.safetensors file")
    (tmp_path / "file").write_bytes(b"x")
    refused(tmp_path / "file", "is a file, not a folder")
    refused(tmp_path / "nul\0", "null byte")
    refused(tmp_path / ("n" * 300), "name too long")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "symbolic links")


def test_a_folder_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_module.os, "scandir", denied)
    refused(folder, "Permission denied")


def test_pipes_and_folders_in_the_place_of_files(folder: Path) -> None:
    signal.alarm(20)  # opening a pipe for reading blocks for ever: the default action ends the run
    try:
        for victim in (INDEX_NAME, FILES[0]):
            original = (folder / victim).read_bytes()
            for make, says in ((os.mkfifo, "is a pipe or device"), (os.mkdir, "is a folder")):
                (folder / victim).unlink()
                make(folder / victim)
                refused(folder, victim, says)
                if make is os.mkdir:
                    (folder / victim).rmdir()
                    (folder / victim).write_bytes(original)
    finally:
        signal.alarm(0)


def test_symlinked_files(tmp_path: Path, folder: Path) -> None:
    view = tmp_path / "view"
    view.mkdir()
    for path in folder.iterdir():
        (view / path.name).symlink_to(path)
    assert open_checkpoint(view).file_of == WEIGHT_MAP
    (tmp_path / "link").symlink_to(view)
    assert open_checkpoint(tmp_path / "link").file_of == WEIGHT_MAP
    (folder / FILES[0]).unlink()
    refused(view, FILES[0], "No such file")


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": Infinity, "b": {"c": 1, "c": 1}, "模": "型"}', encoding="utf-8")
    assert read_json(path) == {
        "a": float("inf"),
        "b": {"c": 1},
        "模": "型",
    }  # configs hold Infinity, and repeat themselves
    path.write_text('{"b": {"c": 1, "c": 2}}')
    with pytest.raises(InputError, match="'c' stands twice with different values"):
        read_json(path)


def test_a_huge_json_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")
    os.truncate(path, 2**41)
    with pytest.raises(InputError, match="too many"):
        read_json(path)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*FILES, "..", "/", "x"])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["weight_map", "metadata"]), values, max_size=2))
@settings(max_examples=200, deadline=None)
def test_any_index_is_exact_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any index"
    if not folder.exists():
        folder.mkdir()
        for file, tensors in TENSORS.items():
            save_file(tensors, folder / file)
    write_index(folder, document)
    try:
        found = open_checkpoint(folder)
    except InputError:
        return
    assert found.file_of == document["weight_map"]
