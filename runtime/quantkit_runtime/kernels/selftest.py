"""Start-up self-test: every kernel in use against the torch reference, on the CPU, at several M and odd sizes.

A vendor's compiler or library may be wrong for some shapes only. Products must be exact in int32; what is rounded on
the way must agree to the last bits of float32. A kernel that fails is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import first_line
from quantkit_runtime.kernels import reference

TOKENS = (1, 4, 64, 128, 1000)
N, K, GROUP = 135, 1040, 16
"""Odd in tiles of any size; float32 holds sums of 1,040 products exactly."""

EXPERTS, PER_TOKEN = 5, 2


class Case(NamedTuple):
    """One call.

    Attributes:
        arguments: on the CPU.
        allowed: error of float results relative to the largest value.
        steps: error of int8 results; more than 0 where what is rounded may differ in its last bit.
    """

    arguments: tuple[Any, ...]
    allowed: float = 0.0
    steps: int = 0


def failure(op: str, run: Callable[..., Any], most_rows: int = 0, device: str = "cuda") -> str:
    """What is wrong with a kernel, or an empty string.

    Args:
        op: operation of the registry.
        run: the kernel.
        most_rows: skip larger numbers of tokens; 0 means none.
        device: where the kernel runs.
    """
    for tokens in TOKENS if not most_rows else [t for t in TOKENS if t <= most_rows]:
        for case in CASES[op](tokens):
            want = _tensors(_watched(op, _REFERENCES.get(op) or getattr(reference, op)), case.arguments)
            try:
                got = [result.cpu() for result in _tensors(_watched(op, run), _moved(case.arguments, device))]
            except Exception as error:  # a compiler's own errors have no common class
                return f"self-test with {tokens} tokens failed: {first_line(error)}"
            for result, expected in zip(got, want, strict=True):
                if complaint := _compare(result, expected, case):
                    return f"self-test with {tokens} tokens: {complaint}"
    return ""


def _compare(got: Tensor, want: Tensor, case: Case) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"a result is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    if not want.numel():
        return ""
    error = float((got.double() - want.double()).abs().max())
    integers = not want.dtype.is_floating_point
    allowed = case.steps if integers else case.allowed * float(want.double().abs().max())
    return "" if error <= allowed else f"a result is off by {error:.2g}, allowed {allowed:.2g}"


def _tensors(run: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    result = run(*arguments)
    return [result] if isinstance(result, Tensor) else [part for part in result if isinstance(part, Tensor)]


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        parts = [_moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


# -------------------------------------------------------------------------------------------------- cases


def _random(tokens: int) -> torch.Generator:
    return torch.Generator().manual_seed(tokens)


def _int8(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=random)


def _scales(random: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=random) + 0.01


def _index(random: torch.Generator, tokens: int) -> Tensor:
    """Distinct experts per token."""
    return torch.rand((tokens, EXPERTS), generator=random).argsort(1)[:, :PER_TOKEN]


def _gemm(tokens: int) -> Iterator[Case]:
    random = _random(tokens)
    x, w = _int8(random, tokens, K), _int8(random, N, K)
    yield Case((x, torch.ones(tokens, 1), w, torch.ones(N, 1), None, torch.float32))
    bias = torch.randn(N, generator=random)
    for groups in (1, K // GROUP):
        scale, w_scale = _scales(random, tokens, groups), _scales(random, N, 1)
        yield Case((x, scale, w, w_scale, bias, torch.float32), 1e-5)
        yield Case((x, scale, w, w_scale, bias.bfloat16(), torch.bfloat16), 1e-2)


def _expert_inputs(tokens: int) -> tuple[Tensor, ...]:
    random = _random(tokens)
    x, w = _int8(random, tokens, K), _int8(random, EXPERTS, N, K)
    bias = torch.randn((EXPERTS, N), generator=random)
    return x, _scales(random, tokens, 1), w, _scales(random, EXPERTS, N, 1), bias, _index(random, tokens)


def _grouped(tokens: int) -> Iterator[Case]:
    from quantkit_runtime.kernels.tuning import tuning

    x, scale, w, w_scale, bias, index = _expert_inputs(tokens)
    alignment = reference.align(index, EXPERTS, tuning().expert_block(index.numel(), EXPERTS))
    yield Case((x, scale, w, w_scale, bias, alignment, PER_TOKEN, torch.float32), 1e-5)


def _by_slot(tokens: int) -> Iterator[Case]:
    x, scale, w, w_scale, bias, index = _expert_inputs(tokens)
    yield Case((x, scale, w, w_scale, bias, index, PER_TOKEN, torch.float32), 1e-5)


def _quantize_gemm(tokens: int) -> Iterator[Case]:
    random = _random(tokens)
    x, w = torch.randn((tokens, K), generator=random), _int8(random, N, K)
    bias = torch.randn(N, generator=random)
    yield Case((x, w, _scales(random, N, 1), bias, torch.float32), 1e-5)
    yield Case((x.bfloat16(), w, _scales(random, N, 1), None, torch.float32), 1e-5)


def _plain(tokens: int) -> Iterator[Case]:
    yield Case((torch.randn((tokens, K), generator=_random(tokens)), 0), 1e-6)
    yield Case((torch.randn((tokens, K), generator=_random(tokens)).bfloat16(), GROUP), 1e-6)


def _norm(tokens: int) -> Iterator[Case]:
    random = _random(tokens)
    x, residual = torch.randn((2, tokens, K), generator=random).unbind()
    weight = torch.randn(K, generator=random)
    for unit_offset in (False, True):
        yield Case((x, weight, 1e-5, residual, unit_offset, GROUP), 1e-5, steps=1)


def _silu(tokens: int) -> Iterator[Case]:
    yield Case((torch.randn((tokens, 2 * K), generator=_random(tokens)), 0), 1e-5, steps=1)


def _alignment(tokens: int) -> Iterator[Case]:
    yield Case((_index(_random(tokens), tokens), EXPERTS, 16))


def _combine(tokens: int) -> Iterator[Case]:
    random = _random(tokens)
    out = torch.randn((tokens * PER_TOKEN, N), generator=random)
    yield Case((out, torch.rand((tokens, PER_TOKEN), generator=random), _index(random, tokens), EXPERTS), 1e-5)


def _decode(tokens: int) -> Iterator[Case]:
    if tokens > 64:
        return
    random, length, page = _random(tokens), 70, 16
    k, v = (_int8(random, 8, 2, page, 64) for _ in range(2))
    scales = [_scales(random, 8, 2, page) / 64 for _ in range(2)]
    q = torch.randn((tokens, 6, 64), generator=random)
    table = torch.stack([torch.randperm(8, generator=random)[:5] for _ in range(tokens)]).to(torch.int32)
    lengths = torch.randint(1, length, (tokens,), generator=random, dtype=torch.int32)
    sinks = torch.randn(6, generator=random)
    yield Case((q, k, scales[0], v, scales[1], table, lengths, 0.1, None, 0), 1e-3)
    yield Case((q, k, scales[0], v.float(), None, table, lengths, 0.1, sinks, 20), 1e-3)


def _prefill(tokens: int) -> Iterator[Case]:
    """Two sequences with and without a past, and padding; heads of a model, so that every row of the table comes up."""
    from quantkit_runtime.kernels.tuning import tuning

    random, page, heads = _random(tokens), 16, 32
    queries = tuning().prefill_shape(tokens, heads).queries
    shapes = [(tokens - tokens // 3, tokens - tokens // 3 + 21), (tokens // 3, tokens // 3)]
    rows = [*reference.cut(shapes, queries), (0, tokens, 1, -1), (0, 0, 0, 0)]
    tiles = reference.Tiles(torch.tensor(rows, dtype=torch.int32), queries)
    blocks = -(-shapes[0][1] // page)
    table = torch.randperm(2 * blocks, generator=random).view(2, -1).to(torch.int32)
    other = (64, 32, torch.int8, torch.int8, 50) if tokens > 64 else (80, 64, torch.float32, torch.float32, 0)
    for dim, dim_v, keys, values, window in ((128, 128, torch.int8, torch.float32, 0), other):
        stores: list[Tensor | None] = []
        for width, kept in ((dim, keys), (dim_v, values)):
            shape, int8 = (2 * blocks, 2, page, width), kept == torch.int8
            stores.append(_int8(random, *shape) if int8 else torch.randn(shape, generator=random))
            stores.append(_scales(random, *shape[:3]) / 64 if int8 else None)
        q, sinks = torch.randn((tokens + 1, heads, dim), generator=random), torch.randn(heads, generator=random)
        arguments = (*stores, table, tiles, 0.1, sinks if window else None, window)
        yield Case((q, *arguments), 1e-4) if window or keys != torch.int8 else Case((q.bfloat16(), *arguments), 1e-2)


def _rope_write(tokens: int) -> Iterator[Case]:
    random, heads, kv_heads, dim, page = _random(tokens), 6, 2, 64, 16
    qkv = torch.randn((heads + 2 * kv_heads, tokens, dim), generator=random).transpose(0, 1)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    blocks = -(-tokens // page) + 1
    places = torch.randperm(blocks * page, generator=random)[:tokens]
    shape = (blocks, kv_heads, page, dim)
    caches = (torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:3]), torch.zeros(shape), None)
    for pairs, adjacent in ((dim // 2, False), (12, False), (12, True)):
        cos, sin = torch.rand((2, tokens, 2 * pairs), generator=random)[..., :pairs].unbind()
        yield Case((q, k, v, reference.Rope(cos, sin, adjacent), places, *caches), 1e-5, steps=1)
    yield Case((q, k, v, None, places, *caches), 1e-5, steps=1)


def _watched(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    return _written(run) if op == "rope_write" else run


def _written(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Of an operation that writes into its arguments: its result and those."""

    def both(*arguments: Any) -> tuple[Tensor, ...]:
        caches = [value.clone() if isinstance(value, Tensor) else value for value in arguments[5:]]
        return (run(*arguments[:5], *caches), *(value for value in caches if isinstance(value, Tensor)))

    return both


def _expert_reference(*arguments: Any) -> Tensor:
    """As the grouped product."""
    x, scale, w, w_scale, bias, index, share, dtype = arguments
    alignment = reference.align(index, w.shape[0], 16)
    return reference.grouped_gemm(x, scale, w, w_scale, bias, alignment, share, dtype)


CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "w8a8_gemm": _gemm,
    "grouped_gemm": _grouped,
    "expert_gemm": _by_slot,
    "quantize_gemm": _quantize_gemm,
    "quantize": _plain,
    "norm_quantize": _norm,
    "silu_mul_quantize": _silu,
    "align": _alignment,
    "combine": _combine,
    "paged_decode": _decode,
    "paged_prefill": _prefill,
    "rope_write": _rope_write,
}
_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "expert_gemm": _expert_reference,
    "quantize_gemm": lambda x, *rest: reference.w8a8_gemm(*reference.quantize(x), *rest),
}
