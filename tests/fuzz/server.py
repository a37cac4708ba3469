"""An OpenAI-compatible server whose answers are damaged, and the checks of `quantkit acceptance` against it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from quantkit.acceptance.endpoint import connect
from quantkit.acceptance.run import CHECKS
from quantkit.acceptance.session import Session, run_check
from quantkit.acceptance.settings import Settings, load_settings
from quantkit.report.acceptance import sentences
from quantkit.spec.baseline import read_baseline
from tests.endpoint.stub import MODEL, Handler, Stub, _Server
from tests.fuzz import mutate
from tests.fuzz.guard import Limits
from tests.fuzz.targets import Case, Parser

FLOOD = 512 * 2**20
"""Bytes after which an endless answer ends: more than anybody may keep."""


class Damaged(Handler):
    """Answers of the stub, some of them changed: their values, their bytes, their length, their end."""

    rng = Random()
    lock = threading.Lock()

    def _json(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.lock:
            kind = self.rng.random()
            if kind < 0.5:
                data = mutate.json_bytes(self.rng, data)
            if kind < 0.05:
                status = self.rng.choice((100, 204, 301, 400, 401, 429, 500, 503, 999))
        if kind > 0.97:
            self._endless(b'{"choices": [' + b'"x", ' * 10_000)
        else:
            super()._json(data, status)

    def _send(self, text: str) -> None:
        with self.lock:
            kind = self.rng.random()
            data = text.encode()
            if kind < 0.1:
                data = b"data: " + mutate.json_bytes(self.rng, text.removeprefix("data: ").strip().encode()) + b"\n\n"
            elif kind < 0.13:
                data = mutate.damaged(self.rng, data)
        if kind > 0.998:
            self._endless(self.rng.choice((b"data: {}\n\n", b": ping\n\n", b"x" * 1000)) * 100, chunked=True)
            return
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _stream(self, words: list[str], reason: str, usage: dict[str, int]) -> None:
        try:
            super()._stream(words, reason, usage)
        except ValueError:  # what is sent as an event was no JSON to begin with
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path == "/metrics":
            with self.lock:
                flood, text = (
                    self.rng.random() < 0.1,
                    mutate.damaged(self.rng, b"process_resident_memory_bytes 1e8\n" * 9),
                )
            if flood:
                self._endless(b"a_metric 1e999\n" * 5000)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        super().do_GET()

    def _endless(self, piece: bytes, *, chunked: bool = False) -> None:
        """The same piece again and again: fast until it is too much for anybody's memory, or slowly for ever."""
        slow = len(piece) < 2**12
        if not chunked:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
        self.close_connection = True
        sent, begun = 0, time.monotonic()
        while sent < FLOOD and time.monotonic() - begun < 60:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
            sent += len(piece)
            if slow:
                time.sleep(0.2)


@cache
def _server() -> tuple[Stub, type[Damaged]]:
    """One server for all cases of a process."""
    stub = Stub()
    handler = type("Bound", (Damaged,), {"stub": stub})
    server = _Server(("127.0.0.1", 0), handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return stub, handler


@cache
def _quick() -> Settings:
    values = load_settings(None).model_dump()
    values |= {"timeout_s": 2, "function": {"max_tokens": 16, "structured_tokens": 32}}
    load = {"concurrency": 2, "requests": 4, "max_error_rate": 0.0, "shapes": [[8, 8]]}
    values["performance"] = {"warm_up": 1, "loads": dict.fromkeys(("short", "long", "mixed"), load)}
    values["capability"] |= {"lengths": [0.5], "depths": [0.5]}
    return Settings.model_validate(values)


def endpoint(case: Case) -> Callable[[], object]:
    stub, handler = _server()
    handler.rng = Random(case.rng.random())
    folder = case.corpus / "baseline"
    for text in read_baseline(folder, verify=False).sequences:
        stub.continuations[text.ids[: text.prompt_tokens]] = list(text.ids[text.prompt_tokens :])
        stub.logprobs[text.ids] = [-1.0] * (len(text.ids) - 1)
    stub.faults = set(case.rng.sample(("no_token_ids", "reasons"), case.rng.randrange(2)))
    spec = case.rng.choice([spec for spec in CHECKS if spec.dimension != "stability"])
    tasks = case.folder / "tasks.jsonl"
    tasks.write_text('{"prompt": "x", "regex": "(a|b)*c"}\n')

    def check() -> None:
        server = connect(stub.url, MODEL, timeout_s=2, context=None)
        found = run_check(spec, Session(server, _quick(), folder, tasks))
        sentences(found)
        found.model_dump_json()
        server.metrics()

    return check


PARSERS = {"endpoint": Parser(endpoint, Limits(cpu_s=30, wall_s=45), may_spawn=True)}
