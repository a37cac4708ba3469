"""Disks, links, handles and permissions as they go wrong in the field; `test_crash.py` has kills and size limits."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.convert.merge import merge
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import InputError, QuantkitError
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.index import INDEX_NAME
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import tree

SHARD_BYTES = 900_000
QUANTKIT = [sys.executable, "-m", "quantkit"]


def small(source: Path, out: Path, recipe: Recipe, jobs: int = 1) -> None:
    convert(source, out, recipe, jobs=jobs, max_shard_bytes=SHARD_BYTES)


@pytest.fixture(scope="module")
def undisturbed(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    small(minimax, out, load_recipe("w8a8"))
    assert (out / INDEX_NAME).is_file(), "several files, so that a fault can fall between them"
    return tree(out)


def assert_no_half_file(out: Path, whole: dict[str, str]) -> None:
    """What has a final name is finished, and nothing is left under a temporary one."""
    found = tree(out)
    assert not [name for name in found if name.endswith("-tmp")]
    assert {name: digest for name, digest in found.items() if whole.get(name) != digest} == {}


# ------------------------------------------------------------------------------------------------- disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, of which the output needs more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root; test_crash.py has the same with a size limit and with ENOSPC from os.write")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_disk_that_fills_up(
    jobs: int,
    minimax: Path,
    disk: Path,
    w8a8: Recipe,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There was room when it started (somebody else took it), so the kernel says so in the middle."""
    out = disk / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))  # type: ignore[attr-defined]
        with pytest.raises(QuantkitError, match="No space left on device") as caught:
            small(minimax, out, w8a8, jobs)
    assert "finished files are kept" in caught.value.hint
    assert_no_half_file(out, undisturbed)
    assert list(out.glob("*.safetensors")), "it got somewhere"
    with pytest.raises(QuantkitError, match=r"needs [\d,]+ bytes, [\d,]+ are free"):
        small(minimax, out, w8a8, jobs)
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    small(minimax, out, w8a8, jobs)
    assert tree(out) == undisturbed


def test_a_disk_without_any_room(minimax: Path, disk: Path, w8a8: Recipe) -> None:
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(filler, bytes(4096)):
            pass
    os.close(filler)
    with pytest.raises(QuantkitError):
        small(minimax, disk / "out", w8a8)
    assert not list(disk.rglob("*.safetensors"))


