"""Reading ahead: the same bytes in whatever pieces, errors where they belong, nothing left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from quantkit.spec.tensorfile import read_header
from quantkit_runtime import reader
from quantkit_runtime.errors import BrokenShard
from quantkit_runtime.reader import Reader
from quantkit_runtime.shards import Stored

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(1000, dtype=torch.int32),
    "b": torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.5),
    "z": torch.arange(-60, 61, dtype=torch.int8).reshape(11, 11),
}


@pytest.fixture
def stored(tmp_path: Path) -> list[Stored]:
    """Five tensors in two files, with their checksums."""
    found = []
    for file, names in {"first": ("a", "b", "empty"), "second": ("scalar", "z")}.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
        data = (tmp_path / file).read_bytes()
        for name, info in read_header(tmp_path / file).tensors.items():
            assert name in names
            found.append(Stored(file, info, xxhash.xxh3_128_hexdigest(data[info.start : info.end])))
    return found


def taken(found: Reader, stored: Stored) -> torch.Tensor:
    tensor = found.take(stored)
    assert tensor is not None
    return tensor


@pytest.mark.parametrize("piece", [1, 7, 64, 4000, 1 << 20])
def test_pieces_of_any_size_give_the_tensors(
    tmp_path: Path, stored: list[Stored], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE", piece)
    with Reader(tmp_path, stored, CPU, verify=True) as found:
        for one in stored:
            tensor = taken(found, one)
            assert torch.equal(tensor, TENSORS[one.info.name])
            assert tensor.dtype == TENSORS[one.info.name].dtype
        assert found.take(stored[0]) is None  # it was taken


def test_a_tensor_out_of_turn_is_not_given(tmp_path: Path, stored: list[Stored]) -> None:
    with Reader(tmp_path, stored, CPU, verify=True) as found:
        assert found.take(stored[1]) is None
        assert torch.equal(taken(found, stored[0]), TENSORS[stored[0].info.name])


@pytest.mark.parametrize("piece", [16, 1 << 20])
def test_a_flipped_bit_is_found_where_it_lies(
    tmp_path: Path, stored: list[Stored], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE", piece)
    broken = next(one for one in stored if one.info.name == "z")
    data = bytearray((tmp_path / "second").read_bytes())
    data[broken.info.start + 60] ^= 4
    (tmp_path / "second").write_bytes(data)
    with Reader(tmp_path, stored, CPU, verify=True) as found:
        for one in stored:
            if one is broken:
                with pytest.raises(BrokenShard, match="checksum of tensor z"):
                    found.take(one)
            else:
                assert torch.equal(taken(found, one), TENSORS[one.info.name])
    with Reader(tmp_path, [broken], CPU, verify=False) as found:
        assert not torch.equal(taken(found, broken), TENSORS["z"])


def test_a_file_that_ends_early_or_is_missing(tmp_path: Path, stored: list[Stored]) -> None:
    data = (tmp_path / "second").read_bytes()
    (tmp_path / "second").write_bytes(data[:-5])
    last = max((one for one in stored if one.file == "second"), key=lambda one: one.info.end)
    with Reader(tmp_path, [last], CPU, verify=True) as found, pytest.raises(BrokenShard, match="ends early"):
        found.take(last)
    (tmp_path / "second").unlink()
    with Reader(tmp_path, [last], CPU, verify=True) as found, pytest.raises(BrokenShard, match="No such file"):
        found.take(last)


def test_leaving_early_ends_the_threads(tmp_path: Path, stored: list[Stored]) -> None:
    """Nobody takes what was read: the reader waits for room, and must end all the same."""
    before = threading.active_count()
    for _ in range(3):
        with Reader(tmp_path, stored * 10, CPU, verify=True) as found:
            found.take(stored[0])
    assert threading.active_count() == before
