"""Triton's interpreter for every kernel that this process imports; missing tools fail where they are required."""

from __future__ import annotations

import importlib.util
import os
import shutil
from types import ModuleType
from typing import Any

import pytest

# With a card too, where the tests' own setting leaves other tests to the compiler; before any kernel is imported, since
# the decorator reads it.
os.environ.setdefault("TRITON_INTERPRET", "1")

REQUIRED = os.environ.get("QUANTKIT_KERNEL_TOOLS") == "required"
"""Set by `make kernels`, which installs the tools."""


def _require(found: bool, what: str) -> None:
    if not found:
        (pytest.fail if REQUIRED else pytest.skip)(f"{what} is not installed: make kernels")


def _fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounds once, as cards do; the interpreter's own rounds the product too. float64 holds products of float32."""
    from triton.runtime.interpreter import TensorHandle

    exact = x.data.astype("float64") * y.data + z.data
    return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


@pytest.fixture(scope="session")
def needs_triton() -> None:
    _require(importlib.util.find_spec("triton") is not None, "Triton")


@pytest.fixture(scope="session")
def triton_kernels(needs_triton: None) -> dict[str, ModuleType]:
    """Modules of the Triton kernels by name, interpreted."""
    from triton.runtime import interpreter

    interpreter.InterpreterBuilder.create_fma = _fma
    names = ("gemm", "quantize", "routing", "attention", "prefill", "cache")
    modules = {name: importlib.import_module(f"quantkit_runtime.kernels.triton.{name}") for name in names}
    interpreted = type(modules["gemm"]._gemm).__name__ == "InterpretedFunction"
    assert interpreted, "a kernel was imported before TRITON_INTERPRET was set"
    return modules


@pytest.fixture(scope="session")
def hipcc() -> str:
    """Path of hipcc."""
    found = shutil.which("hipcc")
    _require(found is not None, "hipcc")
    return str(found)
