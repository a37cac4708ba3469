"""Parsers that take their process with them: the fuzzer's own test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.fuzz.guard import Limits
from tests.fuzz.targets import Case, Parser


def _dies(case: Case) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def _hangs(case: Case) -> Callable[[], object]:
    def stop() -> None:  # as C code does that never comes back: no handler of Python's runs
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


PARSERS = {"dies": Parser(_dies), "hangs": Parser(_hangs, Limits(cpu_s=1, wall_s=1))}
