"""What INT8 keys and values cost: logits of held-out text through the paged cache, in INT8 against the compute dtype.

    python tests/bench/kv_accuracy.py [--small]

SmolLM2-135M and the tiny mixture of experts as they are, in float32, so that nothing but the cache differs. Windows of
512 tokens in chunks of 64, so that most keys are read back from the cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor

from quantkit.archs.modeling import load_tokenizer
from quantkit_instruments.perplexity import windows
from quantkit_runtime import device as devices
from quantkit_runtime.graft import LoadedModel, load_model
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.runner import Chunk, PagedRunner
from quantkit_runtime.session import make_runner

MODELS = common.ROOT / "tests" / "models"
KINDS = ("english", "code", "math", "chinese")
FORMATS = {"int8 keys": ("int8", "float32"), "int8 keys and values": ("int8", "int8")}
LENGTH, CHUNK = 512, 64


class Cost(NamedTuple):
    """Over all tokens: change of the perplexity in percent, mean KL divergence, share of equal likeliest tokens."""

    perplexity_percent: float
    kl: float
    same_top: float


def log_probabilities(loaded: LoadedModel, fmt: KvFormat, ids: Tensor) -> Tensor:
    """`[L, V]` after each token of a window, through the cache."""
    runner = make_runner(loaded, fmt, 1 + fmt.blocks(len(ids)))
    assert isinstance(runner, PagedRunner)
    runner.reserve(0, len(ids))
    parts = []
    for first in range(0, len(ids), CHUNK):
        chunk = Chunk(0, first, ids[first : first + CHUNK].tolist())
        parts.append(runner.forward([chunk], every_token=True).float().log_softmax(-1))
    return torch.cat(parts)


def cost(want: list[Tensor], got: list[Tensor], tokens: Tensor) -> Cost:
    losses = [
        torch.cat([-part[:-1].gather(1, ids[1:, None]) for part, ids in zip(parts, tokens, strict=True)]).mean()
        for parts in (want, got)
    ]
    kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(want, got, strict=True)]).mean()
    same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(want, got, strict=True)]).float().mean()
    return Cost(100 * (float((losses[1] - losses[0]).exp()) - 1), float(kl), float(same))


def measure(folder: Path, count: int) -> dict[str, Any]:
    loaded, tokenizer = load_model(folder, devices.resolve("cpu"), torch.float32), load_tokenizer(folder)
    found: dict[str, Any] = {}
    for kind in KINDS:
        lines = (MODELS / "texts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        tokens = windows(tokenizer, (json.loads(line)["text"] for line in lines), LENGTH)[:count]
        exact = KvFormat.of("float32", "float32", torch.float32)
        want = [log_probabilities(loaded, exact, ids) for ids in tokens]
        for name, dtypes in FORMATS.items():
            got = [log_probabilities(loaded, KvFormat.of(*dtypes, torch.float32), ids) for ids in tokens]
            found[f"{kind}, {name}"] = cost(want, got, tokens)._asdict()
    return found


def main() -> None:
    args = common.arguments(__doc__).parse_args()
    count = 1 if args.small else 6
    report = common.Report("kv_accuracy", args.small, {"windows": count, "length": LENGTH, "chunk": CHUNK})
    for name in ("smollm2-135m", "tiny-minimax-m2"):
        found = measure(MODELS / name, count)
        report.data[name] = found
        print(name)
        common.table(
            ["text, cache", "perplexity %", "KL", "same likeliest"],
            [
                [what, f"{row['perplexity_percent']:+.2f}", f"{row['kl']:.1e}", f"{row['same_top']:.1%}"]
                for what, row in found.items()
            ],
        )
        worst = max(abs(row["perplexity_percent"]) for row in found.values())
        report.target(f"{name}: largest change of perplexity in percent", worst, 1.0)
    report.write()


if __name__ == "__main__":
    main()
