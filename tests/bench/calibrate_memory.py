"""Peak memory of `quantkit calibrate` against its rule: 1 GiB and twice the largest layer.

    python tests/bench/calibrate_memory.py [--small]

Models with large layers and tables, written a few rows at a time: dense (llama) and with experts (qwen3_moe,
synthetic.py). A layer counts as it is stored, in BF16; it is computed in float32. Few short texts: their activations
are not what is measured.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from convert_speed import fresh
from synthetic import Row, Shape, bf16, nbytes, split, values, write_files, write_json

TOKENIZER = common.ROOT / "tests" / "models" / "tiny-minimax-m2"
TEXT = ("--samples", "24", "--seq-len", "64")


@dataclass(frozen=True)
class Dense:
    """A llama with large layers and tables."""

    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 16
    kv_heads: int = 16
    vocab: int = 32768

    def config(self, layers: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }

    def layer(self, index: int) -> list[Row]:
        prefix, h = f"model.layers.{index}", self.hidden
        rows = bf16({f"{prefix}.self_attn.{name}_proj": (h, h) for name in "qkvo"})
        rows += bf16({f"{prefix}.mlp.{name}_proj": (self.intermediate, h) for name in ("gate", "up")})
        rows += bf16({f"{prefix}.mlp.down_proj": (h, self.intermediate)})
        return rows + bf16({f"{prefix}.{name}": (h,) for name in ("input_layernorm", "post_attention_layernorm")})

    def outside(self) -> list[Row]:
        table = (self.vocab, self.hidden)
        return bf16({"model.embed_tokens": table, "lm_head": table, "model.norm": (self.hidden,)})


def write_model(root: Path, shape: Dense | Shape, layers: int) -> int:
    """Write the checkpoint with a tokenizer; size of a layer in bytes."""
    rows = [row for layer in range(layers) for row in shape.layer(layer)] + shape.outside()
    root.mkdir(parents=True)
    pool = np.random.default_rng([0, 0]).standard_normal(1 << 22, dtype=np.float32)
    random = np.random.default_rng([0, 1])
    parts = split(rows, 512 * common.MIB)
    write_files(root, parts, lambda part: (data for _, _, size in part for data in values(size, pool, random)))
    write_json(root / "config.json", shape.config(layers))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, root)
    return nbytes(shape.layer(0))


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--jobs", type=int, help="batches at a time (default: the command's own)")
    args = parser.parse_args()
    layers = 2 if args.small else 4
    shapes: dict[str, Dense | Shape] = {
        "dense": Dense(),
        "dense, wide": Dense(hidden=4096, intermediate=14336, vocab=128000),
        "experts": Shape(),
    }
    if args.small:
        del shapes["dense, wide"]
    report = common.Report("calibrate_memory", args.small, {"layers": layers, "text": " ".join(TEXT)})
    report.data["models"] = {}
    table = []
    jobs = ("--jobs", str(args.jobs)) if args.jobs else ()
    for name, shape in shapes.items():
        root, out = fresh(args.work / "calibrate-model"), fresh(args.work / "calibrate-out")
        layer = write_model(root, shape, layers)
        command = [*common.QUANTKIT, "calibrate", root, "-o", out, *TEXT, *jobs, "--json"]
        found = common.run(command)
        assert json.loads(found.stdout)["observed_gemms"] > 0
        bound = 2**30 + 2 * layer
        report.data["models"][name] = {"layer_bytes": layer, "bound": bound, **found.row()}
        memory = (found.peak_rss, found.peak_anon, bound)
        table.append([name, common.mib(layer), *map(common.mib, memory), f"{found.cpu_seconds:.0f}"])
        shutil.rmtree(root)
        shutil.rmtree(out)
    common.table(["model", "layer MiB", "peak RSS", "anonymous", "rule", "cpu s"], table)
    for name, row in report.data["models"].items():
        report.target(f"{name}: peak RSS over 1 GiB + 2 layers", row["peak_rss"] / row["bound"], 1)
    report.write()


if __name__ == "__main__":
    main()
