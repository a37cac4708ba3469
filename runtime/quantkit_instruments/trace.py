"""Counts every GEMM that runs, so that a claim of INT8 is a count and not a belief.

Two independent sides are compared. What the files say: every weight stored as INT8, unfused and per expert, is
expected to run in INT8. What happened: INT8 layers report the weights that they multiplied with, and `GemmTrace` sees
every floating-point GEMM that torch dispatches, whoever called it, and finds the weights among its operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit_runtime.account import Account, unfused
from quantkit_runtime.graft import LoadedModel

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


def gemm_rows(account: Account) -> list[GemmRow]:
    """The table, INT8 first, then by phase and calls."""
    rows = [GemmRow(*row, len(account.weights[row]), calls) for row, calls in account.calls.items()]
    return sorted(rows, key=lambda row: (row.dtype != "int8", row.phase, -row.calls, row.kernel))


def judge(account: Account) -> Verdict:
    """What must have run in INT8 against what did."""
    forward = account.ran_int8("forward") & account.expected
    tested = (account.ran_int8("self-test") & account.routed & account.expected) - forward
    in_float = set().union(*(weights for row, weights in account.weights.items() if row[1] != "int8"))
    fallbacks = in_float & account.expected
    missing = account.expected - forward - tested - fallbacks
    return Verdict(len(account.expected), len(forward), len(tested), tuple(sorted(fallbacks)), tuple(sorted(missing)))


def trace(loaded: LoadedModel) -> GemmTrace:
    """A context in which every floating-point GEMM of a model is counted in its account."""
    files = loaded.files
    names = {row.name: unfused(files.arch, files.experts, row.key) for row in loaded.planned}
    return GemmTrace(loaded.account, loaded.model, names)


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
                self._account.record(f"torch.{name}", _dtype_name(values[-1].dtype), weights)
            elif name.startswith(_ATTENTION_OPS):
                self._account.record("torch.scaled_dot_product_attention", _dtype_name(args[0].dtype), ())
        return func(*args, **(kwargs or {}))

    def _weights_of(self, operand: Tensor) -> tuple[str, ...]:
        return self._by_storage.get(operand.untyped_storage().data_ptr(), ())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
