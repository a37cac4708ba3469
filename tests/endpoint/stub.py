"""A small OpenAI-compatible server with faults to switch on; its "model" says words that depend on the prompt."""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENGLISH = "the grey sea carries ships and birds over deep water while bright stars guide every sailor home again"
CHINESE = "大海 很 宽 船 在 水 上 走 风 把 帆 吹 满 鸟 飞 过 🌊"
MODEL = "stub"


class Stub:
    """State of the server.

    Attributes:
        faults: names of what is wrong, see `Handler`.
        continuations: prompt ids -> greedy ids; logprobs: ids of a text -> log-probability of each id but the first;
            best: of the likeliest one there, where that is another.
        token_s: time for a token.
    """

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.context = 512
        self.continuations: dict[tuple[int, ...], list[int]] = {}
        self.logprobs: dict[tuple[int, ...], list[float]] = {}
        self.best: dict[tuple[tuple[int, ...], int], float] = {}
        self.token_s = 0.0
        self.requests = 0
        self.memory = 100 * 2**20
        self.down_until = 0.0
        self.url = ""
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()


def answer_words(text: str) -> Iterator[str]:
    """Endless tokens, the same for the same prompt."""
    words = (CHINESE if re.search("[\u4e00-\u9fff]", text) else ENGLISH).split()
    start = zlib.crc32(text.encode())
    for index in range(10_000):
        yield words[(start + index * (1 + index // len(words))) % len(words)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, *_: Any) -> None:
        pass

    # -------------------------------------------------------------------------------------------------- plumbing

    def _json(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: int, message: str) -> None:
        if "unreadable_errors" in self.stub.faults:
            self._json(b"{}", status)
        else:
            self._json({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)

    def _is_down(self) -> bool:
        if time.monotonic() < self.stub.down_until:
            self.close_connection = True
            return True
        return False

    def do_GET(self) -> None:
        if self._is_down():
            return
        if self.path == "/metrics" and "no_metrics" not in self.stub.faults:
            text = f'process_resident_memory_bytes{{pid="1"}} {self.stub.memory}\n# HELP x\nbroken_line\n'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        elif self.path == "/v1/models":
            self._json(
                {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": self.stub.context}]}
            )
        else:
            self._error(404, "no such path")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/restart":
            self.stub.down_until = time.monotonic() + body["seconds"]
            return self._json({})
        if self._is_down():
            return None
        with self.stub.lock:
            self.stub.requests += 1
            number = self.stub.requests
            if "leak" in self.stub.faults:
                self.stub.memory += 50 * 2**20
        faults = self.stub.faults
        if "errors" in faults or ("some_errors" in faults and number % 5 == 0):
            return self._error(500, "CUDA error: an illegal memory access was encountered")
        if "slow" in faults and number % 6 == 0:
            time.sleep(2.2)
        if self.path == "/v1/completions":
            return self._completion(body)
        return self._chat(body)

    # ------------------------------------------------------------------------------------------------------ text

    def _completion(self, body: dict[str, Any]) -> None:
        ids = tuple(body["prompt"])
        choice: dict[str, Any] = {"index": 0, "text": "text", "finish_reason": "length"}
        if body.get("echo"):
            if "no_echo" in self.stub.faults:
                return self._error(400, "echo is not supported")
            known = self.stub.logprobs[ids]
            top = [{"best": self.stub.best.get((ids, index), value)} for index, value in enumerate(known)]
            choice["logprobs"] = {"token_logprobs": [None, *known, -1.0], "top_logprobs": [None, *top, {}]}
        elif "no_token_ids" not in self.stub.faults:
            choice["token_ids"] = self.stub.continuations[ids][: body["max_tokens"]]
        return self._json({"id": "1", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]})

    def _chat(self, body: dict[str, Any]) -> None:
        faults, text = self.stub.faults, json.dumps(body["messages"], ensure_ascii=False)
        self.stub.prompts.append(text)
        self.stub.bodies.append(body)
        messages = body["messages"][-1:] if "forgets" in faults else body["messages"]
        tokens = sum(len(str(message.get("content")).split()) + 4 for message in messages)
        if body.get("top_p", 1) > 1 and "takes_anything" not in faults:
            return self._error(400, "top_p must be in (0, 1]")
        if tokens > self.stub.context:
            if "long_breaks" in faults:
                return self._error(500, "assertion failed")
            if "long_is_cut" not in faults:
                return self._error(400, f"This model's maximum context length is {self.stub.context} tokens")
            tokens = self.stub.context
        if body.get("tools") and "tool_choice" in body:
            return self._tool_call(body, tokens)
        words, reason = self._generate(body, messages)
        usage = {"prompt_tokens": tokens, "completion_tokens": len(words), "total_tokens": tokens + len(words)}
        if body.get("stream"):
            return self._stream(words, reason, usage)
        half = len(words) // 2 if "reasons" in faults else 0
        message = {"role": "assistant", "content": " ".join(words[half:])}
        if half:
            message["reasoning_content"] = " ".join(words[:half]) + " "
        self._sleep(len(words))
        return self._chat_json({"index": 0, "message": message, "finish_reason": reason}, usage)

    def _generate(self, body: dict[str, Any], messages: list[dict[str, Any]]) -> tuple[list[str], str]:
        """Tokens and finish_reason."""
        faults, most = self.stub.faults, body["max_tokens"]
        text = str(messages[-1].get("content"))
        words, reason = [], "length"
        if found := re.search(r"lighthouse is (\d+)", text):
            middle = "Note" in text[: found.start()] and "Note" in text[found.end() :]
            return (["unknown" if middle and "loses_middle" in faults else found[1]]), "stop"
        if "response_format" in body:
            return [
                '{"animal": "bird", "tame": true}' if "breaks_schema" in faults else '{"animal": "cat", "tame": true}'
            ], "stop"
        if found := re.search(r"(\d+) plus (\d+)", text):
            return [str(int(found[1]) + int(found[2]))], "stop"
        for word in answer_words(text):
            if any(stop in word for stop in body.get("stop") or ()) and "ignores_stop" not in faults:
                reason = "stop"
                break
            if len(words) == most:
                break
            words.append(word)
        if "wrong_finish" in faults:
            reason = "stop"
        return words, "eos" if "unknown_finish" in faults else reason

    def _chat_json(self, choice: dict[str, Any], usage: dict[str, int]) -> None:
        self._json(
            {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
        )

    def _tool_call(self, body: dict[str, Any], tokens: int) -> None:
        faults = self.stub.faults
        if "no_tools" in faults or (body["tool_choice"] == "auto" and "no_auto_tools" in faults):
            return self._error(400, '"auto" tool choice requires --enable-auto-tool-choice')
        arguments = (
            '{"city": "Paris", "unit": "cels' if "tool_broken" in faults else '{"city": "Paris", "unit": "celsius"}'
        )
        name = "get_time" if "tool_unknown" in faults else "get_weather"
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        reason = "stop" if "tool_finish" in faults else "tool_calls"
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        usage = {"prompt_tokens": tokens, "completion_tokens": 9, "total_tokens": tokens + 9}
        return self._chat_json({"index": 0, "message": message, "finish_reason": reason}, usage)

    # ---------------------------------------------------------------------------------------------------- stream

    def _sleep(self, tokens: int = 1) -> None:
        slower = 40 if "slows_down" in self.stub.faults and self.stub.requests > 8 else 1
        if self.stub.token_s:
            time.sleep(self.stub.token_s * tokens * slower)

    def _send(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _stream(self, words: list[str], reason: str, usage: dict[str, int]) -> None:
        faults = self.stub.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index, word in enumerate(words):
            self._sleep()
            if "cuts_stream" in faults and index == 3:
                self.close_connection = True
                return
            if "broken_events" in faults and index == 2:
                self._send('data: {"choices": [{"delta"\n\n')
            if "other_text" in faults and index == 1:
                word = "other"
            if "cuts_characters" in faults and not word.isascii():
                word = "\ufffd"
            name = "content"
            if "reasons" in faults and index < len(words) // 2:
                name, word = "reasoning_content", f"{word} "
            elif index and not ("reasons" in faults and index == len(words) // 2):
                word = f" {word}"
            self._event({"choices": [{"index": 0, "delta": {name: word}}]})
        if "no_finish" not in faults:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self._event({"choices": [], "usage": usage})
        if "no_done" not in faults:
            self._send("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, body: dict[str, Any]) -> None:
        body = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL, **body}
        self._send(f"data: {json.dumps(body, ensure_ascii=False)}\n\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients go away when a fault ends their check."""


@contextmanager
def running_stub() -> Iterator[Stub]:
    stub = Stub()
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"stub": stub}))
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
