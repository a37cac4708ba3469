"""The header parser against hand-made, mutated and hostile files, and against the safetensors package's own reader."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.spec.tensorfile import (
    DTYPE_BITS,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    TensorInfo,
    build_header,
    dtype_name,
    pread_exact,
    read_header,
    read_tensor,
    torch_dtype,
)

ROW = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + payload


def accepted_by_the_package(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
    except (SafetensorError, OSError, ValueError):
        return False
    return True


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail, instead of hanging for ever, when the body blocks."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    old = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A file of the package with every dtype both sides know, scalars, empty tensors and odd names."""
    torch.manual_seed(0)
    tensors = {
        f"t.{dtype}": torch.randint(0, 2, (3, 5)).to(torch_dtype(dtype)) for dtype in DTYPE_BITS if dtype != "F8_E8M0"
    }
    tensors |= {
        "exponents": torch.tensor([[1, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "also empty": torch.empty(3, 0, dtype=torch.int8),
        "模型 [1]": torch.randn(4),
        "": torch.ones(1),
    }
    path = tmp_path / "sample.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "é": "-1 , - [ -"})
    return path


def test_a_file_of_the_package_reads_as_the_package_reads_it(sample: Path) -> None:
    header = read_header(sample)
    with safe_open(sample, "pt") as file:
        assert header.metadata == file.metadata()
        assert set(header.tensors) == set(file.keys())
        assert "F8_E8M0" in {info.dtype for info in header.tensors.values()}
        fd = os.open(sample, os.O_RDONLY)
        for name, info in header.tensors.items():
            wanted, found = file.get_tensor(name), read_tensor(fd, info, path=sample)
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert torch.equal(found.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))
            if found.ndim:
                rows = read_tensor(fd, info, (found.shape[0] // 3, found.shape[0]), path=sample)
                wanted = wanted[found.shape[0] // 3 :]
                assert rows.shape == wanted.shape
                assert torch.equal(rows.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))
        os.close(fd)


def test_rows_outside_a_tensor(sample: Path) -> None:
    info = read_header(sample).tensors["t.F32"]
    fd = os.open(sample, os.O_RDONLY)
    for rows in [(-1, 1), (2, 1), (0, 4), (4, 4)]:
        with pytest.raises(ValueError, match="rows"):
            read_tensor(fd, info, rows, path=sample)
    with pytest.raises(ValueError, match="rows"):
        read_tensor(fd, TensorInfo("scalar", "F32", (), 0, 4), (0, 1), path=sample)
    os.close(fd)


def test_what_we_write_the_package_reads(tmp_path: Path) -> None:
    rows = [("b", "BF16", (2, 3)), ("a", "I8", (5,)), ("模型", "F32", ()), ("none", "F32", (0, 4))]
    path = tmp_path / "ours.safetensors"
    header = build_header(rows, {"z": "1", "a": "2"})
    path.write_bytes(header + bytes(12 + 5 + 4))
    assert len(header) % 8 == 0
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in load_file(path).items()} == {
        "b": ("torch.bfloat16", (2, 3)),
        "a": ("torch.int8", (5,)),
        "模型": ("torch.float32", ()),
        "none": ("torch.float32", (0, 4)),
    }
    assert list(read_header(path).tensors) == ["b", "a", "模型", "none"]


def test_dtype_names_go_both_ways() -> None:
    for name, bits in DTYPE_BITS.items():
        assert dtype_name(torch_dtype(name)) == name
        assert torch_dtype(name).itemsize * 8 == bits


NESTED = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
BAD: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "length only": struct.pack("<Q", 0),
    "length beyond the file": file_of(b"{}", length=3),
    "length of the universe": file_of(b"{}", length=2**64 - 1),
    "not JSON": file_of(b"{abc"),
    "empty object cut": file_of(b"{"),
    "array": file_of([ROW]),
    "string": file_of("abc"),
    "null": file_of(b"null"),
    "leading blank": file_of(b" {}"),
    "byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "trailing comma": file_of(b'{"a":1,}'),
    "two documents": file_of(b"{}{}"),
    "not UTF-8": file_of(b'{"\xff\xfe": 1}'),
    "UTF-16": file_of(json.dumps({"a": ROW}).encode("utf-16-le"), bytes(24)),
    "UTF-32": file_of(json.dumps({"a": ROW}).encode("utf-32-le"), bytes(24)),
    "lone surrogate": file_of(b'{"\\ud800":' + json.dumps(ROW).encode() + b"}", bytes(24)),
    "nesting bomb": file_of(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "nested objects": file_of(NESTED),
    "number of 10,000 digits": file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,24]}}'),
    "tensor named twice": file_of(b'{"a":%b,"a":%b}' % ((json.dumps(ROW).encode(),) * 2), bytes(24)),
    "tensor named twice, escaped": file_of(b'{"a":%b,"\\u0061":%b}' % ((json.dumps(ROW).encode(),) * 2), bytes(24)),
    "dtype twice": file_of(b'{"a":{"dtype":"I8","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}', bytes(24)),
    "metadata twice": file_of(b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"2"}}'),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "metadata array": file_of({"__metadata__": []}),
    "row is null": file_of({"a": None}),
    "row without dtype": file_of({"a": {"shape": [2, 3], "data_offsets": [0, 24]}}, bytes(24)),
    "unknown dtype": file_of({"a": ROW | {"dtype": "F31"}}, bytes(24)),
    "dtype is a list": file_of({"a": ROW | {"dtype": ["F32"]}}, bytes(24)),
    "lower-case dtype": file_of({"a": ROW | {"dtype": "f32"}}, bytes(24)),
    "shape is a number": file_of({"a": ROW | {"shape": 6}}, bytes(24)),
    "shape of strings": file_of({"a": ROW | {"shape": ["2", "3"]}}, bytes(24)),
    "shape of booleans": file_of({"a": {"dtype": "F32", "shape": [True, 6], "data_offsets": [0, 24]}}, bytes(24)),
    "shape of floats": file_of({"a": ROW | {"shape": [2.0, 3]}}, bytes(24)),
    "negative shape": file_of({"a": ROW | {"shape": [-2, -3]}}, bytes(24)),
    "minus zero": file_of(b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[-0,24]}}', bytes(24)),
    "NaN": file_of(b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[NaN,24]}}', bytes(24)),
    "shape beyond memory": file_of({"a": ROW | {"shape": [2**62, 2**62]}}, bytes(24)),
    "overflow before a zero": file_of({"a": {"dtype": "I8", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}),
    "overflow that wraps to the size": file_of({"a": ROW | {"shape": [2**32, 2**32, 6]}}, bytes(24)),
    "a million dimensions": file_of(
        {"a": {"dtype": "I8", "shape": [2**62] * 10**6, "data_offsets": [0, 24]}}, bytes(24)
    ),
    "three offsets": file_of({"a": ROW | {"data_offsets": [0, 24, 24]}}, bytes(24)),
    "offsets reversed": file_of({"a": ROW | {"data_offsets": [24, 0]}}, bytes(24)),
    "offsets too short": file_of({"a": ROW | {"data_offsets": [0, 20]}}, bytes(24)),
    "offset boolean": file_of({"a": {"dtype": "I8", "shape": [1], "data_offsets": [False, True]}}, bytes(1)),
    "overlap": file_of({"a": ROW, "b": ROW}, bytes(24)),
    "partial overlap": file_of({"a": ROW, "b": ROW | {"data_offsets": [12, 36]}}, bytes(36)),
    "hole": file_of({"a": ROW, "b": ROW | {"data_offsets": [28, 52]}}, bytes(52)),
    "hole at the start": file_of({"a": ROW | {"data_offsets": [4, 28]}}, bytes(28)),
    "truncated": file_of({"a": ROW}, bytes(23)),
    "trailing byte": file_of({"a": ROW}, bytes(25)),
    "payload without tensors": file_of({}, bytes(1)),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[name])
    with within(20), pytest.raises(InputError) as error:
        read_header(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 2000


GOOD: dict[str, bytes] = {
    "no tensors": file_of({}),
    "padding after the header": file_of(b"{}        "),
    "metadata only": file_of({"__metadata__": {}}),
    "unsorted": file_of({"b": ROW | {"data_offsets": [24, 48]}, "a": ROW}, bytes(48)),
    "empty tensors share an offset": file_of(
        {n: {"dtype": "F32", "shape": [0, n_], "data_offsets": [0, 0]} for n, n_ in (("a", 1), ("b", 2))} | {"c": ROW},
        bytes(24),
    ),
    "scalar": file_of({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    "name with escapes": file_of({'a"\n\\': ROW}, bytes(24)),
    "64 dimensions": file_of({"a": {"dtype": "I8", "shape": [1] * MAX_DIMENSIONS, "data_offsets": [0, 1]}}, bytes(1)),
}


@pytest.mark.parametrize("name", GOOD)
def test_accepted_as_by_the_package(tmp_path: Path, name: str) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(GOOD[name])
    read_header(path)
    assert accepted_by_the_package(path)


def test_header_of_zeros_is_bounded(tmp_path: Path) -> None:
    """A sparse file that claims a header of terabytes costs neither memory nor time."""
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**41)
    with within(5), pytest.raises(InputError, match="claims 1099511627776 bytes"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    with pytest.raises(InputError, match="claims"):
        read_header(path)
    assert not accepted_by_the_package(path)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """One to three edits of the header (flipped bits, other characters, cut, doubled), sometimes of the rest too."""
    length = struct.unpack("<Q", raw[:8])[0]
    text, payload = bytearray(raw[8 : 8 + length]), raw[8 + length :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text))
        edit = rng.randrange(5)
        if edit == 0:
            text[at] ^= 1 << rng.randrange(8)
        elif edit == 1:
            text[at] = rng.choice(b'0123456789-.,:[]{}" \\eEtn\x00\xff')
        elif edit == 2:
            del text[at : at + rng.randint(1, 4)]
        elif edit == 3:
            text[at:at] = text[at : at + rng.randint(1, 30)]
        else:
            text[at:at] = rng.choice((b" ", b"0", b"-", b"\n", b"\\u0061"))
    if rng.random() < 0.1:
        payload = rng.choice((payload[: rng.randrange(len(payload) + 1)], payload + bytes(rng.randint(1, 9))))
    claimed = length if rng.random() < 0.1 else len(text)
    return struct.pack("<Q", claimed) + text + payload


@pytest.mark.parametrize("seed", range(4))
def test_never_accepts_what_the_package_refuses(tmp_path: Path, sample: Path, seed: int) -> None:
    """1,200 mutated files a seed: an InputError or a header, no other exception; and never more lenient."""
    rng, raw = random.Random(seed), sample.read_bytes()
    names = ("model.layers.10.mlp.experts.17.gate_proj.weight", "model.layers.10.self_attn.kv_a_proj_with_mqa.weight")
    small = file_of({names[0]: ROW, names[1]: {"dtype": "I8", "shape": [3], "data_offsets": [24, 27]}}, bytes(27))
    path, counts = tmp_path / "mutated.safetensors", {True: 0, False: 0}
    with within(100):
        for _ in range(1200):
            path.write_bytes(mutated(rng.choice((raw, small)), rng))
            try:
                read_header(path)
                ours = True
            except InputError:
                ours = False
            theirs = accepted_by_the_package(path)
            assert theirs or not ours, path.read_bytes()[:400]
            counts[ours] += 1
    assert counts[True] > 50
    assert counts[False] > 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPE_BITS, "F4", "", None]) | json_values,
        "shape": st.lists(st.integers(-1, 5) | st.sampled_from([2**63, 2**64, True]), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
        "extra": json_values,
    },
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), rows | json_values, max_size=3), st.integers(0, 40)
)
@settings(max_examples=300, deadline=None)
def test_any_table_is_a_header_or_an_input_error(tmp_path_factory: Any, table: dict[str, Any], payload: int) -> None:
    path = tmp_path_factory.getbasetemp() / "table.safetensors"
    path.write_bytes(file_of(table, bytes(payload)))
    try:
        read_header(path)
    except InputError:
        return
    assert accepted_by_the_package(path)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_header_or_an_input_error(tmp_path_factory: Any, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    for content in (raw, struct.pack("<Q", len(raw)) + raw):
        path.write_bytes(content)
        try:
            read_header(path)
        except InputError:
            continue
        assert accepted_by_the_package(path)


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "pipe", "is a pipe or device"),
        (tmp_path, "is a folder"),
        (Path("/dev/zero"), "is a pipe or device"),
        (tmp_path / "absent", "No such file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "nul\0byte", "null byte"),
        (tmp_path / ("n" * 300), "name too long"),
    ):
        if path.name == "loop":
            path.symlink_to(path)
        with within(5), pytest.raises(InputError, match=f"(?i){says}"):
            read_header(path)


