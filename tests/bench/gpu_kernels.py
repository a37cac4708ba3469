"""Kernels on a card: against BF16 in the same run, against the card's own ceilings, and a decode step as a graph.

Every time is the median of graph replays over operands that no cache holds. Ratios are against torch's BF16 at the same
M; bandwidth is relative to a copy of 2 GB, counted read and written. `--tune` measures the card's table first.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional

from quantkit_instruments import tune
from quantkit_instruments.timing import call_us, capture, copies, median_us
from quantkit_runtime import device
from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.reference import Rope
from quantkit_runtime.kernels.tuning import VARIABLE, as_json, tuning

BF16 = torch.bfloat16
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 4096, 12288, 32, 8, 128, 24
CONTEXT, PAGE = 512, 16
GROUP = 128
DENSE = ((INNER, HIDDEN), (HIDDEN, INNER))
MOE = {"experts": 128, "per_token": 8, "hidden": 3072, "inner": 1536}


def int8(*shape: int) -> Tensor:
    return tune.normal_int8(shape)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") * 1e-3 + 1e-3


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def weights_bf16(n: int, k: int, count: int = 0) -> Tensor:
    shape = (count or copies(2 * n * k, 8), n, k)
    return torch.empty(shape, device="cuda", dtype=BF16).normal_(0, 1 / math.sqrt(k))


class Bench:
    def __init__(self, report: common.Report) -> None:
        self.report, self.rows = report, report.data.setdefault("rows", [])
        self.family = device.resolve().family
        self.bandwidth, self.bf16_tflops = 0.0, 0.0

    def row(self, what: str, us: float, **more: Any) -> float:
        values = {name: round(v, 4) if isinstance(v, float) else v for name, v in more.items()}
        self.rows.append({"what": what, "us": round(us, 2), **values})
        print(f"  {what:58} {us:10.1f} us  " + "  ".join(f"{k} {v}" for k, v in values.items()), flush=True)
        return us

    def find(self, op: str, rows: int, k: int = 0, group: int = 0) -> registry.Kernel:
        return registry.find(op, self.family, rows=rows, k=k, group=group)

    def ceilings(self) -> None:
        source, target = normal(500_000_000), normal(500_000_000)
        us = median_us(lambda: target.copy_(source), 10)  # in a graph a copy engine would do it, more slowly
        self.bandwidth = 2 * source.nbytes / us / 1e6
        self.row("copy of 1 GB", us, TB_per_s=self.bandwidth)
        a, b = normal(8192, 8192), normal(8192, 8192)
        us = call_us([partial(torch.matmul, a, b)])
        self.bf16_tflops = 2 * 8192**3 / us / 1e6
        self.row("bf16 8192^3", us, TFLOPs=self.bf16_tflops)

    # ------------------------------------------------------------------------------------------------ dense

    def dense(self) -> dict[tuple[int, int], dict[str, float]]:
        found = {}
        for n, k in DENSE:
            w_bf16, w = weights_bf16(n, k), int8(copies(n * k, 16), n, k)
            w_scale = scales(n, 1)
            for m in (1, 2, 4, 8, 16, 32, 64, 512, 600, 4096):
                x, x_bf16 = int8(m, k), normal(m, k)
                us = {"bf16": call_us([partial(functional.linear, x_bf16, one) for one in w_bf16])}
                floor, kernels = n * k / self.bandwidth / 1e6, {}
                for name, group in (("int8", 0), ("group128", GROUP)):
                    x_scale = scales(m, k // group if group else 1)
                    kernel = self.find("w8a8_gemm", m, k, group)
                    us[name] = call_us([partial(kernel.run, x, x_scale, one, w_scale, None, BF16) for one in w])
                    kernels[name] = kernel.name
                for name in ("int8", "group128"):
                    self.row(
                        f"gemm {k} -> {n}, M {m}, {name} ({kernels[name]})", us[name],
                        vs_bf16=us["bf16"] / us[name], of_bandwidth=floor / us[name],
                        TOPS=2 * m * n * k / us[name] / 1e6,
                    )  # fmt: skip
                found[(k, m)] = us
        return found

    # --------------------------------------------------------------------------------------------- quantize

    def quantize(self) -> list[float]:
        tokens, fractions = 8192, []
        weight = normal(HIDDEN)
        norm = self.find("norm_quantize", tokens).run
        x = [normal(tokens, HIDDEN) for _ in range(4)]
        gate_up = [normal(tokens, 2 * INNER) for _ in range(2)]
        runs = {
            "quantize": ([partial(self.find("quantize", tokens).run, one) for one in x], 3 * HIDDEN),
            "residual + RMSNorm + quantize": (
                [partial(norm, x[i], weight, 1e-5, x[i - 1], keep=False) for i in range(4)],
                7 * HIDDEN,
            ),
            "silu x up + quantize": (
                [partial(self.find("silu_mul_quantize", tokens).run, one) for one in gate_up], 5 * INNER),
        }  # fmt: skip
        for name, (calls, nbytes) in runs.items():
            us = call_us(calls)
            fractions.append(nbytes * tokens / us / 1e6 / self.bandwidth)
            self.row(f"{name}, {tokens} tokens", us, of_bandwidth=fractions[-1])
        return fractions

    # -------------------------------------------------------------------------------------------------- moe

    def moe(self, dense_tops: float) -> tuple[float, float]:
        e, per_token, h, inner = MOE["experts"], MOE["per_token"], MOE["hidden"], MOE["inner"]
        up, down = int8(e, 2 * inner, h), int8(e, h, inner)
        up_scale, down_scale = scales(e, 2 * inner, 1), scales(e, h, 1)
        rate = fraction = 0.0
        for tokens in (1, 4, 64, 4096):
            x, sets = normal(tokens, h), 8 if tokens < 64 else 2
            routes = [torch.rand((tokens, e), device="cuda").topk(per_token) for _ in range(sets)]
            index, weights = [route.indices for route in routes], [route.values.softmax(-1) for route in routes]
            layer = [
                partial(self.layer, x, i, w, up, up_scale, down, down_scale)
                for i, w in zip(index, weights, strict=True)
            ]
            us = call_us(layer)
            slots = tokens * per_token
            ops, hit = 2 * slots * 3 * h * inner, len(index[0].unique())
            read = hit * 3 * h * inner / us / 1e6 / self.bandwidth
            self.row(f"MoE layer, {tokens} tokens", us, TOPS=ops / us / 1e6, of_bandwidth=read)
            if tokens == 1:
                fraction = read
            if tokens == 4096:
                rate = self.moe_parts(x, index[0], weights[0], up, up_scale, down, down_scale) / dense_tops
        return rate, fraction

    def layer(
        self, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor
    ) -> Tensor:
        from quantkit_runtime.kernels.routed import Projection, routed_experts

        one, two = Projection(up, up_scale, None, 0), Projection(down, down_scale, None, 0)
        return routed_experts(x, index, weights, one, two, self.family, None)

    def moe_parts(
        self, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, up_s: Tensor, down: Tensor, down_s: Tensor
    ) -> float:
        """Rate of the two grouped GEMMs in TOPS, and a row for each part."""
        tokens, per_token, e = x.shape[0], MOE["per_token"], MOE["experts"]
        block = tuning().expert_block(index.numel(), e)
        find = self.find
        q, s = find("quantize", tokens).run(x)
        alignment = find("align", tokens).run(index, e, block)
        grouped = find("grouped_gemm", tokens).run
        inner = grouped(q, s, up, up_s, None, alignment, per_token, BF16)
        q2, s2 = find("silu_mul_quantize", tokens).run(inner)
        out = grouped(q2, s2, down, down_s, None, alignment, 1, BF16)
        parts = {
            "quantize": partial(find("quantize", tokens).run, x),
            "align": partial(find("align", tokens).run, index, e, block),
            "gate_up": partial(grouped, q, s, up, up_s, None, alignment, per_token, BF16),
            "silu x up + quantize": partial(find("silu_mul_quantize", tokens).run, inner),
            "down": partial(grouped, q2, s2, down, down_s, None, alignment, 1, BF16),
            "combine": partial(find("combine", tokens).run, out, weights, index, e),
        }
        us = {name: self.row(f"  MoE {tokens} tokens: {name}", call_us([run] * 4)) for name, run in parts.items()}
        return 2 * index.numel() * 3 * MOE["hidden"] * MOE["inner"] / (us["gate_up"] + us["down"]) / 1e6

    # -------------------------------------------------------------------------------------------- attention

    def attention(self, sequences: int = 8, context: int = 32768) -> float:
        us = {}
        for name, keys, values in (("bf16", False, False), ("int8 keys", True, False), ("int8", True, True)):
            args = tune.paged_operands(sequences, context, int8_keys=keys, int8_values=values)
            run = self.find("paged_decode", sequences).run
            us[name] = call_us([partial(run, *args, DIM**-0.5)])
            nbytes = sum(part.nbytes for part in args[1:5] if part is not None)
            fraction = nbytes / us[name] / 1e6 / self.bandwidth
            self.row(f"paged decode, {sequences} x {context}, {name}", us[name], of_bandwidth=fraction,
                     vs_bf16=us["bf16"] / us[name])  # fmt: skip
        return us["bf16"] / us["int8 keys"]

    # ------------------------------------------------------------------------------------------ decode step

    def decode(self, batch: int) -> dict[str, float]:
        int8_model, bf16_model = Int8Decoder(self, batch), Bf16Decoder(self, batch)
        us = {
            "int8": median_us(capture([int8_model.step]).replay),
            "bf16": median_us(capture([bf16_model.step]).replay),
        }
        self.decode_parts(int8_model)
        nbytes = LAYERS * sum(w.nbytes for w in int8_model.layers[0].weights)
        floor = nbytes / self.bandwidth / 1e6
        self.row(f"decode step, {LAYERS} layers, M {batch}, bf16 graph", us["bf16"])
        self.row(f"decode step, {LAYERS} layers, M {batch}, int8 graph", us["int8"], vs_bf16=us["bf16"] / us["int8"],
                 of_floor=floor / us["int8"], floor_us=floor)  # fmt: skip
        return {"ratio": us["bf16"] / us["int8"], "floor": floor / us["int8"]}

    def decode_parts(self, model: Int8Decoder) -> None:
        """Each operation of the step alone, once per layer in a graph."""
        layers, batch = model.layers, model.batch
        normed = self.find("norm_quantize", batch).run(model.hidden, layers[0].norms[0], 1e-5, model.hidden)
        qkv = model.linear(normed.q, normed.scale, layers[0], 0)
        q = model.rope_write(qkv, layers[0].cache)
        gate_up = model.linear(normed.q, normed.scale, layers[0], 2)
        inner = self.find("silu_mul_quantize", batch).run(gate_up)
        decode = self.find("paged_decode", batch).run
        norm = self.find("norm_quantize", batch).run
        parts = {
            "residual + RMSNorm + quantize": [
                partial(norm, model.hidden, one.norms[0], 1e-5, model.hidden) for one in layers
            ],
            "qkv": [partial(model.linear, normed.q, normed.scale, one, 0) for one in layers],
            "rope + cache": [partial(model.rope_write, qkv, one.cache) for one in layers],
            "attention": [partial(decode, q, *one.cache, model.table, model.lengths, 0.1) for one in layers],
            "quantize": [partial(self.find("quantize", batch).run, model.hidden) for _ in layers],
            "quantize and o": [partial(model.quantize_linear, model.hidden, one, 1) for one in layers],
            "o": [partial(model.linear, normed.q, normed.scale, one, 1) for one in layers],
            "gate_up": [partial(model.linear, normed.q, normed.scale, one, 2) for one in layers],
            "silu x up + quantize": [partial(self.find("silu_mul_quantize", batch).run, gate_up) for _ in layers],
            "down": [partial(model.linear, *inner, one, 3) for one in layers],
        }
        for name, calls in parts.items():
            self.row(f"  decode M {batch}: {name}", call_us(calls))


@dataclass
class Layer:
    """qkv, o, gate_up, down; scales of INT8 weights; norms; cache."""

    weights: list[Tensor]
    weight_scales: list[Tensor]
    norms: Tensor
    cache: tuple[Any, ...]


class Decoder:
    """One decode step of a Llama-shaped model without embedding and head, from the kernels alone."""

    def __init__(self, bench: Bench, batch: int, int8_weights: bool) -> None:
        self.bench, self.batch = bench, batch
        shapes = ((HIDDEN + 2 * KV_HEADS * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.layers = []
        for _ in range(LAYERS):
            operands = tune.paged_operands(batch, CONTEXT, int8_keys=int8_weights, kv_heads=KV_HEADS, heads=HEADS)
            made = [int8(n, k) if int8_weights else weights_bf16(n, k, 1)[0] for n, k in shapes]
            row_scales = [scales(n, 1) / math.sqrt(k) for n, k in shapes] if int8_weights else []
            self.layers.append(
                Layer(made, row_scales, torch.ones((2, HIDDEN), device="cuda", dtype=BF16), operands[1:5])
            )
            self.table, self.lengths = operands[5], operands[6]
        self.places = self.table[:, -1].long() * PAGE + PAGE - 1
        self.cos, self.sin = torch.rand((2, batch, DIM // 2), device="cuda").unbind()
        self.hidden = normal(batch, HIDDEN)

    def attend(self, qkv: Tensor, cache: tuple[Any, ...]) -> Tensor:
        decode, q = self.bench.find("paged_decode", self.batch).run, self.rope_write(qkv, cache)
        return decode(q, *cache, self.table, self.lengths, DIM**-0.5).view(self.batch, -1)

    def rope_write(self, qkv: Tensor, cache: tuple[Any, ...]) -> Tensor:
        parts = qkv.view(self.batch, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        write = self.bench.find("rope_write", self.batch).run
        rotated: Tensor = write(*parts, Rope(self.cos, self.sin), self.places, *cache)
        return rotated


class Int8Decoder(Decoder):
    def __init__(self, bench: Bench, batch: int) -> None:
        super().__init__(bench, batch, True)

    def linear(self, q: Tensor, scale: Tensor, layer: Layer, which: int) -> Tensor:
        run = self.bench.find("w8a8_gemm", self.batch, q.shape[1]).run
        return run(q, scale, layer.weights[which], layer.weight_scales[which], None, BF16)

    def quantize_linear(self, x: Tensor, layer: Layer, which: int) -> Tensor:
        """As the runtime does: in one kernel where there is one."""
        weight, scale, k = layer.weights[which], layer.weight_scales[which], x.shape[1]
        if registry.has("quantize_gemm", self.bench.family, rows=self.batch, k=k):
            return self.bench.find("quantize_gemm", self.batch, k).run(x, weight, scale, None, BF16)
        return self.linear(*self.bench.find("quantize", self.batch).run(x), layer, which)

    def step(self) -> Tensor:
        find = self.bench.find
        norm = find("norm_quantize", self.batch).run
        x, residual = self.hidden, None
        for layer in self.layers:
            normed = norm(x, layer.norms[0], 1e-5, residual, keep=False)
            attended = self.attend(self.linear(normed.q, normed.scale, layer, 0), layer.cache)
            x = self.quantize_linear(attended, layer, 1)
            normed = norm(x, layer.norms[1], 1e-5, normed.total, keep=False)
            silu = find("silu_mul_quantize", self.batch).run
            inner = silu(self.linear(normed.q, normed.scale, layer, 2))
            x, residual = self.linear(*inner, layer, 3), normed.total
        return x + residual


class Bf16Decoder(Decoder):
    def __init__(self, bench: Bench, batch: int) -> None:
        super().__init__(bench, batch, False)

    def step(self) -> Tensor:
        x = self.hidden
        for layer in self.layers:
            normed = functional.rms_norm(x, (HIDDEN,), layer.norms[0], 1e-5)
            qkv = functional.linear(normed, layer.weights[0])
            x = x + functional.linear(self.attend(qkv, layer.cache), layer.weights[1])
            gate, up = functional.linear(
                functional.rms_norm(x, (HIDDEN,), layer.norms[1], 1e-5), layer.weights[2]
            ).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.weights[3])
        return x


def measure_table(path: Path) -> None:
    tuner = tune.Tuner(lambda line: print(f"  tuned {line}", flush=True))
    table = tuner.run()
    path.write_text(json.dumps({device.resolve().arch: as_json(table)}), encoding="utf-8")
    rows = sorted((row.what, row.us, row.candidate) for row in tuner.rows)
    path.with_suffix(".txt").write_text("\n".join(f"{what}\t{us:.1f}\t{name}" for what, us, name in rows))
    os.environ[VARIABLE] = str(path)
    tuning.cache_clear()


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument(
        "--tune", type=Path, nargs="?", const=common.SCRATCH / "tuning.json", help="measure the card's table first"
    )
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    parser.add_argument("--only", default="dense,quantize,moe,attention,decode", help="sections, with commas")
    parser.add_argument("--warm", help="i/n: only compile every n-th candidate of --tune, for n processes at once")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.warm:
        first, step = map(int, args.warm.split("/"))
        tune.Tuner(only=(first, step)).run()
        return
    if args.tune:
        args.tune.parent.mkdir(parents=True, exist_ok=True)
        measure_table(args.tune)
    card = device.resolve()
    report = common.Report("gpu_kernels", args.small, {"context": CONTEXT, "layers": LAYERS, "moe": MOE})
    report.data["card"] = {"name": card.name, "arch": card.arch, "stack": card.stack}
    report.data["versions"]["triton"] = __import__("triton").__version__
    if args.commit:
        report.data["commit"] = args.commit
    print(f"card: {card.line}")
    bench, sections = Bench(report), set(args.only.split(","))
    bench.ceilings()
    tops = 0.0
    with torch.no_grad():
        if "dense" in sections:
            found = bench.dense()
            best = [(us["bf16"] / us["int8"], us["bf16"] / us["group128"]) for (_, m), us in found.items() if m == 4096]
            report.target(
                "prefill GEMM, M 4096, INT8 against BF16 (lesser of two shapes)",
                min(b[0] for b in best),
                1.6,
                at_most=False,
            )
            report.target("prefill GEMM, M 4096, groups of 128 (lesser)", min(b[1] for b in best), 1.25, at_most=False)
            tops = 2 * 4096 * HIDDEN * INNER / found[(HIDDEN, 4096)]["int8"] / 1e6
        if "quantize" in sections:
            report.target("fused quantize, least share of bandwidth", min(bench.quantize()), 0.85, at_most=False)
        if "moe" in sections:
            rate, fraction = bench.moe(tops or 1300.0)
            report.target("grouped MoE GEMMs, 4096 tokens, of the dense INT8 rate", rate, 0.6, at_most=False)
            report.target("MoE layer, 1 token, of bandwidth", fraction, 0.7, at_most=False)
        if "attention" in sections:
            report.target("paged decode at 32k, INT8 keys against BF16", bench.attention(), 1.3, at_most=False)
        if "decode" in sections:
            for batch, wanted in ((1, 1.9), (8, 1.6)):
                got = bench.decode(batch)
                report.target(f"decode graph, M {batch}, INT8 against BF16", got["ratio"], wanted, at_most=False)
                if batch == 1:
                    report.target(
                        "decode graph, M 1, of the weights' bandwidth floor", got["floor"], 0.75, at_most=False
                    )
    report.data["skipped_kernels"] = registry.skipped(card.family)
    report.data["tuning"] = as_json(tuning())
    report.write()


if __name__ == "__main__":
    main()
