"""Start a command and kill it while it works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE = 120.0


def run_killed(argv: Sequence[str], folder: Path, delay: float) -> bool:
    """Run `argv`, wait until it has begun to work in `folder`, then SIGKILL it and its children after `delay` seconds.

    Returns:
        Whether it was killed; False when it had already ended well.
    """
    started = time.time()
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, env={**os.environ}
    )
    while process.poll() is None and not _at_work(folder, started):
        assert time.time() - started < PATIENCE, f"{argv} did not begin"
        time.sleep(0.005)
    try:
        process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    return False


def run_signalled(argv: Sequence[str], folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Run `argv`, signal it once it has begun to work in `folder`; its exit code and what it printed on stderr.

    Tests that run in the background inherit signals that are ignored, and a command keeps to that.
    """
    started = time.time()
    process = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    while process.poll() is None and not _at_work(folder, started):
        assert time.time() - started < PATIENCE, f"{argv} did not begin"
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


def _at_work(folder: Path, since: float) -> bool:
    """Whether a file below `folder` was written after `since`; files come and go while this looks."""
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime >= since - 0.01:
                return True
    return False
