"""Load: many streamed requests at a time, and what a user would have felt of each.

TTFT is the time from sending to the first token; latency per token is the rest of the time over the further tokens.
Every prompt is unique from its first words, so that a prefix cache cannot help.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.acceptance.endpoint import Endpoint, said
from quantkit.acceptance.talk import STREAMED, reasoning_of, request, user

WORDS = (
    "river",
    "stone",
    "light",
    "winter",
    "copper",
    "garden",
    "signal",
    "paper",
    "harbour",
    "number",
    "window",
    "music",
)
"""Each is about one token in common vocabularies; the prompt's true length is what the server counts."""


@dataclass
class Sample:
    """A request. Times in seconds since the load began.

    Attributes:
        start, first, end: sent, first token, last event; first is NaN when none came.
        prompt_tokens, tokens: counted by the server, else by events.
        error: "" when it was answered to its end.
    """

    start: float
    first: float = float("nan")
    end: float = float("nan")
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.start

    @property
    def token_latency(self) -> float:
        return (self.end - self.first) / max(1, self.tokens - 1)


class LoadGenerator:
    """Sends requests and keeps their samples.

    Args:
        endpoint: under test.
        seed: of the prompts; a generator never sends a prompt twice.
    """

    def __init__(self, endpoint: Endpoint, seed: str) -> None:
        self.endpoint = endpoint
        self._random = random.Random(seed)
        self._sent = 0
        self._extra: dict[str, Any] = {"ignore_eos": True}

    def prompt(self, tokens: int) -> str:
        self._sent += 1
        # The number stands first: what a prefix cache could share is a chat template's beginning.
        return " ".join([f"{self._sent} {self._random.getrandbits(64):x}", *self._random.choices(WORDS, k=tokens)])

    def warm_up(self, shapes: Sequence[tuple[int, int]], times: int) -> None:
        """Full-length requests, one at a time; also learns whether the server takes `ignore_eos`."""

        async def run() -> None:
            async with self.endpoint.async_client() as client:
                for index in range(times):
                    sample = await self._one(client, *shapes[index % len(shapes)], time.perf_counter())
                    if sample.error.startswith(("400", "422")) and self._extra:
                        self._extra = {}

        asyncio.run(run())

    def closed_loop(self, shapes: Sequence[tuple[int, int]], concurrency: int, requests: int) -> list[Sample]:
        """`requests` in all, always `concurrency` at a time."""

        async def run() -> list[Sample]:
            origin, left, samples = time.perf_counter(), iter(range(requests)), list[Sample]()

            async def worker(client: Any) -> None:
                for index in left:
                    samples.append(await self._one(client, *shapes[index % len(shapes)], origin))

            async with self.endpoint.async_client() as client:
                await asyncio.gather(*(worker(client) for _ in range(min(concurrency, requests))))
            return samples

        return asyncio.run(run())

    def open_loop(
        self,
        shapes: Sequence[tuple[int, int]],
        rate: float,
        seconds: float,
        most: int,
        observe: Callable[[], None] | None = None,
    ) -> list[Sample]:
        """A request every 1 / rate seconds whether earlier ones are done or not, but never more than `most` at a time.

        `observe()` is called now and then between requests.
        """

        async def run() -> list[Sample]:
            origin, samples, running = time.perf_counter(), list[Sample](), set[asyncio.Task[Sample]]()
            async with self.endpoint.async_client() as client:
                index = 0
                while time.perf_counter() - origin < seconds:
                    if len(running) < most:
                        task = asyncio.create_task(self._one(client, *shapes[index % len(shapes)], origin))
                        running.add(task)
                        task.add_done_callback(running.discard)
                        task.add_done_callback(lambda done: samples.append(done.result()))
                    index += 1
                    if observe is not None:
                        await asyncio.to_thread(observe)
                    await asyncio.sleep(max(0.0, index / rate - (time.perf_counter() - origin)))
                await asyncio.gather(*running)
            return sorted(samples, key=lambda sample: sample.start)

        return asyncio.run(run())

    async def _one(self, client: Any, prompt_tokens: int, output_tokens: int, origin: float) -> Sample:
        import openai

        prompt = self.prompt(prompt_tokens)
        sample = Sample(start=time.perf_counter() - origin)
        try:
            await self._stream(client, prompt, output_tokens, sample, origin)
        except openai.APIError as error:
            sample.error = said(error)
        except Exception as error:  # a load goes on whatever one request meets; the error is counted and shown
            sample.error = f"{type(error).__name__}: {error}"
        sample.end = time.perf_counter() - origin
        return sample

    async def _stream(self, client: Any, prompt: str, tokens: int, sample: Sample, origin: float) -> None:
        stream = await client.chat.completions.create(
            **request(
                self.endpoint,
                user(prompt),
                max_tokens=tokens,
                **STREAMED,
                extra_body={**self._extra, **self.endpoint.extra_body},
            )
        )
        finished, events = False, 0
        async for event in stream:
            if event.usage is not None:
                sample.prompt_tokens = int(event.usage.prompt_tokens)
                sample.tokens = int(event.usage.completion_tokens)
            for choice in event.choices:
                if choice.delta.content or reasoning_of(choice.delta.model_extra or {}):
                    events += 1
                    if events == 1:
                        sample.first = time.perf_counter() - origin
                finished = finished or bool(choice.finish_reason)
        sample.tokens = sample.tokens or events
        if not finished:
            sample.error = "the stream ended without a finish_reason"
        elif not events:
            sample.error = "no token came"


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Throughput, latencies and errors of a load."""
    good = [sample for sample in samples if not sample.error]
    found = {
        "requests": float(len(samples)),
        "errors": float(len(samples) - len(good)),
        "error_rate": (len(samples) - len(good)) / max(1, len(samples)),
    }
    if good:
        seconds = max(sample.end for sample in samples) - min(sample.start for sample in samples)
        tokens = sum(sample.tokens for sample in good)
        found |= {
            "seconds_s": seconds,
            "requests_per_s": len(good) / seconds,
            "tokens_per_s": tokens / seconds,
            "prompt_tokens": float(np.mean([sample.prompt_tokens for sample in good])),
            "output_tokens": tokens / len(good),
        }
        for name, values in (
            ("ttft", [sample.ttft for sample in good]),
            ("token", [sample.token_latency for sample in good if sample.tokens > 1]),
        ):
            if values:
                found[f"{name}_p50_s"], found[f"{name}_p99_s"] = (float(v) for v in np.percentile(values, (50, 99)))
    return found
