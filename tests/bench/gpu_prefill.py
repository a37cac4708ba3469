"""Prefill attention over the paged cache on the card at hand: odd shapes against the reference, then its time.

    python tests/bench/gpu_prefill.py [--tune] [--small]

Times are of 512 and 2048 queries at the end of a text of 8,192 tokens, 32 heads of 128 over 8 key heads, INT8 keys,
beside torch's attention over plain BF16 keys with a mask, which is what runs without the kernel. `--tune` measures the
candidates of `quantkit-runtime tune` and prints rows for `kernels/tuning.json`. `--small` checks fewer shapes.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit_instruments import tune
from quantkit_instruments.timing import call_us
from quantkit_runtime import device
from quantkit_runtime.kernels import reference, registry
from quantkit_runtime.kernels.reference import Tiles, cut
from quantkit_runtime.kernels.tuning import tuning
from tests.runtime.kernels import cases

LIMIT = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
PACKED = {
    "one query": ((1,), (38,)),
    "packed": ((3, 16, 1, 64), (3, 45, 290, 71)),
    "more than 64": ((129,), (333,)),
    "more than 512": ((500, 29), (517, 29)),
}
DIMS = ((128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256))
STORES = ((True, False), (False, False), (True, True))
HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 8192


def checks(run: Any, small: bool) -> tuple[int, list[str]]:
    """Number of shapes, and those that are off."""
    wrong, count, shapes = [], 0, [shape for _, shape in tuning().prefill]
    chosen = itertools.product(PACKED.items(), DIMS, STORES, (torch.bfloat16, torch.float32), (0, 40))
    for index, ((name, (counts, lengths)), dims, int8, dtype, window) in enumerate(chosen):
        if index % (17 if small else 11):  # primes that divide no column's length: each value of each column comes up
            continue
        pages = cases.pages(lengths, 2, 16, dims, *int8)
        tokens = sum(counts) + 3
        shape = shapes[count % len(shapes) if dtype == torch.bfloat16 else 0]
        tiles = cases.tiles(counts, lengths, shape.queries, padding=3, spare=2)
        q, sinks = cases.normal(3, tokens, 6, dims[0], dtype=dtype), cases.normal(5, 6) if window else None
        stores = pages.k_cache, pages.k_scale, pages.v_cache, pages.v_scale
        rest = dims[0] ** -0.5, sinks, window, 5.0 if window and dims[0] == 80 else 0.0
        want = reference.paged_prefill(q, *stores, pages.block_table, tiles, *rest).float()
        on_card = [None if x is None else x.cuda() for x in (q, *stores, pages.block_table)]
        moved = Tiles(tiles.rows.cuda(), tiles.queries), rest[0], None if sinks is None else sinks.cuda(), *rest[2:]
        what = f"{shape}: {name}, heads of {dims}, int8 {int8}, {dtype}, window {window}"
        count += 1
        try:
            got = run(*on_card, *moved, config=shape).float().cpu()
        except Exception as error:  # a compiler's own errors have no common class
            wrong.append(f"{what}: {type(error).__name__} {error}")
            continue
        error = float((got - want).abs().max() / want.abs().max())
        if not error <= LIMIT[dtype]:
            wrong.append(f"{what}: off by {error:.2g}, allowed {LIMIT[dtype]:.2g}")
    return count, wrong


def masked(q_THD: Tensor, k_GLD: Tensor, v_GLD: Tensor) -> Tensor:
    """torch's attention of the last T positions with a mask, as the runtime calls it."""
    (t, heads, dim), (groups, length, _) = q_THD.shape, k_GLD.shape
    seen = torch.ones((t, length), dtype=torch.bool, device=q_THD.device).tril(length - t).repeat(heads // groups, 1)
    q = q_THD.transpose(0, 1).reshape(1, groups, -1, dim)
    return scaled_dot_product_attention(q, k_GLD[None], v_GLD[None], attn_mask=seen, scale=0.088)


def times(run: Any) -> dict[str, dict[str, float]]:
    """Microseconds and TFLOP/s of the products that causality leaves."""
    found = {}
    _, *stores, table, _ = tune.paged_operands(1, CONTEXT, int8_keys=True, kv_heads=KV_HEADS, heads=HEADS)
    for tokens, heads in ((64, HEADS), (512, HEADS), (512, HEADS // 2), (2048, HEADS)):
        q = torch.randn((tokens, heads, DIM), device="cuda", dtype=torch.bfloat16)
        queries = tuning().prefill_shape(tokens, heads).queries
        rows = torch.tensor(cut([(tokens, CONTEXT)], queries), device="cuda", dtype=torch.int32)
        own = call_us([partial(run, q, *stores, table, Tiles(rows, queries), 0.088)])
        k, v = (torch.randn((KV_HEADS, CONTEXT, DIM), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        other = call_us([partial(masked, q, k, v)])
        flops = 4 * heads * DIM * tokens * (CONTEXT - tokens / 2)
        found[f"{tokens} queries, {heads} heads"] = {"us": own, "tflops": flops / own / 1e6, "torch_us": other}
    cells = [
        [name, f"{row['us']:.0f}", f"{row['tflops']:.0f}", f"{row['torch_us']:.0f}"] for name, row in found.items()
    ]
    common.table(["at the end of 8,192 tokens", "us", "TFLOP/s", "torch with a mask, us"], cells)
    return found


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--tune", action="store_true", help="measure the candidates and print the best as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no card; the interpreter's tests are tests/runtime/kernels/test_triton.py")
    report = common.Report("gpu_prefill", args.small, {"card": device.resolve().line})
    family, start = device.resolve().family, time.time()
    kernel = registry.find("paged_prefill", family)
    print(f"start-up self-test: {time.time() - start:.0f} s; passed over: {registry.skipped(family)}", flush=True)
    if kernel.name != "triton":
        sys.exit("the kernel does not serve here")
    start = time.time()
    count, wrong = checks(kernel.run, args.small)
    print(f"{count} shapes in {time.time() - start:.0f} s, {len(wrong)} off", *wrong, sep="\n  ", flush=True)
    report.data |= {"shapes": count, "off": wrong, "kernel": kernel.name}
    report.target("shapes that are off", len(wrong), 0)
    report.data["times"] = times(kernel.run)
    if args.tune:
        tuner = tune.Tuner(lambda line: print(line, flush=True))
        best = [[bound, asdict(shape)] for bound, shape in tuner.prefill()]
        for row in tuner.rows:
            print(f"  {row.what}: {row.candidate}, {row.us:.1f} us")
        report.data["tuned"] = best
        print(json.dumps(best))
    report.write()


if __name__ == "__main__":
    main()
