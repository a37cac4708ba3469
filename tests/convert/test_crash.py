"""Whatever interrupts a conversion: nothing half-written under a final name, and the same command ends the same."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import tree

SHARD_BYTES = 900_000


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(7)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def counted(name: str, act: Callable[[], object], at: int) -> None:
    """Replace `os.NAME` by itself, and call `act` before its `at`-th call."""
    original, calls = getattr(os, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            act()
        return original(*args, **kwargs)

    setattr(os, name, wrapped)


def small(source: Path, out: Path, recipe: Recipe) -> None:
    convert(source, out, recipe, jobs=1, max_shard_bytes=SHARD_BYTES)


def assert_whole_files(out: Path) -> None:
    """Everything under a final name is complete."""
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert list(file.keys())


@pytest.fixture(scope="module")
def undisturbed(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    small(minimax, out, load_recipe("w8a8"))
    return tree(out)


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_moments(
    seed: int, minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]
) -> None:
    """SIGKILL before a random write, fsync or rename, twice, then to the end."""
    out, draw = tmp_path / "out", random.Random(seed)
    for attempt in range(2):

        def dying() -> None:
            name = draw.choice(["write", "fsync", "rename"])
            counted(
                "replace" if name == "rename" else name,
                lambda: os.kill(os.getpid(), signal.SIGKILL),
                draw.randint(1, 400 if name == "write" else 15),
            )
            small(minimax, out, w8a8)

        status = in_child(dying)
        assert attempt > 0 or os.WTERMSIG(status) == signal.SIGKILL
        draw.random()
        assert_whole_files(out)
    small(minimax, out, w8a8)
    assert tree(out) == undisturbed
    assert not [path for path in out.rglob("*") if path.name.endswith("-tmp")]


def test_finished_work_is_not_redone(minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]) -> None:
    out = tmp_path / "out"

    def dying() -> None:
        counted("fsync", lambda: os.kill(os.getpid(), signal.SIGKILL), 20)
        small(minimax, out, w8a8)

    assert os.WTERMSIG(in_child(dying)) == signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(before) >= 3
    small(minimax, out, w8a8)
    kept = [path for path, when in before.items() if path.stat().st_mtime_ns == when]
    assert len(kept) >= len(before) - 1, "at most the file whose note was lost is written again"
    assert tree(out) == undisturbed


def test_after_the_end_it_does_nothing(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    out = tmp_path / "out"
    first = convert(minimax, out, w8a8, jobs=1)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert convert(minimax, out, w8a8, jobs=1) == first
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_other_options_are_refused(minimax: Path, tmp_path: Path, w8a8: Recipe, bf16: Recipe) -> None:
    out = tmp_path / "out"

    def dying() -> None:
        counted("fsync", lambda: os.kill(os.getpid(), signal.SIGKILL), 12)
        small(minimax, out, w8a8)

    in_child(dying)
    before = tree(out)
    for options in ({"max_shard_bytes": 800_000}, {"form": "sharded"}, {"recipe": bf16}):
        with pytest.raises(QuantkitError) as caught:
            convert(minimax, out, **{"recipe": w8a8, "jobs": 1, "max_shard_bytes": SHARD_BYTES, **options})  # type: ignore[arg-type]
        assert any(line.startswith(next(iter(options))) for line in caught.value.items), caught.value.items
        assert caught.value.exit_code == 2
    assert tree(out) == before


@pytest.mark.parametrize("jobs", [2, 8])
def test_jobs_do_not_matter(
    jobs: int, minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]
) -> None:
    convert(minimax, tmp_path / "out", w8a8, jobs=jobs, max_shard_bytes=SHARD_BYTES)
    assert tree(tmp_path / "out") == undisturbed


def test_killed_from_outside_with_workers(minimax: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """kill -9 of the command once its workers write: they end with it, and the same command finishes the work."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "quantkit", "convert", str(minimax), "-o", str(out), "--jobs", "2"]
    command += ["--max-shard-size", str(SHARD_BYTES)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("*.safetensors")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert_whole_files(out)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(out) == undisturbed


def test_a_file_size_limit(minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str]) -> None:
    """The kernel refuses to write past 500 kB, as a full disk does."""
    out = tmp_path / "out"

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        try:
            small(minimax, out, w8a8)
        except QuantkitError as error:
            os._exit(42 if "cannot be written" in error.message and error.exit_code == 3 else 43)

    assert os.waitstatus_to_exitcode(in_child(limited)) == 42
    assert_whole_files(out)
    assert not list(out.glob(".*tmp"))
    small(minimax, out, w8a8)
    assert tree(out) == undisturbed


def test_disk_full_in_the_middle(
    minimax: Path, tmp_path: Path, w8a8: Recipe, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original, room = tmp_path / "out", os.write, [3_000_000]

    def write(fd: int, data: Any) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(QuantkitError, match="No space left on device"):
            small(minimax, out, w8a8)
    assert_whole_files(out)
    assert not list(out.glob(".*tmp"))
    small(minimax, out, w8a8)
    assert tree(out) == undisturbed


def test_space_is_checked_before(minimax: Path, tmp_path: Path, w8a8: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))  # type: ignore[attr-defined]
    with pytest.raises(QuantkitError, match=r"needs [\d,]+ bytes, 1,000,000 are free"):
        convert(minimax, tmp_path / "out", w8a8, jobs=1)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_few_file_handles(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """`ulimit -n 64`, with a source of more files than that."""
    source = tmp_path / "source"
    convert(minimax, source, w8a8, jobs=1, max_shard_bytes=60_000)
    assert len(list(source.glob("*.safetensors"))) > 80
    out = tmp_path / "out"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        convert(source, out, w8a8, form="sharded", mesh=Mesh(tp=2), jobs=1)
        report = verify(out, source=source)
        os._exit(42 if report.passed else 43)

    assert os.waitstatus_to_exitcode(in_child(limited)) == 42


def test_read_only_source_and_odd_paths(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    source = tmp_path / "模型 [tiny] model"
    source.mkdir()
    for path in minimax.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
        (source / path.name).chmod(0o444)
    source.chmod(0o555)
    out = tmp_path / "输出 [int8]" / "a b"
    convert(source, out, w8a8, jobs=1)
    assert verify(out, source=source).passed
    assert tree(source) == {
        path.name: digest for path, digest in ((minimax / name, d) for name, d in tree(minimax).items())
    }
    source.chmod(0o755)


def test_two_at_once_are_refused(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    import fcntl

    out = tmp_path / "out"
    (out / ".quantkit-work").mkdir(parents=True)
    with (out / ".quantkit-work/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(QuantkitError, match="another process is writing"):
            convert(minimax, out, w8a8, jobs=1)
    convert(minimax, out, w8a8, jobs=1)