def test_a_file_that_may_not_be_read(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(InputError, match="Permission denied") as error:
        read_header(sample)
    assert "permissions" in error.value.hint


def test_symlinks_and_odd_names(tmp_path: Path, sample: Path) -> None:
    folder = tmp_path / "路径 [x] *"
    folder.mkdir()
    for name in ("a b.safetensors", "[1].safetensors", "模型.safetensors", "-x.safetensors", "new\nline.safetensors"):
        (folder / name).symlink_to(sample)
        assert read_header(folder / name).tensors == read_header(sample).tensors


def test_the_file_shrinks_after_its_header_was_read(sample: Path) -> None:
    header = read_header(sample)
    last = max(header.tensors.values(), key=lambda info: info.end)
    os.truncate(sample, header.file_size - 1)
    fd = os.open(sample, os.O_RDONLY)
    with pytest.raises(InputError, match=f"tensor {last.name}.*the file ends early"):
        read_tensor(fd, last, path=sample)
    os.close(fd)


def test_a_read_error_names_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(InputError, match="x: Input/output error"):
        pread_exact(0, memoryview(bytearray(4)), 0, "x")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    buffer, fd = bytearray(90), os.open(path, os.O_RDONLY)
    pread_exact(fd, memoryview(buffer), 10, "data")
    os.close(fd)
    assert buffer == bytes(range(10, 100))


def test_descriptors_are_closed(tmp_path: Path, sample: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    path = tmp_path / "bad"
    for raw in (*list(BAD.values())[:20], sample.read_bytes()):
        path.write_bytes(raw)
        for target in (path, tmp_path):
            try:
                read_header(target)
            except InputError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_hostile_headers_take_little_memory(tmp_path: Path) -> None:
    """The worst of the list, each in 600 MB of address space beyond the import."""
    for i, name in enumerate(("nesting bomb", "a million dimensions", "length of the universe", "nested objects")):
        (tmp_path / f"{i}.safetensors").write_bytes(BAD[name])
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from quantkit.errors import InputError\nfrom quantkit.spec.tensorfile import read_header\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20,) * 2)\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.safetensors')):\n"
        "    try:\n        read_header(path)\n    except InputError:\n        print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused"] * 4, done.stderr[-500:]
