"""The main job by an unprivileged user: sources that belong to somebody else and are read-only, a home as well."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import MODELS, ROOT, snapshot

SOMEBODY = 65534
_PR_CAPBSET_DROP, _CAPABILITIES = 24, 41  # prctl(2), linux/capability.h


def without_privileges() -> None:
    """In a child of root, before the program starts: rights of a file then count for it as for anybody."""
    libc = ctypes.CDLL(None)
    for capability in range(_CAPABILITIES):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def lock(folder: Path) -> None:
    """Read-only, and somebody else's where we may give it away."""
    for path in (*folder.rglob("*"), folder):
        if os.geteuid() == 0:
            os.chown(path, SOMEBODY, SOMEBODY)
        path.chmod(0o555 if path.is_dir() else 0o444)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A source, a text and a home that nobody may write to."""
    shutil.copytree(MODELS / "tiny-minimax-m2", tmp_path / "locked/model")
    (tmp_path / "locked/home").mkdir()
    rows = [{"text": f"The sea is grey in month {number}. " * 8, "kind": "prose"} for number in range(12)]
    (tmp_path / "locked/texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lock(tmp_path / "locked")
    yield tmp_path / "locked"
    for path in (tmp_path / "locked", *(tmp_path / "locked").rglob("*")):
        path.chmod(0o755)


def test_the_main_job(locked: Path, tmp_path: Path) -> None:
    model, out = locked / "model", tmp_path / "out"
    out.mkdir()
    before = snapshot(locked)
    program = Path(__file__).with_name("unprivileged.py")
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    done = subprocess.run(
        [sys.executable, str(program), str(model), str(locked / "texts.jsonl"), str(out)],
        env={
            **{name: os.environ[name] for name in kept if name in os.environ},
            "HOME": str(locked / "home"),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "runtime"))),
            "OMP_NUM_THREADS": "1",
        },
        preexec_fn=without_privileges if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert snapshot(locked) == before
    assert {path.name for path in out.iterdir()} == {"calibration", "int8", "shards"}
