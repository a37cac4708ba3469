"""Measures the card at hand and makes its table of tile sizes (`kernels.tuning`)."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit_instruments.timing import Call, call_us, copies
from quantkit_runtime import device
from quantkit_runtime.kernels import gemv, registry
from quantkit_runtime.kernels.reference import Tiles, cut
from quantkit_runtime.kernels.tuning import Attention, Prefill, Streaming, Tile, Tuning, tuning

SHAPES = ((12288, 4096), (4096, 12288))
"""(N, K) of the dense GEMMs: entering and leaving the MLP of a model of 7 to 13 B parameters."""

ROUTED = (64, 8, 3072, 2048)
"""Experts, experts per token, N and K of the routed GEMM."""

GROUP = 128
ANY = 1 << 30

DENSE = {
    16: [Tile(16, bn, bk, warps, stages, swap=swap) for bn, bk, warps, stages, swap in (
        (32, 128, 2, 6, False), (32, 256, 4, 5, False), (32, 512, 4, 4, False), (64, 128, 4, 6, False),
        (64, 256, 4, 4, False), (64, 256, 8, 4, False), (128, 128, 4, 5, False),
        (64, 128, 4, 6, True), (64, 256, 4, 5, True), (128, 128, 4, 5, True), (64, 512, 4, 3, True),
    )],
    64: [Tile(64, bn, bk, warps, stages, swap=swap) for bn, bk, warps, stages, swap in (
        (32, 256, 4, 4, False), (64, 128, 4, 5, False), (64, 256, 4, 4, False), (128, 128, 4, 5, False),
        (64, 256, 4, 4, True), (64, 128, 4, 6, True), (128, 128, 4, 4, True),
    )],
    512: [Tile(bm, bn, 128, warps, stages) for bm, bn, warps, stages in (
        (64, 128, 4, 4), (64, 256, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (128, 256, 8, 3), (64, 64, 4, 5),
    )],
    ANY: [Tile(bm, bn, bk, warps, stages, band) for bm, bn, bk, warps, stages, band in (
        (128, 256, 128, 8, 3, 8), (128, 256, 128, 8, 4, 8), (128, 256, 128, 8, 4, 16), (256, 128, 128, 8, 4, 8),
        (256, 128, 128, 8, 3, 16), (128, 128, 128, 8, 4, 8), (128, 128, 128, 4, 3, 4), (128, 128, 128, 4, 3, 8),
        (128, 128, 128, 4, 3, 16), (128, 128, 128, 4, 3, 32),
    )],
}  # fmt: skip
"""Candidates by the bound of the number of tokens; measured at the bound, the last at 4096."""

DENSE_GROUP = {
    16: [*DENSE[16][3:6:2], Tile(16, 32, 128, 4, 6), Tile(16, 64, 128, 4, 6, swap=True), Tile(16, 128, 128, 4, 5)],
    64: [*(Tile(64, bn, 128, 4, 5) for bn in (32, 64, 128)), Tile(64, 64, 128, 4, 6, swap=True)],
    512: [Tile(64, 128, 128, 4, 4), Tile(128, 128, 128, 8, 4), Tile(64, 64, 128, 4, 5)],
    ANY: [Tile(bm, bn, 128, warps, stages, band, swap) for bm, bn, warps, stages, band, swap in (
        (128, 128, 8, 4, 8, False), (128, 128, 8, 3, 16, False), (64, 128, 4, 4, 8, False), (64, 128, 4, 3, 8, False),
        (64, 256, 8, 4, 8, False), (128, 64, 4, 3, 16, False), (64, 64, 4, 4, 16, False), (64, 128, 8, 4, 8, False),
    )],
}  # fmt: skip

EXPERT_ROWS = {16: 1, 64: 32, ANY: 512}
"""Bound of the mean number of rows of an expert -> the number it is measured at."""

EXPERTS = {
    16: [Tile(16, bn, bk, 4, stages, swap=swap) for bn, bk, stages, swap in (
        (64, 128, 5, False), (64, 256, 4, False), (128, 128, 5, False), (64, 128, 6, True), (128, 128, 5, True))],
    64: [Tile(bm, bn, 128, warps, 4) for bm, bn, warps in ((32, 128, 4), (64, 128, 4), (64, 64, 4), (64, 256, 4))],
    ANY: [Tile(bm, bn, 128, warps, stages, band) for bm, bn, warps, stages, band in (
        (128, 128, 8, 4, 4), (128, 128, 4, 3, 4), (128, 256, 8, 4, 4), (128, 256, 8, 3, 8), (64, 256, 4, 4, 4),
        (64, 128, 4, 4, 4), (128, 256, 8, 4, 2), (64, 256, 8, 4, 8))],
}  # fmt: skip
EXPERTS_GROUP = {16: EXPERTS[16][:1], 64: EXPERTS[64][:3], ANY: [EXPERTS[ANY][0], EXPERTS[ANY][5]]}

GEMV = [Streaming(*shape) for shape in itertools.product(gemv.OUTPUTS, gemv.THREADS, (4, 8, 16))]
GEMV_TOKENS = (1, 2, 4, 8)

ATTENTION = [Attention(bn, warps, stages, 0) for bn, warps in ((32, 2), (64, 2), (128, 4)) for stages in (3, 4, 5)]


_CHUNK = [Prefill(*shape) for shape in (
    (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2),
    (128, 128, 8, 2), (128, 32, 8, 3),
)]  # fmt: skip
_REST = [Prefill(queries, bn, 4, stages) for queries in (16, 32, 64) for bn, stages in ((32, 3), (64, 2), (64, 3))]
PREFILL = {2048: (64, 32, _REST), 8192: (512, 16, [*_REST[3:6], *_CHUNK]), 16384: (512, 32, _CHUNK)}
PREFILL[ANY] = (2048, 32, _CHUNK)
"""Tokens, heads and candidates by the bound of tokens x heads."""


@dataclass(frozen=True)
class Measured:
    """One candidate: what for, what it is, its time in microseconds (infinite where it does not compile)."""

    what: str
    candidate: str
    us: float


def require_triton() -> None:
    """Refuse to tune without Triton.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise UsageError("Triton is not installed", "install the Triton of this torch (pip, or the vendor's wheel)")


