"""`kill -9` in the middle of the work, then the same command again: the bytes of an undisturbed run.

The commands run as processes of their own; they are killed at a random moment after their output folder has appeared,
so that the blow falls into the work and not into the start of Python. tests/bench/part1.py does it ten times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.acceptance.conftest import MODELS, PYTHON, SMALL, cli, snapshot, succeeded
from tests.acceptance.kill import run_killed

KILLS = 2
SPAN = {"calibrate": 1.5, "convert": 0.4}
"""Seconds of work in which the blow falls, by command; of the work, not of the start."""


@pytest.mark.parametrize("command", ["calibrate", "convert"])
def test_killed_and_continued(command: str, tmp_path: Path) -> None:
    model = MODELS / "tiny-minimax-m2"
    options = [*SMALL] if command == "calibrate" else ["--max-shard-size", "1MB", "--jobs", "1"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    succeeded(cli(command, model, "-o", undisturbed, *options))
    rng = random.Random(20 + len(command))
    argv = [PYTHON, "-m", "quantkit", command, str(model), "-o", str(disturbed), *options]
    killed = [run_killed(argv, disturbed, rng.uniform(0, SPAN[command])) for _ in range(KILLS)]
    assert any(killed), "no run was killed: the spans are longer than the work"
    succeeded(cli(command, model, "-o", disturbed, *options))
    assert snapshot(disturbed) == snapshot(undisturbed)
