"""What a baseline will hold and cost, known before the first layer runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.archs.modeling import load_config, load_tokenizer, require_embedded
from quantkit.baseline.texts import TextOptions, check, make_sequences
from quantkit.calibrate.activations import MEMORY_BUDGET
from quantkit.calibrate.plan import choose_device, layer_bytes
from quantkit.calibrate.weights import require_sound
from quantkit.checkpoint.reader import Source
from quantkit.compare.companions import tokenizer_record
from quantkit.host import free_bytes
from quantkit.spec.baseline import Sequence, TokenizerRecord, sequences_digest
from quantkit.threads import available_cores

RESIDENT_SHARE = 0.5
"""Share of the free memory that all layers together may take to be kept between passes."""

MAX_JOBS = 8
SCORE_BYTES = 4 * 2**30
"""Texts at a time by default: as many as leave the scores of attention over the longest ones within this bound, where
torch has no fused kernel for them (sinks, softcaps, sparse masks)."""


@dataclass(frozen=True)
class Options:
    """What a baseline holds.

    Attributes:
        texts: how many inputs, and how long.
        new_tokens: of each greedy continuation.
        top_k: likeliest tokens that are kept of each distribution.
        full: keep all log-probabilities.
    """

    texts: TextOptions = field(default_factory=TextOptions)
    new_tokens: int = 32
    top_k: int = 64
    full: bool = False


@dataclass(frozen=True)
class Plan:
    """Checked options with what they lead to.

    Attributes:
        source: checkpoint.
        options: as given.
        sequences: inputs; prompts are not continued yet.
        tokenizer: what they depend on.
        warnings: sentences.
        device, dtype: where and in what layers run.
        memory_budget: bytes of hidden states kept in memory.
        resident: all layers stay in memory.
    """

    source: Source
    options: Options
    sequences: tuple[Sequence, ...]
    tokenizer: TokenizerRecord
    warnings: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    memory_budget: int
    resident: bool

    @cached_property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def top_k(self) -> int:
        return min(self.options.top_k, self.source.dims.vocab)

    @property
    def spools(self) -> bool:
        states = 1 + len(self.source.arch.carried_state)
        return self.tokens * self.source.dims.stream_width * self.dtype.itemsize * states > self.memory_budget

    @property
    def default_jobs(self) -> int:
        scores = 4 * self.source.dims.heads * max(len(sequence.ids) for sequence in self.sequences) ** 2
        return max(1, min(available_cores(), MAX_JOBS, SCORE_BYTES // scores)) if self.device.type == "cpu" else 1

    @property
    def passes(self) -> int:
        """Times that all layers are gone through: the first gives each prompt's first new token."""
        return max(1, self.options.new_tokens)

    @cached_property
    def weight_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.source.entries.values())

    @property
    def read_bytes(self) -> int:
        """What is read from the source over all passes."""
        return self.weight_bytes * (1 if self.resident else self.passes)

    @cached_property
    def record(self) -> Mapping[str, Any]:
        """What decides the baseline's bytes; work done with other options is refused."""
        return {
            "command": "baseline",
            "tool_version": __version__,
            "options": asdict(self.options),
            "source_digest": self.source.digest(),
            "config_sha256": hashlib.sha256((self.source.root / "config.json").read_bytes()).hexdigest(),
            "sequences_sha256": sequences_digest(self.sequences),
            "compute": self.compute,
        }

    @property
    def compute(self) -> str:
        return f"{self.dtype} on {self.device.type}".removeprefix("torch.")

    def describe(self) -> dict[str, Any]:
        """Sizes for a dry run, bytes as integers."""
        layer, outside = layer_bytes(self.source, self.dtype)
        uses = [sequence.use for sequence in self.sequences]
        return {
            "architecture": self.source.arch.name,
            "layers": self.source.dims.layers,
            "kinds": sorted({sequence.kind for sequence in self.sequences if sequence.use == "text"}),
            "inputs": {use: uses.count(use) for use in sorted(set(uses))},
            "tokens": self.tokens,
            "compute": self.compute,
            "passes": self.passes,
            "read_bytes": self.read_bytes,
            "memory_bytes": self._all_layers if self.resident else max(layer, outside),
            "resident": self.resident,
            "warnings": list(self.warnings),
        }

    @cached_property
    def _all_layers(self) -> int:
        return _all_layer_bytes(self.source, self.dtype)


def make_plan(
    root: Path, options: Options, *, device: str = "auto", memory_budget: int = MEMORY_BUDGET, stream: bool = False
) -> Plan:
    """Check source, tokenizer, texts and device; nothing is written.

    Args:
        stream: never keep more than one layer in memory.

    Raises:
        InputError: the source or a text cannot be used.
        UsageError: an option or the device cannot.
    """
    check(options.texts)
    source = Source(root)
    source.require_classified()
    load_config(root)
    require_sound(source)
    place, dtype = choose_device(device)
    tokenizer = load_tokenizer(root)
    sequences, warnings = make_sequences(tokenizer, source.arch, source.dims, source.config, options.texts)
    for sequence in sequences:
        require_embedded(sequence.ids, source.dims.vocab)
    if options.new_tokens == 0:
        sequences = tuple(sequence for sequence in sequences if sequence.use != "prompt")
    resident = not stream and _all_layer_bytes(source, dtype) <= RESIDENT_SHARE * free_bytes(place)
    record = tokenizer_record(root, tokenizer)
    return Plan(source, options, sequences, record, warnings, place, dtype, memory_budget, resident)


def _all_layer_bytes(source: Source, dtype: torch.dtype) -> int:
    return source.dims.layers * layer_bytes(source, dtype)[0]
