"""The ledger of a model's GEMMs: which weights ran, in which kernel and dtype, and which the files hold in INT8.

INT8 layers report to it; `quantkit_instruments.trace` reports what torch computes, and judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from quantkit.archs import Architecture, Key


def weight_name(key: Key) -> str:
    """Name of a GEMM weight in tables: its shard name without the part (`layers.3.expert.down.7`)."""
    return key.with_part("").shard_name.removesuffix(".")


def unfused(arch: Architecture, experts: Sequence[int], key: Key) -> tuple[str, ...]:
    """Names of the single GEMM weights that one stored or executed tensor stands for.

    A fused tensor stands for its parts, a stacked one for those of every expert in it (`experts`).
    """
    role = arch.role(key.role)
    parts = role.parts or (key.role,)
    ids = experts if role.per_expert and key.expert is None else (key.expert,)
    return tuple(weight_name(Key(key.layer, part, expert, label=key.label)) for expert in ids for part in parts)


class Account:
    """The ledger of one loaded model.

    Args:
        expected: names of the INT8 weights in the files (`unfused`).
        routed: those among them that belong to routed experts, which may see no token.

    Attributes:
        calls, weights: number of calls and names of the weights by (kernel, dtype, phase).
    """

    def __init__(self, expected: Iterable[str] = (), routed: Iterable[str] = ()) -> None:
        self.expected = frozenset(expected)
        self.routed = frozenset(routed)
        self.phase = "forward"
        self.inside_int8 = self.tracing = False
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.weights: dict[tuple[str, str, str], set[str]] = {}

    @contextmanager
    def int8_gemm(self, kernel: str, weights: tuple[str, ...]) -> Iterator[None]:
        """Around an INT8 GEMM: what the kernel does inside is its own business and is not counted again."""
        self.inside_int8 = True
        try:
            yield
        finally:
            self.inside_int8 = False
        self.record(kernel, "int8", weights)

    @contextmanager
    def self_test(self) -> Iterator[None]:
        self.phase = "self-test"
        try:
            yield
        finally:
            self.phase = "forward"

    def record(self, kernel: str, dtype: str, weights: Iterable[str]) -> None:
        """Count a GEMM that ran; `int8_gemm` does so for INT8 ones."""
        row = (kernel, dtype, self.phase)
        self.calls[row] += 1
        self.weights.setdefault(row, set()).update(weights)

    def ran_int8(self, phase: str) -> set[str]:
        """Names of the weights that ran in INT8 in a phase."""
        found = (weights for (_, dtype, when), weights in self.weights.items() if (dtype, when) == ("int8", phase))
        return set().union(*found)
