"""Generation for many sequences: chunked prefill first, then one token for all of them a step.

The engine decides who runs; a runner computes. When the pool has no block left, the sequence that came last gives its
blocks back and is computed again later: counted, and without effect on its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import NonFiniteError, UsageError
from quantkit_runtime.kv_cache import CHUNK
from quantkit_runtime.runner import Chunk, PagedRunner, TransformersRunner
from quantkit_runtime.sampling import Sampling


@dataclass(frozen=True)
class Generated:
    """Result of one sequence: new token ids, the stop token included, and whether a stop token ended it."""

    tokens: tuple[int, ...]
    stopped: bool


@dataclass(eq=False)
class Request:
    """A sequence on its way.

    Attributes:
        sequence: its name in the cache.
        tokens: prompt and what was generated.
        prompt: length of the prompt.
        limit: length at which it ends.
        done: positions that the cache holds.
        stopped: a stop token ended it.
        generator: source of its draws.
    """

    sequence: int
    tokens: list[int]
    prompt: int
    limit: int
    done: int = 0
    stopped: bool = False
    generator: torch.Generator | None = None

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) == self.limit

    @property
    def result(self) -> Generated:
        return Generated(tuple(self.tokens[self.prompt :]), self.stopped)


@dataclass
class Counts:
    """What happened: forwards by kind, sequences that had to give their blocks back, most positions held at once."""

    prefills: int = 0
    decodes: int = 0
    preemptions: int = 0
    positions: int = 0


@dataclass
class Engine:
    """Drives a runner.

    Attributes:
        runner: computes.
        batch: most sequences that run at once.
        chunk: most tokens of a prefill forward.
        stop: ids that end a text.
        sampling: how tokens are chosen.
        counts: what happened so far.
    """

    runner: PagedRunner | TransformersRunner
    batch: int = 1
    chunk: int = CHUNK
    stop: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    counts: Counts = field(default_factory=Counts)
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    added: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def generate(self, prompts: Iterable[Sequence[int]], max_new_tokens: int) -> list[Generated]:
        """Continue each prompt until a stop token or `max_new_tokens`.

        Raises:
            UsageError: a prompt is empty, or longer than the pool with its new tokens.
            NonFiniteError: logits are not finite.
        """
        requests = [self.add(prompt, max_new_tokens, index) for index, prompt in enumerate(prompts)]
        while self.busy:
            self.step()
        return [request.result for request in requests]

    def add(self, prompt: Sequence[int], max_new_tokens: int, index: int = 0) -> Request:
        """Queue a prompt; `index` tells apart the draws of equal prompts."""
        if not prompt:
            raise UsageError("the prompt has no tokens", "give a text with --prompt")
        self.added += 1
        request = Request(self.added, list(prompt), len(prompt), len(prompt) + max_new_tokens)
        if isinstance(self.runner, PagedRunner) and request.limit - 1 > self.runner.cache.capacity:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {request.limit - 1} positions; "
                f"the KV pool holds {self.runner.cache.capacity}",
                "shorten the prompt or --max-new-tokens, or give a larger --context",
            )
        request.generator = self.sampling.generator(self.runner.device, index)
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """One forward while `busy`; returns the requests that got a token."""
        self._admit()
        chunks, rows = self._schedule()
        logits = self.runner.forward(chunks)
        for request, chunk in zip(rows, chunks, strict=True):
            request.done = chunk.stop
        ready = [row for row, request in enumerate(rows) if request.done == len(request.tokens)]
        grown = [rows[row] for row in ready]
        own = logits if len(ready) == len(rows) else logits[ready]  # picking rows waits for the device
        for request, token in zip(grown, self._choose(own, grown) if ready else [], strict=True):
            request.tokens.append(token)
            request.stopped = token in self.stop
            if request.ended:
                self.running.remove(request)
                self.runner.release(request.sequence)
        return grown

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            if not self.runner.reserve(self.waiting[0].sequence, len(self.waiting[0].tokens)):
                break
            self.running.append(self.waiting.popleft())

    def _schedule(self) -> tuple[list[Chunk], list[Request]]:
        """Prefill while any sequence has more than one token to enter; else one token of each."""
        self._make_room()
        filling = [request for request in self.running if len(request.tokens) - request.done > 1]
        chunks, rows, left = [], [], self.chunk if filling else len(self.running)
        for request in filling or self.running:
            count = min(left, len(request.tokens) - request.done)
            if count:
                chunks.append(
                    Chunk(request.sequence, request.done, request.tokens[request.done : request.done + count])
                )
                rows.append(request)
                left -= count
        self.counts.prefills += bool(filling)
        self.counts.decodes += not filling
        self.counts.positions = max(self.counts.positions, sum(len(request.tokens) for request in self.running))
        return chunks, rows

    def _make_room(self) -> None:
        """Blocks for every token that is to enter; the sequence that came last gives way."""
        for request in list(self.running):
            while request in self.running and not self.runner.reserve(request.sequence, len(request.tokens)):
                last = self.running.pop()
                self.runner.release(last.sequence)
                last.done = 0
                self.waiting.appendleft(last)
                self.counts.preemptions += 1

    def _choose(self, logits_BV: Tensor, requests: list[Request]) -> list[int]:
        finite_B = torch.isfinite(logits_BV).all(-1)
        if self.sampling.is_argmax:
            chosen: list[int] = logits_BV.argmax(-1).masked_fill_(~finite_B, -1).tolist()  # the one wait of a step
        else:
            pairs = zip(logits_BV, requests, strict=True)
            bad = not bool(finite_B.all())
            chosen = [-1 if bad else self.sampling.pick(row, one.tokens, one.generator) for row, one in pairs]
        if min(chosen) < 0:
            raise NonFiniteError("the logits of a new token are not finite", "compare with --dtype float32")
        return chosen
