"""Counts every GEMM that runs, so that a claim of INT8 is a count and not a belief.

Two independent sides are compared. What the files say: every weight stored as INT8, unfused and per expert, is
expected to run in INT8. What happened: INT8 layers report the weights that they multiplied with, and `GemmTrace` sees
every floating-point GEMM that torch dispatches, whoever called it, and finds the weights among its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.archs import Architecture, Key

_GEMM_OPS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "mv",
        "addmv",
        "linear",
        "matmul",
        "_grouped_mm",
        "grouped_mm_fallback",
        "_int_mm",
    }
)
_ATTENTION_OPS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


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


@dataclass(frozen=True)
class GemmRow:
    """GEMMs of one kernel and dtype: distinct weights, and calls."""

    kernel: str
    dtype: str
    phase: str
    weights: int
    calls: int


@dataclass(frozen=True)
class Verdict:
    """Expected INT8 GEMM weights against those that ran.

    Attributes:
        expected: INT8 weights in the files that this model uses.
        forward: of these, run in INT8 by the model's forward.
        self_tested: of these, run only by the self-test: experts that no token was routed to.
        fallbacks: run in floating point although stored as INT8.
        missing: never run in INT8.
    """

    expected: int
    forward: int
    self_tested: int
    fallbacks: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.fallbacks and not self.missing


class Account:
    """The ledger of one loaded model.

    Args:
        expected: names of the INT8 weights in the files (`unfused`).
        routed: those among them that belong to routed experts, which may see no token.
    """

    def __init__(self, expected: Iterable[str] = (), routed: Iterable[str] = ()) -> None:
        self.expected = frozenset(expected)
        self.routed = frozenset(routed)
        self.phase = "forward"
        self.inside_int8 = self.tracing = False
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._weights: dict[tuple[str, str, str], set[str]] = {}

    @contextmanager
    def int8_gemm(self, kernel: str, weights: tuple[str, ...]) -> Iterator[None]:
        """Around an INT8 GEMM: what the kernel does inside is its own business and is not counted again."""
        self.inside_int8 = True
        try:
            yield
        finally:
            self.inside_int8 = False
        self._record(kernel, "int8", weights)

    def float_gemm(self, kernel: str, dtype: str, weights: Iterable[str]) -> None:
        self._record(kernel, dtype, weights)

    @contextmanager
    def self_test(self) -> Iterator[None]:
        self.phase = "self-test"
        try:
            yield
        finally:
            self.phase = "forward"

    def _record(self, kernel: str, dtype: str, weights: Iterable[str]) -> None:
        row = (kernel, dtype, self.phase)
        self._calls[row] += 1
        self._weights.setdefault(row, set()).update(weights)

    def rows(self) -> list[GemmRow]:
        """The table, INT8 first, then by phase and calls."""
        rows = [GemmRow(*row, len(self._weights[row]), calls) for row, calls in self._calls.items()]
        return sorted(rows, key=lambda row: (row.dtype != "int8", row.phase, -row.calls, row.kernel))

    def ran_int8(self, phase: str) -> set[str]:
        """Names of the weights that ran in INT8 in a phase."""
        found = (weights for (_, dtype, when), weights in self._weights.items() if (dtype, when) == ("int8", phase))
        return set().union(*found)

    def verdict(self) -> Verdict:
        forward = self.ran_int8("forward") & self.expected
        tested = (self.ran_int8("self-test") & self.routed & self.expected) - forward
        in_float = set().union(*(weights for row, weights in self._weights.items() if row[1] != "int8"))
        fallbacks = in_float & self.expected
        missing = self.expected - forward - tested - fallbacks
        return Verdict(len(self.expected), len(forward), len(tested), tuple(sorted(fallbacks)), tuple(sorted(missing)))


class GemmTrace(TorchDispatchMode):
    """While active, reports every floating-point GEMM to an account.

    Args:
        account: the ledger.
        model: whose parameters are looked for among the operands.
        names: parameter name -> names of the GEMM weights that it holds.
    """

    def __init__(self, account: Account, model: nn.Module, names: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, which mypy does not see behind super()
        self._account = account
        # a transposed or sliced operand is a view: it has the storage of its parameter
        self._by_storage = {
            parameter.untyped_storage().data_ptr(): names[name]
            for name, parameter in model.named_parameters()
            if name in names
        }

    def __enter__(self) -> GemmTrace:
        self._account.tracing = True
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's, which mypy does not see behind super()
        return self

    def __exit__(self, *error: Any) -> None:
        self._account.tracing = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's, which mypy does not see behind super()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._account.inside_int8:
            name = func.overloadpacket.__name__
            if name in _GEMM_OPS:
                operands = [arg for arg in args if isinstance(arg, Tensor)]
                weights = {weight for operand in operands for weight in self._weights_of(operand)}
                # the offsets of a grouped GEMM are int32 and say nothing about its arithmetic
                values = [operand for operand in operands if operand.dtype != torch.int32] or operands
                self._account.float_gemm(f"torch.{name}", _dtype_name(values[-1].dtype), weights)
            elif name.startswith(_ATTENTION_OPS):
                self._account.float_gemm("torch.scaled_dot_product_attention", _dtype_name(args[0].dtype), ())
        return func(*args, **(kwargs or {}))

    def _weights_of(self, operand: Tensor) -> tuple[str, ...]:
        return self._by_storage.get(operand.untyped_storage().data_ptr(), ())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
