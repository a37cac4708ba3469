"""The shape of a native format's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.spec.tensorfile import TensorInfo

ReadPart = Callable[[str, tuple[int, int] | None], Tensor]
"""(part, rows along dimension 0 or None) -> the stored tensor."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NativeFormat:
    """One way to store a weight.

    Attributes:
        name: for reports.
        parts: part -> dtypes it may have; exactly these parts must be there, `optional` ones may be.
        shape: logical shape from the stored tensors.
        decode: reads what it needs and returns the logical weight, or rows of it along dimension 0; float.
        dtype: dtype of what `decode` returns, by the stored tensors (safetensors name).
        optional: further parts that may be present.
    """

    name: str
    parts: Mapping[str, frozenset[str]]
    shape: Callable[[Mapping[str, TensorInfo]], Shape]
    decode: Callable[[Mapping[str, TensorInfo], ReadPart, tuple[int, int] | None], Tensor]
    dtype: Callable[[Mapping[str, TensorInfo]], str]
    optional: frozenset[str] = frozenset()

    def matches(self, stored: Mapping[str, TensorInfo]) -> bool:
        present = stored.keys() - self.optional
        return present == self.parts.keys() and all(stored[part].dtype in dtypes for part, dtypes in self.parts.items())
