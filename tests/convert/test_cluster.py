"""`--ray`: a Ray cluster of two nodes on the loopback interface, one of which is killed while it writes.

The node that will die has a `sitecustomize` on its path that stops its process for ever at the end of its first weight
file, before the rename; that of the other node waits there until this has happened. So both nodes work, and the work
can only end if the unit of the dead node is done again.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quantkit import __version__
from quantkit.convert.cluster import Work, check_machine, cluster
from quantkit.convert.execute import SourceSpec
from quantkit.convert.run import prepare, run
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.outdir import prepare_output
from quantkit.recipe import load_recipe
from tests.convert.helpers import tree
from tests.convert.test_crash import SHARD_BYTES, assert_whole_files

_AT_FIRST_FILE = """\
import os, pathlib, time

marker, fsync = pathlib.Path({marker!r}), os.fsync


def patched(fd):
    if os.readlink(f"/proc/self/fd/{{fd}}").endswith(".safetensors.quantkit-tmp"):
        {act}
    return fsync(fd)


os.fsync = patched
"""
_STOP = "marker.write_text(f'{os.getpid()}\\n'); time.sleep(3600)"
_WAIT = "while not marker.exists(): time.sleep(0.05)"
_HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
"""Of the head: how soon it takes a node for dead; the usual values take half a minute."""

DEADLINE = 240


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty cluster that listens on the loopback interface only and asks for a token."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's name for "127.0.0.1 is the address"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster()
    yield made
    made.shutdown()


def add_node(nodes: Any, folder: Path, marker: Path, act: str, **options: Any) -> Any:
    """A node of one CPU whose processes do `act` at the end of their weight files."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_AT_FIRST_FILE.format(marker=str(marker), act=act))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep if "PYTHONPATH" in os.environ else None)
        return nodes.add_node(
            node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, **options
        )


def wait_until(what: str, reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
def test_a_node_that_dies_while_it_writes(minimax: Path, tmp_path: Path, loopback: Any) -> None:
    alone, out, marker = tmp_path / "alone", tmp_path / "out", tmp_path / "stopped"
    planned = prepare(minimax, load_recipe("w8a8"), max_shard_bytes=SHARD_BYTES)
    run(planned, alone, jobs=1)
    add_node(loopback, tmp_path / "waits", marker, _WAIT, _system_config=_HEALTH)
    victim = add_node(loopback, tmp_path / "stops", marker, _STOP)
    with ThreadPoolExecutor(1) as pool:
        driven = pool.submit(run, planned, out, runner=cluster(loopback.address))
        try:
            wait_until("the second node writes", lambda: driven.done() or (marker.exists() and marker.read_text()))
            assert not driven.done(), driven.exception()
            assert_whole_files(out)
            assert not list(out.glob("*manifest.json"))
            assert list((out / ".quantkit-work").glob("attempt-*/.*.safetensors.quantkit-tmp"))
        finally:
            marker.touch()
            loopback.remove_node(victim, allow_graceful=False)
        driven.result(timeout=DEADLINE)
    assert tree(out) == tree(alone)
    assert sorted(item.name for item in (out / ".quantkit-work").iterdir()) == ["lock", "options.json"]
    assert verify(out, source=minimax).passed
    stopped = int(marker.read_text())
    wait_until("the stopped process ends with its node", lambda: not psutil.pid_exists(stopped))


@pytest.mark.parametrize("address", ["local", "ray://head:10001", "head", ""])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="is no address of a cluster"):
        cluster(address)


def test_where_no_cluster_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, and nothing listens
        port = free.getsockname()[1]
        with pytest.raises(UsageError, match=f"no Ray cluster at 127.0.0.1:{port}") as caught:
            cluster(f"127.0.0.1:{port}")
    assert "ray start --head" in caught.value.hint


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        cluster("auto")
    assert "quantkit[cluster]" in caught.value.hint


def test_a_machine_that_sees_something_else_is_refused(tmp_path: Path, minimax: Path) -> None:
    spec = SourceSpec(minimax, False, load_recipe("w8a8"), None)
    folder = prepare_output(tmp_path / "out", {"seed": 1}, final="x")
    work = Work(spec, folder.path, folder.options_digest, __version__)
    check_machine(work)
    with pytest.raises(UsageError, match="does not see the output folder"):
        check_machine(replace(work, out=tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match="does not see the output folder"):
        check_machine(replace(work, options_digest="0" * 64))
    with pytest.raises(UsageError, match=r"has quantkit .*, not 0\.0\.1"):
        check_machine(replace(work, tool_version="0.0.1"))
