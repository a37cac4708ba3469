"""Processes that take the parts of the ranks of a mesh, as `torchrun` would start them.

They are forked from one server that has imported torch and transformers, so that a test pays for these imports once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

PRELOADED = [
    "torch",
    "torch.distributed",
    "transformers",
    "accelerate",
    "quantkit_runtime.smoke",
    "tests.runtime.tasks",
]
TIMEOUT = 120.0
"""Seconds after which a task counts as hung: a rank waits for one that does not come."""

Task = Callable[..., Any]


class World:
    """`size` processes; `run` gives some of them one task each."""

    def __init__(self, size: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._connections.append(mine)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def mesh(self, task: Task, size: int, *args: Any, first: int = 0, environment: Any = ()) -> list[Any]:
        """`task(*args)` on `size` processes that meet as one world; their results by rank."""
        self.start(task, size, *args, first=first, environment=environment)
        return self.results(range(first, first + size))

    def start(self, task: Task, size: int, *args: Any, first: int = 0, environment: Any = ()) -> None:
        port = _free_port()
        for rank in range(size):
            torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            values = {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **dict(environment)}
            self._connections[first + rank].send((task, args, {name: str(value) for name, value in values.items()}))

    def results(self, members: Sequence[int]) -> list[Any]:
        found = []
        for member in members:
            if not self._connections[member].poll(TIMEOUT):
                self.close()
                raise TimeoutError(f"process {member} did not answer")
            found.append(self._connections[member].recv())
        for ok, value in found:
            if not ok:
                raise RuntimeError(value)
        return [value for _, value in found]

    def spread(self, task: Task, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`task(*arguments[i])` for every i, on whichever process is free."""
        results: dict[int, Any] = {}
        waiting, running = list(enumerate(arguments)), {}
        while waiting or running:
            for member in range(len(self._connections)):
                if member not in running and waiting:
                    number, values = waiting.pop(0)
                    self.start(task, 1, *values, first=member)
                    running[member] = number
            ready = multiprocessing.connection.wait([self._connections[member] for member in running], TIMEOUT)
            for member in [member for member in running if self._connections[member] in ready]:
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
