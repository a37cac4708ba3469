"""Dimension "stability": hours under steady load with a look at memory and latency, and a restart in the middle.

Memory of the server is that of a process on this machine and its children (`--pid`), or the resident size that its
metrics report (`process_resident_memory_bytes`); vLLM's is that of the process that answers, not of its engine. A leak
is a slope after the first third, when caches and graphs are there: Theil and Sen's, the median over all pairs of
points, so that single peaks do not count.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import psutil

from quantkit.acceptance.bounds import Endless
from quantkit.acceptance.endpoint import BAD_FORM, Endpoint
from quantkit.acceptance.load import LoadGenerator, Sample, figures
from quantkit.acceptance.outcome import Finding, failed, missed, skipped
from quantkit.acceptance.performance import MIXED, worst_errors
from quantkit.acceptance.session import Found, Session
from quantkit.acceptance.settings import Stability
from quantkit.acceptance.talk import ask, request, user

MIB = 2**20
_POINTS = 240
"""Memory is looked at so often in a soak: about once a minute of four hours."""
_LEAST_REQUESTS = 12
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 10
_PROBE = "Name a colour."
_RESIDENT, _STARTED = "process_resident_memory_bytes", "process_start_time_seconds"

Points = Sequence[tuple[float, float]]


def soak(session: Session) -> Found:
    """Steady load for the hours that were asked for."""
    if session.soak_hours <= 0:
        raise skipped("no_soak")
    if session.rate <= 0:
        raise skipped("soak_without_rate")
    load, settings = session.settings.performance.loads[MIXED], session.settings.stability
    seconds, rate = session.soak_hours * 3600, session.rate * settings.load_share
    memory = _MemoryWatch(session, seconds / _POINTS)
    generator = LoadGenerator(session.endpoint, seed=f"{session.settings.seed} soak")
    generator.warm_up(load.shapes, 1)
    samples = generator.open_loop(load.shapes, rate, seconds, 2 * load.concurrency, memory.look)
    session.series["memory_mib"] = memory.points
    session.series["token_latency_s"] = [(s.start, s.token_latency) for s in samples if not s.error and s.tokens > 1]
    found = figures(samples) | {"hours": session.soak_hours}
    problems = _judge(settings, samples, memory.points, seconds, found)
    if problems:
        raise missed(problems, found, *worst_errors(samples))
    key = "soak_steady" if memory.points else "soak_without_memory"
    return Found(key, {"requests": len(samples), "hours": round(session.soak_hours, 3)}, measured=found)


def _judge(
    settings: Stability, samples: list[Sample], memory: Points, seconds: float, found: dict[str, float]
) -> list[Finding]:
    """Reasons against the soak; adds its figures to `found`."""
    problems = []
    if not samples or found["error_rate"] > settings.max_error_rate:
        problems.append(_above("load_errors", found["error_rate"], settings.max_error_rate))
    settled = [point for point in memory if point[0] >= seconds / 3]
    if len(settled) >= 3:
        slope = theil_sen(settled)
        grown = slope * (settled[-1][0] - settled[0][0])
        found["growth_mib_per_hour"], found["growth_mib"] = slope * 3600, grown
        if grown > settings.noise_mib and slope * 3600 > settings.max_growth_mib_per_hour:
            problems.append(_above("memory_grows", slope * 3600, settings.max_growth_mib_per_hour))
    slowdown = slowing(samples)
    if slowdown is not None:
        found["slowdown"] = slowdown
        if slowdown > settings.max_slowdown:
            problems.append(_above("latency_grows", slowdown, settings.max_slowdown))
    return problems


def _above(key: str, got: float, bound: float) -> Finding:
    return Finding(key=key, values={"got": float(f"{got:.4g}"), "wanted": bound})


def theil_sen(points: Points) -> float:
    """Median slope over all pairs of points (Sen 1968)."""
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] != a[0])


def slowing(samples: Sequence[Sample]) -> float | None:
    """Median latency per token of the last third over that of the first; None when there are too few requests."""
    values = [sample.token_latency for sample in samples if not sample.error and sample.tokens > 1]
    third = len(values) // 3
    if len(values) < _LEAST_REQUESTS or median(values[:third]) <= 0:
        return None
    return median(values[-third:]) / median(values[:third])


class _MemoryWatch:
    """Resident memory of the server in MiB, looked at no more often than every `interval_s`."""

    def __init__(self, session: Session, interval_s: float) -> None:
        self.points: list[tuple[float, float]] = []
        self._session, self._interval = session, interval_s
        self._origin, self._next = time.perf_counter(), 0.0

    def look(self) -> None:
        now = time.perf_counter() - self._origin
        if now < self._next:
            return
        self._next = now + self._interval
        size = resident_bytes(self._session.endpoint, self._session.pid)
        if size is not None:
            self.points.append((now, size / MIB))


def resident_bytes(endpoint: Endpoint, pid: int | None) -> float | None:
    """Resident memory of a process and its children, else of what the metrics say, else None."""
    if pid is None:
        return endpoint.metrics().get(_RESIDENT)
    try:
        process = psutil.Process(pid)
        return float(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))))
    except psutil.Error:
        return None


def restart(session: Session) -> Found:
    """The user's command restarts the server; how long until it answers again, and is it the same answer."""
    if not session.restart_command:
        raise skipped("no_restart")
    endpoint, most = session.endpoint, session.settings.stability.max_recovery_s
    before, started = ask(endpoint, user(_PROBE), max_tokens=16), endpoint.metrics().get(_STARTED)
    watch = _OutageWatch(endpoint)
    begin = time.perf_counter()
    command = subprocess.Popen(session.restart_command, shell=True, stdin=subprocess.DEVNULL)
    recovered = watch.wait(command, begin + most, started)
    if command.poll() not in (None, 0):
        raise failed("restart_command_failed", session.restart_command, code=command.returncode)
    if recovered is None:
        raise failed("no_recovery" if watch.down else "never_down", session.restart_command, wanted=most)
    after = ask(endpoint, user(_PROBE), max_tokens=16)
    measured = {"recovery_s": recovered - begin}
    if after.everything != before.everything:
        raise missed([Finding(key="restart_differs")], measured, before.everything, after.everything)
    return Found("recovered", {"seconds": round(recovered - begin, 1)}, (after.everything,), measured)


class _OutageWatch:
    """Waits until the server was away and answers again; away is: no answer, or another start time in its metrics."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.down = False

    def wait(self, command: subprocess.Popen[bytes], until: float, started: float | None) -> float | None:
        """Time of the first answer after the outage, None when there was none in time."""
        while (now := time.perf_counter()) < until:
            answers = self._answers()
            if answers and started is not None and self._endpoint.metrics().get(_STARTED, started) != started:
                self.down = True
            if answers and self.down:
                return time.perf_counter()
            self.down = self.down or not answers
            if command.poll() not in (None, 0):
                return None
            time.sleep(min(_POLL_S, until - now))
        return None

    def _answers(self) -> bool:
        import openai

        try:
            self._endpoint.client.with_options(timeout=_PROBE_TIMEOUT_S).chat.completions.create(
                **request(self._endpoint, user(_PROBE), max_tokens=1)
            )
        except (openai.APIError, Endless, *BAD_FORM):
            return False
        return True
