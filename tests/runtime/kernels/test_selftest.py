"""The start-up self-test passes what is right and finds what is wrong; a kernel that fails is passed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_runtime import device
from quantkit_runtime.kernels import build, gemv, int_mm, reference, registry, selftest


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TOKENS", (1, 4, 33))


@pytest.mark.parametrize("op", sorted(set(selftest.CASES) - set(selftest._REFERENCES)))
def test_the_reference_passes(op: str) -> None:
    assert selftest.failure(op, getattr(reference, op), device="cpu") == ""


def test_another_right_kernel_passes() -> None:
    assert selftest.failure("w8a8_gemm", int_mm.w8a8_gemm, device="cpu") == ""


def off_by_one(*arguments: Any) -> Tensor:
    out = reference.w8a8_gemm(*arguments)
    out[-1, -1] += 1 if arguments[1].max() == 1 else 0
    return out


def wrong_for_groups(x: Tensor, x_scale: Tensor, *rest: Any) -> Tensor:
    return reference.w8a8_gemm(x, x_scale[:, :1].contiguous(), *rest)


def wrong_above_one_token(x: Tensor, *rest: Any) -> Tensor:
    return reference.w8a8_gemm(x, *rest) * (1 if len(x) == 1 else 1.001)


def raises(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (off_by_one, "with 1 tokens: a result is off by 1"),
        (wrong_for_groups, "with 1 tokens: a result is off"),
        (wrong_above_one_token, "with 4 tokens: a result is off"),
        (raises, "no kernel image is available"),
        (lambda *arguments: reference.w8a8_gemm(*arguments)[:, :-1], "not torch.float32 [1, 135]"),
    ],
)
def test_a_wrong_kernel_is_found(kernel: Any, complaint: str) -> None:
    assert complaint in selftest.failure("w8a8_gemm", kernel, device="cpu")


def test_a_nan_is_no_agreement() -> None:
    assert selftest.failure("combine", lambda *a: reference.combine(*a) * torch.nan, device="cpu")


def test_a_kernel_that_fails_is_passed_over_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_missing", lambda _: "")
    monkeypatch.setattr(registry, "_failed", lambda row, _: "off by 3" if row.name == "triton" else "")
    registry._usable.cache_clear()
    try:
        assert registry.names("w8a8_gemm", "hip") == ["streaming-gemv", "torch._int_mm"]
        assert "w8a8_gemm by triton: off by 3" in registry.skipped("hip")
    finally:
        registry._usable.cache_clear()
        registry._skipped.clear()


def test_a_build_that_fails_is_tried_once_for_all_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def load() -> None:
        tried.append(1)
        raise build.BuildError("hipcc failed")

    monkeypatch.setattr(gemv, "load", load)
    monkeypatch.setattr(device, "resolve", lambda: SimpleNamespace(family="hip"))
    caches = registry._usable, registry._not_built
    for cache in caches:
        cache.cache_clear()
    try:
        ops = {row.op for row in registry.ROWS if row.family == "hip" and row.needs == registry.COMPILER}
        for op in ops:
            assert "streaming-gemv" not in registry.names(op, "hip")
        assert sum("streaming-gemv: hipcc failed" in line for line in registry.skipped("hip")) == len(ops) == 3
        assert len(tried) == 1
    finally:
        for cache in caches:
            cache.cache_clear()
        registry._skipped.clear()