class Broken:
    """A file whose reading fails after some bytes."""

    def __init__(self, file: Any, good: int) -> None:
        self._file, self._left = file, good

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _count(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def seek(self, at: int) -> int:
        found: int = self._file.seek(at)
        return found

    def read(self, size: int) -> bytes:
        self._count(min(size, 1 << 16))
        data: bytes = self._file.read(min(size, 1 << 16))
        return data

    def readinto(self, view: memoryview) -> int:
        self._count(min(len(view), 1 << 16))
        count: int = self._file.readinto(view[: 1 << 16])
        return count


def break_opened(monkeypatch: pytest.MonkeyPatch, name: str, good: int) -> None:
    """Files called `name` fail after `good` bytes when opened through pathlib (copies and checksums are)."""
    original = Path.open

    def opened(self: Path, *args: Any, **kwargs: Any) -> Any:
        file = original(self, *args, **kwargs)
        return Broken(file, good) if self.name == name else file

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("at", [1, 40, 200])
def test_a_read_error_in_the_weights(
    at: int, minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original, calls = tmp_path / "out", os.preadv, [0]

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset > 100_000:  # beyond the header
            calls[0] += 1
        if calls[0] >= at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(InputError, match=r"model\.safetensors: tensor model\.\S+: Input/output error"):
            small(minimax, out, w8a8)
    assert_no_half_file(out, undisturbed)
    small(minimax, out, w8a8)
    assert tree(out) == undisturbed


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_read_error_in_a_copy_or_a_checksum(
    name: str, minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        break_opened(patch, name, 100_000)
        with pytest.raises(QuantkitError, match=f"{name}: Input/output error") as caught:
            small(minimax, out, w8a8)
    assert caught.value.exit_code == 3
    assert_no_half_file(out, undisturbed)
    small(minimax, out, w8a8)
    assert tree(out) == undisturbed


def test_a_read_error_while_verifying(
    minimax: Path, tmp_path: Path, w8a8: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    small(minimax, out, w8a8)
    name = sorted(out.glob("*.safetensors"))[1].name
    break_opened(monkeypatch, name, 100_000)
    failures = verify(out).failures
    assert [failure for failure in failures if f"{name}: Input/output error" in failure]
    assert all(name in failure for failure in failures)


# ------------------------------------------------------------------------------------- sources that changed


@pytest.fixture
def shards(minimax: Path, tmp_path: Path, w8a8: Recipe) -> Path:
    convert(minimax, tmp_path / "shards", w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
    return tmp_path / "shards"


def swap(one: Path, two: Path) -> None:
    assert one.stat().st_size == two.stat().st_size
    one.rename(one.with_name("third"))
    two.rename(one)
    one.with_name("third").rename(two)


def test_swapped_shards_are_not_merged(shards: Path, minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """The files of two ranks have the same header and size: only the manifest's checksums tell. Once they are put
    right, the same command makes the right result.
    """
    one, two = shards / "stage0-tp0-00001.safetensors", shards / "stage0-tp1-00001.safetensors"
    swap(one, two)
    with pytest.raises(InputError) as caught:
        merge(shards, tmp_path / "merged", jobs=1)
    assert [one.name, two.name] == [item.partition(":")[0] for item in caught.value.items]
    assert not (tmp_path / "merged/quantkit_manifest.json").exists()
    swap(one, two)
    merge(shards, tmp_path / "merged", jobs=1)
    convert(minimax, tmp_path / "direct", w8a8, jobs=1)
    merged, direct = tree(tmp_path / "merged"), tree(tmp_path / "direct")
    assert merged["model.safetensors"] == direct["model.safetensors"]


def test_a_flipped_bit_of_our_checkpoint_is_not_sharded(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    source = tmp_path / "int8"
    convert(minimax, source, w8a8, jobs=1)
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(2_000_000)
        byte = file.read(1)[0]
        file.seek(2_000_000)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(InputError, match="differ from its manifest"):
        convert(source, tmp_path / "out", w8a8, form="sharded", jobs=1)
    assert not (tmp_path / "out/manifest.json").exists()


def test_swapped_source_files_of_equal_size(tmp_path: Path, minimax: Path, w8a8: Recipe, bf16: Recipe) -> None:
    """Of a checkpoint with an index: the index says which tensors a file holds."""
    source = tmp_path / "source"
    small(minimax, source, bf16)
    (source / "quantkit_manifest.json").unlink()
    by_size: dict[int, list[Path]] = {}
    for path in sorted(source.glob("*.safetensors")):
        by_size.setdefault(path.stat().st_size, []).append(path)
    one, two = next(paths for paths in by_size.values() if len(paths) > 1)[:2]
    swap(one, two)
    with pytest.raises(InputError) as caught:
        small(source, tmp_path / "out", w8a8)
    for path in (one, two):
        assert any(f"not in {path.name}" in item for item in caught.value.items), caught.value.items
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- surroundings


def test_few_handles_with_workers(tiny: Callable[[str], Path], tmp_path: Path, bf16: Recipe) -> None:
    """`ulimit -n 64` around the whole commands; the source has more files than that."""
    source, out = tmp_path / "source", tmp_path / "out"
    convert(tiny("mixtral"), source, bf16, jobs=1, max_shard_bytes=1_000)
    assert len(list(source.glob("*.safetensors"))) > 64
    for words in (["convert", source, "-o", out, "--jobs", "2", "--max-shard-size", "9000"], ["verify", out]):
        extra = ["--source", source, "--jobs", "8"] if words[0] == "verify" else []
        command = [*QUANTKIT, *map(str, [*words, *extra])]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout


def hub_cache(model: Path, root: Path) -> Path:
    """A downloaded model as the hub's client keeps it: a snapshot of links to blobs."""
    repository = root / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123abcd")
    for path in model.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_a_hub_cache(minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]) -> None:
    snapshot, out = hub_cache(minimax, tmp_path), tmp_path / "out"
    before = tree(tmp_path / "hub")
    small(snapshot, out, w8a8)
    assert tree(out) == undisturbed, "the result does not depend on how the source is stored"
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    assert tree(tmp_path / "hub") == before
    assert verify(out, source=snapshot).passed
    (tmp_path / "link").symlink_to(snapshot)
    assert verify(out, source=tmp_path / "link").passed


def test_a_hub_cache_whose_download_was_broken_off(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    snapshot = hub_cache(minimax, tmp_path)
    (snapshot / "tokenizer.json").resolve().unlink()
    manifest = convert(snapshot, tmp_path / "out", w8a8, jobs=1)
    assert [row.rule for row in manifest.dropped if row.name == "tokenizer.json"] == ["not a readable file"]
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(InputError, match=r"model\.safetensors: No such file"):
        convert(snapshot, tmp_path / "other", w8a8, jobs=1)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["a b [red]c[/red]", "模型(v1)'\"%s{0}", "*?#$&;\\ é\n"])
def test_odd_paths(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Through every command that takes a folder; the names come back unchanged."""
    source = tmp_path / name / "model"
    shutil.copytree(tiny("llama"), source)
    shards, merged = tmp_path / f"{name} shards", tmp_path / f"{name} merged"
    for words in (
        ["convert", source, "-o", shards, "--format", "sharded", "--tp", "2", "--jobs", "1", "--json"],
        ["verify", shards, "--source", source, "--json"],
        ["merge", shards, "-o", merged, "--jobs", "1", "--json"],
        ["verify", merged, "--source", source],
    ):
        done = CliRunner().invoke(main, list(map(str, words)))
        assert done.exit_code == 0, done.output
        if "--json" in words:
            shown = json.loads(done.stdout)
            assert shown.get("out") in (None, str(shards), str(merged))
    assert f"{merged}: verified" in done.stdout
    gone = CliRunner().invoke(main, ["verify", str(source / name)])
    assert gone.exit_code == 3
    assert "".join(str(source / name).split()) in "".join(gone.output.split())  # a line break in it is shown as one


def test_a_read_only_source_without_privileges(
    minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]
) -> None:
    """As a user who may only read the source and only write the output; as root that user is `nobody`."""
    base = Path(shutil.copytree(minimax, tmp_path / "base" / "source")).parent
    out = base / "out"
    out.mkdir()
    for path in [*(base / "source").iterdir(), base / "source"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_as_nobody(base, out, w8a8))
        except BaseException:
            os._exit(9)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        assert tree(out) == undisturbed
        assert tree(base / "source") == tree(minimax)
    finally:
        (base / "source").chmod(0o755)


def _as_nobody(base: Path, out: Path, recipe: Recipe) -> int:
    """42 when the conversion works and a folder that may not be written is an expected failure."""
    os.chdir(base)  # the folders above belong to another user
    if os.getuid() == 0:
        os.chown(out, 65534, 65534)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    assert not os.access("source", os.W_OK)
    small(Path("source"), Path("out"), recipe)
    if not verify(Path("out"), source=Path("source")).passed:
        return 43
    try:
        small(Path("out"), Path("source/inside"), recipe)
    except QuantkitError as error:
        return 42 if "Permission denied" in str(error) else 44
    return 45


def test_an_unreadable_file_without_privileges(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """One weight file belongs to somebody else: named, with the reason, before anything is written."""
    base = Path(shutil.copytree(minimax, tmp_path / "base" / "source")).parent
    (base / "source/model.safetensors").chmod(0)
    (base / "source").chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(base)
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            small(Path("source"), Path("out"), w8a8)
        except InputError as error:
            os._exit(42 if "model.safetensors: Permission denied" in error.message else 43)
        except BaseException:
            os._exit(9)
        os._exit(45)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    assert not (base / "out").exists()
