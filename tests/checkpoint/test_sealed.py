"""Notes of unfinished work: each byte of a file, and its name, is under its seal."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from quantkit.checkpoint.sealed import is_sealed, read_note, write_note, write_sealed


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    path = tmp_path / "layer-00000.safetensors"
    found = {"b": torch.arange(6).view(2, 3), "a": torch.tensor([1, 2, 3], dtype=torch.int8), "none": torch.empty(0, 2)}
    write_sealed(path, found, {"rows": '["é"]'})
    return path


def test_tensors_are_those_that_were_given(tensors: Path) -> None:
    assert is_sealed(tensors)
    with safe_open(tensors, "pt") as file:
        assert torch.equal(file.get_tensor("b"), torch.tensor([[0, 1, 2], [3, 4, 5]]))
        assert file.get_tensor("a").tolist() == [1, 2, 3]
        assert file.get_tensor("none").shape == (0, 2)
        assert file.metadata()["rows"] == '["é"]'


def test_every_byte_of_tensors_is_sealed(tensors: Path) -> None:
    raw = tensors.read_bytes()
    for at in range(len(raw)):
        tensors.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert not is_sealed(tensors), at
        tensors.write_bytes(raw[:at])
        assert not is_sealed(tensors), at
    size = struct.unpack("<Q", raw[:8])[0]
    spaced = json.dumps(json.loads(raw[8 : 8 + size]), ensure_ascii=False).encode()  # the same values, other bytes
    tensors.write_bytes(struct.pack("<Q", len(spaced)) + spaced + raw[8 + size :])
    assert not is_sealed(tensors)
    tensors.write_bytes(raw)
    assert is_sealed(tensors)


def test_a_note_is_its_text_and_its_seal(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    write_note(path, '{"kl": "é"}')
    text, seal = path.read_text(encoding="utf-8").split("\n")
    assert (text, seal) == ('{"kl": "é"}', xxhash.xxh3_128_hexdigest('{"kl": "é"}decisions.json'.encode()))
    assert read_note(path) == text
    raw = path.read_bytes()
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert read_note(path) is None, at
        path.write_bytes(raw[:at])
        assert read_note(path) is None, at


def test_another_name_is_another_file(tensors: Path, tmp_path: Path) -> None:
    assert not is_sealed(tensors.rename(tmp_path / "layer-00001.safetensors"))
    write_note(tmp_path / "a.json", "{}")
    assert read_note((tmp_path / "a.json").rename(tmp_path / "b.json")) is None


def test_what_is_no_file_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("missing", "folder", "x" * 300):
        assert not is_sealed(tmp_path / name)
        assert read_note(tmp_path / name) is None