class Tuner:
    """Runs the sweeps on the card at hand; `rows` collects every time.

    Args:
        report: told each choice.
        only: (i, n): compile every n-th candidate from the i-th on and measure nothing; processes with different i
            fill Triton's cache in parallel.
    """

    def __init__(self, report: Callable[[str], None] = lambda _: None, only: tuple[int, int] | None = None) -> None:
        self.rows: list[Measured] = []
        self._report, self._only = report, only
        self._random = torch.Generator("cuda").manual_seed(0)
        self._pool: dict[tuple[int, ...], Tensor] = {}

    def run(self) -> Tuning:
        """The table."""
        table = tuning()
        if "streaming-gemv" in registry.names("w8a8_gemm", device.resolve().family):
            table = replace(table, gemv=self.gemv())
        table = replace(
            table,
            gemm=self.dense(DENSE, 0),
            gemm_group=self.dense(DENSE_GROUP, GROUP),
            grouped=self.experts(EXPERTS, 0),
            attention=self.attention(int8_keys=True),
            attention_float=self.attention(int8_keys=False),
            prefill=self.prefill(),
            quantize=self.quantize(),
        )
        blocks_of = {bound: tile.bm for bound, tile in table.grouped}
        group = {bound: [replace(t, bm=blocks_of[bound]) for t in tiles] for bound, tiles in EXPERTS_GROUP.items()}
        table = replace(table, grouped_group=self.experts(group, GROUP))
        return replace(table, gemv_rows=self.handover(table))

    def gemv(self) -> tuple[tuple[int, Streaming], ...]:
        found = []
        for tokens in GEMV_TOKENS:
            calls = ((shape, self._gemv_calls(tokens, shape)) for shape in GEMV)
            found.append((tokens, self._best(f"gemv, {tokens} tokens", calls, str)))
        return tuple(found)

    def dense(self, candidates: dict[int, list[Tile]], group: int) -> tuple[tuple[int, Tile], ...]:
        found = []
        for bound, tiles in candidates.items():
            tokens = min(bound, 4096) if bound != 16 else 8
            what = f"gemm, {tokens} tokens" + (f", groups of {group}" if group else "")
            found.append((bound, self._best(what, ((t, self._tile_calls(tokens, group, t)) for t in tiles), _name)))
        return tuple(found)

    def experts(self, candidates: dict[int, list[Tile]], group: int) -> tuple[tuple[int, Tile], ...]:
        found = []
        for bound, tiles in candidates.items():
            what = f"experts, {EXPERT_ROWS[bound]} rows each" + (f", groups of {group}" if group else "")
            calls = ((t, self._expert_calls(EXPERT_ROWS[bound], group, t)) for t in tiles)
            found.append((bound, self._best(what, calls, _name)))
        return tuple(found)

    def quantize(self) -> tuple[tuple[int, int], ...]:
        from quantkit_runtime.kernels.triton import quantize

        found = []
        for bound, k in ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (ANY, 12288)):
            x = torch.randn((3, 8192, 2 * k), device="cuda", dtype=torch.bfloat16, generator=self._random)
            runs = ((quantize.quantize, x.view(6, 8192, k)), (quantize.silu_mul_quantize, x))
            calls = (
                (warps, [[partial(run, one, warps=warps) for one in inputs] for run, inputs in runs])
                for warps in (1, 2, 4, 8, 16, 32)
            )
            found.append((bound, self._best(f"quantize, {k} inputs", calls, str)))
        return tuple(found)

    def attention(self, *, int8_keys: bool, context: int = 32768, sequences: int = 8) -> Attention:
        from quantkit_runtime.kernels.triton import attention

        run: Callable[..., Tensor] = attention.paged_decode
        args = paged_operands(sequences, context, int8_keys=int8_keys)
        candidates = (replace(row, programs=programs) for programs in (528, 1056, 2112) for row in ATTENTION)
        calls = ((config, [[partial(run, *args, 0.088, config=config)]]) for config in candidates)
        keys = "int8" if int8_keys else "float"
        best: Attention = self._best(f"decode attention, {sequences} x {context}, {keys} keys", calls, str)
        return best

    def prefill(self, context: int = 8192) -> tuple[tuple[int, Prefill], ...]:
        """At the end of a text of `context` tokens with INT8 keys."""
        from quantkit_runtime.kernels.triton import prefill

        _, *stores, table, _ = paged_operands(1, context, int8_keys=True)

        run: Callable[..., Tensor] = prefill.paged_prefill

        def calls(tokens: int, heads: int, shape: Prefill) -> list[list[Call]]:
            q = torch.randn((tokens, heads, 128), device="cuda", dtype=torch.bfloat16, generator=self._random)
            rows = torch.tensor(cut([(tokens, context)], shape.queries), device="cuda", dtype=torch.int32)
            tiles = Tiles(rows, shape.queries)
            return [[partial(run, q, *stores, table, tiles, 0.088, config=shape)]]

        found = []
        for bound, (tokens, heads, shapes) in PREFILL.items():
            what = f"prefill attention, {tokens} tokens, {heads} heads"
            found.append((bound, self._best(what, ((one, calls(tokens, heads, one)) for one in shapes), str)))
        return tuple(found)

    def handover(self, table: Tuning) -> int:
        """Largest number of tokens at which the GEMV is no slower than tiles."""
        best = 0
        for tokens in (1, 2, 3, 4, 6, 8):
            shape = table.streaming(tokens)
            ours = self._time(f"gemv, {tokens} tokens", str(shape), self._gemv_calls(tokens, shape))
            tile = table.gemm_tile(tokens, grouped_activations=False)
            tiled = self._time(f"gemm, {tokens} tokens", _name(tile), self._tile_calls(tokens, 0, tile))
            if ours <= tiled:
                best = tokens
        return best

    # -------------------------------------------------------------------------------------------- calls

    def _tile_calls(self, tokens: int, group: int, tile: Tile) -> Iterator[list[Call]]:
        from quantkit_runtime.kernels.triton import gemm

        for n, k in SHAPES:
            weights, scales = self._weights(n, k)
            x, x_scale = self._activations(tokens, k, group)
            yield [partial(gemm.w8a8_gemm, x, x_scale, w, scales, None, torch.bfloat16, tile) for w in weights]

    def _gemv_calls(self, tokens: int, shape: Streaming) -> Iterator[list[Call]]:
        for n, k in SHAPES:
            weights, scales = self._weights(n, k)
            x, x_scale = self._activations(tokens, k, 0)
            out = torch.empty((tokens, n), device="cuda", dtype=torch.bfloat16)
            yield [partial(gemv.load(), x, x_scale, w, scales, None, out, shape=shape) for w in weights]

    def _expert_calls(self, rows: int, group: int, tile: Tile) -> Iterator[list[Call]]:
        from quantkit_runtime.kernels.triton import gemm, routing

        experts, per_token, n, k = ROUTED
        tokens = rows * experts // per_token
        weights, scales = self._weights(n, k, experts)
        x, x_scale = self._activations(tokens, k, group)
        index = torch.rand((tokens, experts), device="cuda", generator=self._random).topk(per_token).indices
        alignment = routing.align(index, experts, tile.bm)
        run = gemm.grouped_gemm
        yield [partial(run, x, x_scale, w, scales, None, alignment, per_token, torch.bfloat16, tile) for w in weights]

    def _weights(self, n: int, k: int, experts: int = 0) -> tuple[Tensor, Tensor]:
        lead = (experts,) if experts else ()
        shape = (copies(n * k * max(1, experts), 16), *lead, n, k)
        if shape not in self._pool:
            self._pool[shape] = normal_int8(shape, self._random)
        return self._pool[shape], torch.rand((*lead, n, 1), device="cuda", generator=self._random)

    def _activations(self, tokens: int, k: int, group: int) -> tuple[Tensor, Tensor]:
        return normal_int8((tokens, k), self._random), torch.rand(
            (tokens, k // group if group else 1), device="cuda", generator=self._random
        )

    # -------------------------------------------------------------------------------------------- choice

    def _best(
        self, what: str, candidates: Iterable[tuple[Any, Iterable[Sequence[Call]]]], name: Callable[[Any], str]
    ) -> Any:
        timed = [(self._time(what, name(candidate), calls), candidate) for candidate, calls in candidates]
        us, best = min(timed, key=lambda pair: pair[0])
        self._report(f"{what}: {name(best)}, {us:.1f} us")
        return best

    def _time(self, what: str, name: str, calls: Iterable[Sequence[Call]]) -> float:
        """Sum over the shapes; a candidate that does not compile or fit into the card counts as infinite."""
        first, step = self._only or (0, 1)
        if len(self.rows) % step != first:
            self.rows.append(Measured(what, name, 0.0))
            return 0.0
        try:
            groups = list(calls)
            if self._only:
                for group in groups:
                    group[0]()
                us = 0.0
            else:
                us = sum(call_us(group) for group in groups)
        except Exception as error:  # a compiler's own errors have no common class
            us = float("inf")
            name += f" ({type(error).__name__})"
        self.rows.append(Measured(what, name, us))
        return us


def normal_int8(shape: tuple[int, ...], random: torch.Generator | None = None) -> Tensor:
    """Normal values, as quantized weights are: the power that dense bits cost would slow the card down."""
    made = torch.empty(shape, device="cuda", dtype=torch.int8)
    for part in made.view(-1, shape[-1]).split(1 << 16):
        normal = torch.randn(part.shape, device="cuda", generator=random)
        part.copy_(normal.mul_(32).round_().clamp_(-127, 127))
    return made


def paged_operands(
    sequences: int, context: int, *, int8_keys: bool, int8_values: bool = False, kv_heads: int = 8, heads: int = 32
) -> tuple[Any, ...]:
    """First arguments of `paged_decode`: queries, a full cache in pages of 16 in random order, table and lengths."""
    page, dim = 16, 128
    blocks = sequences * context // page
    q = torch.randn((sequences, heads, dim), device="cuda", dtype=torch.bfloat16)

    def cache(quantized: bool) -> tuple[Tensor, Tensor | None]:
        shape = (blocks, kv_heads, page, dim)
        if not quantized:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16), None
        values = torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
        return values, torch.rand(shape[:3], device="cuda") / 40

    k, v = cache(int8_keys), cache(int8_values)
    table = torch.randperm(blocks, device="cuda").view(sequences, -1).to(torch.int32)
    return q, *k, *v, table, torch.full((sequences,), context, device="cuda", dtype=torch.int32)


def _name(tile: Tile) -> str:
    shape = f"{tile.bm}x{tile.bn}x{tile.bk}, {tile.warps} warps, {tile.stages} stages, band {tile.band}"
    return shape + (", swapped" if tile.swap else "")
