"""`kill -9` in the middle of the work, then the same command again: the bytes of an undisturbed run.

The commands run as processes of their own; they are killed at a random moment after their output folder has appeared,
so that the blow falls into the work and not into the start of Python. tests/bench/part1.py does it ten times.
Signals that can be caught end a command in order instead.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from quantkit.console import expected_failures
from quantkit.convert.verify import verify
from tests.acceptance.conftest import MODELS, PYTHON, SMALL, cli, snapshot, succeeded
from tests.acceptance.kill import run_killed, run_signalled

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_orderly(number: signal.Signals, tmp_path: Path) -> None:
    """One line, the exit code of shells, nothing half-written, and the same command goes on."""
    model, out = MODELS / "tiny-minimax-m2", tmp_path / "out"
    options = [model, "-o", out, "--max-shard-size", "200kB", "--jobs", "1"]
    code, errors = run_signalled([PYTHON, "-m", "quantkit", "convert", *map(str, options)], out, number)
    assert code == 128 + number
    assert errors == "interrupted: what is finished is kept; run the same command again to continue\n"
    assert not list(tmp_path.rglob("*.quantkit-tmp")), "no half-written file, under whatever name"
    assert not (out / "quantkit_manifest.json").exists()
    succeeded(cli("convert", *options))
    assert verify(out, source=model).passed


def test_signals_that_somebody_handles_stay_with_him() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with expected_failures():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
