"""The units of work of a conversion as tasks of a Ray cluster, over a file system that its machines share.

A task whose machine died is run again elsewhere. The cluster may take a machine for dead that still writes, so every
attempt writes into a folder of its own and renames the finished file into its place; two attempts make the same bytes.
The journal and the manifest stay with the process that drives the work.
"""

from __future__ import annotations

import importlib
import logging
import platform
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import fsync_folder
from quantkit.convert.compute import Calibrated
from quantkit.convert.execute import Done, Job, Runner, SourceSpec, run_job
from quantkit.errors import QuantkitError, UsageError
from quantkit.outdir import WORK_NAME, OutputFolder, recorded_digest

_ATTEMPTS = 5
"""Of a unit whose machines die one after the other; more of them hint at the unit: it may not fit in memory."""
_ATTEMPT = "attempt-"
_SECONDS_TO_ANSWER = 10


@dataclass(frozen=True)
class Work:
    """What a task must know beside its unit: absolute paths, and what the machine must agree on."""

    spec: SourceSpec
    out: Path
    options_digest: str
    tool_version: str


def cluster(address: str) -> Runner:
    """A runner on the running Ray cluster at `address`: "HOST:PORT" of its head, or "auto".

    Raises:
        UsageError: Ray is not installed, or the address is none. When it runs: no cluster answers there, or a machine
            does not see the folders or has another version of quantkit.
    """
    ray = _import_ray()
    if address != "auto" and not re.fullmatch(r"[^/\s]+:\d+", address):
        raise UsageError(f"--ray {address!r} is no address of a cluster", "give host:port of its head, or auto")
    if address != "auto":
        _check_answers(address)

    def runner(rest: list[Job], spec: SourceSpec, source: Source, out: OutputFolder) -> Iterator[tuple[Job, Done]]:
        if not rest:
            return
        calibration = spec.calibration.absolute() if spec.calibration else None
        spec = replace(spec, root=spec.root.absolute(), calibration=calibration)
        work = Work(spec, out.path.absolute(), out.options_digest, __version__)
        for left in out.work.glob(f"{_ATTEMPT}*"):  # by machines that died
            shutil.rmtree(left, ignore_errors=True)
        _connect(ray, address)
        try:
            yield from _run_all(ray, rest, work)
        finally:
            ray.shutdown()

    return runner


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError("--ray needs Ray, which is not installed", "pip install 'quantkit[cluster]'") from error


def _check_answers(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _connect(ray: Any, address: str) -> None:
    host = address.rpartition(":")[0]
    loopback = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **loopback)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, str(error).strip().splitlines()[0]) from error


def _no_cluster(address: str, reason: str) -> UsageError:
    return UsageError(
        f"no Ray cluster at {address}: {reason}",
        "start one (`ray start --head`, then `ray start --address=HOST:PORT` on each machine), and call quantkit "
        "on one of its machines",
    )


def _run_all(ray: Any, jobs: list[Job], work: Work) -> Iterator[tuple[Job, Done]]:
    task = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(_unit)
    shared = ray.put(work)
    running = {task.remote(job, shared): job for job in jobs}
    while running:
        ready, _ = ray.wait(list(running), num_returns=1)
        for reference in ready:
            job = running.pop(reference)
            yield job, _result(ray, reference, job)


def _result(ray: Any, reference: Any, job: Job) -> Done:
    try:
        done = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, QuantkitError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise QuantkitError(
            f"{job.label}: the cluster gave up after {_ATTEMPTS} attempts: {str(error).strip().splitlines()[0]}",
            "look after its machines and their memory, then run the same command again; finished files are kept",
        ) from error
    assert isinstance(done, Done)
    return done


# --------------------------------------------------------------------------------------- on the machines


_opened: dict[str, tuple[Source, Calibrated | None]] = {}
"""Of a worker process: options digest -> the source of the conversion that it works for, opened once."""


def _unit(job: Job, work: Work) -> Done:
    """Do one unit of work in a worker process of the cluster."""
    import torch

    check_machine(work)
    torch.set_num_threads(1)
    if work.options_digest not in _opened:
        opened = work.spec.open()
        own_scales = Calibrated(work.spec.calibration, opened) if work.spec.calibration else None
        _opened[work.options_digest] = opened, own_scales
    source, scales = _opened[work.options_digest]
    if job.hashed:
        return run_job(job, source, scales, work.out, lambda _: None)
    own = work.out / WORK_NAME / f"{_ATTEMPT}{uuid.uuid4().hex}"
    try:
        name = job.copy or (job.planned.name if job.planned else "")
        (own / name).parent.mkdir(parents=True)
        done = run_job(job, source, scales, own, lambda _: None)
        (own / name).replace(work.out / name)
        fsync_folder((work.out / name).parent)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return done


def check_machine(work: Work) -> None:
    """A machine that sees another folder, or has another version, must not write one byte."""
    where = f"machine {platform.node()} of the cluster"
    if __version__ != work.tool_version:
        raise UsageError(
            f"{where} has quantkit {__version__}, not {work.tool_version}", "install one version on all machines"
        )
    if recorded_digest(work.out) != work.options_digest:
        raise UsageError(
            f"{where} does not see the output folder {work.out}",
            "all machines must see MODEL, OUT and a calibration under the same paths",
        )
