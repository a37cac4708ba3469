"""Row-parallel INT8 layers of two ranks: their sums behind the product, or one half's beside the other half's.

    torchrun --nproc-per-node 2 tests/bench/gpu_overlap.py

Median time of a layer in bfloat16, sum included, by tokens; the results of both are compared bit by bit. From which
number of tokens a run does so is `--overlap` of `generate` and `bench`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import common
import torch

from quantkit.spec.mesh import Mesh
from quantkit_runtime import device
from quantkit_runtime.account import Account
from quantkit_runtime.layers import Int8Linear
from quantkit_runtime.parallel import Ranks, join, leave, world_size

LAYERS = {"o, 4096": (4096, 4096), "down, 4096": (4096, 12288), "o, 8192": (8192, 8192), "down, 8192": (8192, 28672)}
"""Name -> outputs, inputs of all ranks."""
TOKENS, REPEATS = (256, 512, 1024, 2048, 4096, 8192, 16384), 20


def layer(ranks: Ranks, n: int, k: int, overlap: int, card: device.Device) -> Int8Linear:
    generator = torch.Generator(card.torch).manual_seed(0)
    normal = torch.randn((n, k), device=card.torch, generator=generator)
    weight, scale = (normal * 32).round().clamp(-127, 127).to(torch.int8), torch.full((n, 1), 1e-4, device=card.torch)
    team = replace(ranks.tp, overlap=overlap)
    return Int8Linear(weight, scale, None, names=("x",), group_size=0, account=Account(), family=card.family, team=team)


def seconds(run: Any, ranks: Ranks, repeats: int) -> float:
    """Median over repeats, of the slowest rank."""
    times, wait = [], torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(repeats + 3):
        wait()
        ranks.world.objects(0)
        start = time.perf_counter()
        for _ in range(4):
            run()
        wait()
        times.append((time.perf_counter() - start) / 4)
    return max(ranks.world.objects(median(times[3:])))


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--commit", help="commit of this tree, where it is no checkout")
    args, card, size = parser.parse_args(), device.resolve(), world_size()
    repeats = 1 if args.small else REPEATS
    ranks = join(Mesh(tp=size), "the measurement is", on_card=card.family != "cpu")
    report = common.Report("gpu_overlap", args.small, {"ranks": size, "repeats": REPEATS})
    report.data.update(card=card.line, commit=args.commit or report.data["commit"], rows=[])
    for name, (n, k) in list(LAYERS.items())[:1] if args.small else LAYERS.items():
        behind, beside = (layer(ranks, n, k // size, overlap, card) for overlap in (0, 1))
        for tokens in TOKENS[:2] if args.small else TOKENS:
            x = torch.randn((tokens, k // size), device=card.torch, dtype=torch.bfloat16)
            with torch.no_grad():
                same = torch.equal(behind(x), beside(x))
                times = [seconds(partial(one, x), ranks, repeats) for one in (behind, beside, behind, beside)]
            before, after = min(times[::2]), min(times[1::2])
            row = {"layer": name, "tokens": tokens, "us": before * 1e6, "us_overlap": after * 1e6, "same": same}
            report.data["rows"].append({**row, "gain": before / after})
            if ranks.rank == 0:
                print(f"{name:12} {tokens:6} {before * 1e6:9.1f} {after * 1e6:9.1f} us {before / after:6.3f} {same}")
    if ranks.rank == 0:
        report.write()
    leave()


if __name__ == "__main__":
    main()
