"""Processes that take the parts of the ranks of a mesh, as `torchrun` would start them.

They are forked from one server that has imported torch and transformers, so that a test pays for these imports once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = ["tests.runtime.tasks", "tests.runtime.preload"]
TIMEOUT = 120.0
"""Seconds after which a task counts as hung: a rank waits for one that does not come."""

Task = Callable[..., Any]


class World:
    """`size` processes; `run` gives some of them one task each."""

    def __init__(self, size: int) -> None:
        # the server knows only its environment, and what it cannot import it leaves out without a word
        os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._members = [self._spawn() for _ in range(size)]

    def _spawn(self) -> tuple[Connection, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        return mine, process

    def close(self) -> None:
        for _, process in self._members:
            process.terminate()
            process.join()

    def mesh(self, task: Task, size: int, *args: Any, first: int = 0, environments: Any = None) -> list[Any]:
        """`task(*args)` on `size` processes that meet as one world; their results by rank."""
        self.start(task, size, *args, first=first, environments=environments)
        return self.results(range(first, first + size))

    def start(self, task: Task, size: int, *args: Any, first: int = 0, environments: Any = None) -> None:
        port = _free_port()
        for rank in range(size):
            torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
            values = {
                **torchrun,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(environments or [{}] * size)[rank],
            }
            self._members[first + rank][0].send((task, args, {name: str(value) for name, value in values.items()}))

    def results(self, members: Sequence[int]) -> list[Any]:
        """What each of them returned. A failure of one ends all, because the others may wait for it."""
        found: dict[int, Any] = {}
        failure = ""
        while len(found) < len(members) and not failure:
            waiting = {self._members[member][0]: member for member in members if member not in found}
            ready = wait(list(waiting), TIMEOUT)
            failure = "" if ready else f"processes {sorted(waiting.values())} did not answer"
            for connection in [one for one in waiting if one in ready]:
                ok, value = connection.recv()
                found[waiting[connection]] = value
                failure = failure if ok else value
        if failure:
            for member in members:
                self._members[member][1].kill()
                self._members[member] = self._spawn()
            raise RuntimeError(failure)
        return [found[member] for member in members]

    def spread(self, task: Task, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`task(*arguments[i])` for every i, on whichever process is free."""
        results: dict[int, Any] = {}
        waiting, running = list(enumerate(arguments)), {}
        while waiting or running:
            for member in range(len(self._members)):
                if member not in running and waiting:
                    number, values = waiting.pop(0)
                    self.start(task, 1, *values, first=member)
                    running[member] = number
            ready = wait([self._members[member][0] for member in running], TIMEOUT)
            for member in [member for member in running if self._members[member][0] in ready]:
                results[running.pop(member)] = self.results([member])[0]
        return [results[number] for number in range(len(arguments))]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(connection: Connection) -> None:
    import torch

    from quantkit_runtime.parallel import leave

    torch.set_num_threads(1)
    while True:
        task, args, environment = connection.recv()
        os.environ.update(environment)
        try:
            connection.send((True, task(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        leave()
