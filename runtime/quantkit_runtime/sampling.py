"""The next token from logits: greedy, or sampled with transformers' own processors in transformers' order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        repetition_penalty: 1 for none; applied to greedy choice too.
        seed: of the draws.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [] if self.temperature >= 0 else ["temperature must be 0 or more"]
        wrong += [] if self.top_k >= 0 else ["top-k must be 0 or more"]
        wrong += [] if 0 < self.top_p <= 1 else ["top-p must be above 0 and at most 1"]
        wrong += [] if self.repetition_penalty > 0 else ["repetition penalty must be above 0"]
        if wrong:
            raise UsageError("sampling options are out of range", "correct them", items=wrong)

    @property
    def is_argmax(self) -> bool:
        return self.temperature == 0 and self.repetition_penalty == 1

    @cached_property
    def _processors(self) -> Any:
        from transformers.generation import logits_process

        found: list[Any] = []
        if self.repetition_penalty != 1:
            found.append(logits_process.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature not in (0, 1):
            found.append(logits_process.TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k:
            found.append(logits_process.TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            found.append(logits_process.TopPLogitsWarper(self.top_p))
        return logits_process.LogitsProcessorList(found)

    def generator(self, device: torch.device, index: int = 0) -> torch.Generator | None:
        """Source of the draws of one sequence, so that its text does not depend on its company in a batch."""
        return torch.Generator(device).manual_seed(self.seed + index) if self.temperature else None

    def pick(self, logits_V: Tensor, tokens: list[int], generator: torch.Generator | None) -> int:
        """Next token of one sequence after `tokens`, its prompt included."""
        ids = torch.tensor([tokens], device=logits_V.device)
        scores = self._processors(ids, logits_V[None].float())[0]
        if generator is None:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
