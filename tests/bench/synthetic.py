"""Checkpoints of any size without a real model: BF16 mixture of experts with values, or terabytes of headers alone.

    python tests/bench/synthetic.py OUT --gb 4        # qwen3_moe with published names, random values
    python tests/bench/synthetic.py OUT --headers     # 3 trillion parameters, FP8 in blocks, sparse files

Values are normal with a spread of row scales (a factor of e in standard deviation), as trained weights have, and the
same for the same seed. Memory stays below 200 MB: values are cut from one pool at random places.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np

from tests.inspect.sparse import Row, fp8_block, nbytes, write_files, write_json

_POOL = 1 << 22
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the synthetic qwen3_moe: an expert tensor has 1.5 MiB, a layer about 310 MB."""

    hidden: int = 1536
    expert_width: int = 512
    experts: int = 64
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 8192

    def config(self, layers: int) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.expert_width,
            "num_experts": self.experts,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }

    def layer(self, index: int) -> list[Row]:
        prefix, h = f"model.layers.{index}", self.hidden
        attention = {
            "q_proj": (self.heads * self.head_dim, h),
            "k_proj": (self.kv_heads * self.head_dim, h),
            "v_proj": (self.kv_heads * self.head_dim, h),
            "o_proj": (h, self.heads * self.head_dim),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
        }
        rows = bf16({f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()})
        rows += bf16({f"{prefix}.input_layernorm": (h,), f"{prefix}.post_attention_layernorm": (h,)})
        rows += bf16({f"{prefix}.mlp.gate": (self.experts, h)})
        for expert in range(self.experts):
            name = f"{prefix}.mlp.experts.{expert}"
            rows += bf16({f"{name}.gate_proj": (self.expert_width, h), f"{name}.up_proj": (self.expert_width, h)})
            rows += bf16({f"{name}.down_proj": (h, self.expert_width)})
        return rows

    def outside(self) -> list[Row]:
        table = (self.vocab, self.hidden)
        return bf16({"model.embed_tokens": table, "lm_head": table, "model.norm": (self.hidden,)})


def bf16(shapes: dict[str, tuple[int, ...]]) -> list[Row]:
    return [(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]


# -------------------------------------------------------------------------------------------------- values


def synthetic(root: Path, size: int, *, seed: int = 0, file_bytes: int = 512 * common.MIB) -> Path:
    """Write a qwen3_moe checkpoint of about `size` bytes (at least one layer, 340 MB) to the new folder `root`.

    Args:
        size: wanted size; met to half a layer.
        seed: of all values.
        file_bytes: bound on a file.
    """
    shape = Shape()
    layers = max(1, round((size - nbytes(shape.outside())) / nbytes(shape.layer(0))))
    rows = [row for layer in range(layers) for row in shape.layer(layer)] + shape.outside()
    root.mkdir(parents=True)
    pool = np.random.default_rng([seed, 0]).standard_normal(_POOL, dtype=np.float32)
    random = np.random.default_rng([seed, 1])

    def payload(part: Sequence[Row]) -> Iterator[bytes]:
        for _, _, size in part:
            yield from values(size, pool, random)

    write_files(root, split(rows, file_bytes), payload)
    write_json(root / "config.json", shape.config(layers))
    return root


def values(shape: tuple[int, ...], pool: np.ndarray, random: np.random.Generator) -> Iterator[bytes]:
    """BF16 bytes of a tensor, some rows at a time; norms are near one."""
    if len(shape) == 1:
        yield to_bf16(1 + 0.1 * cut(pool, random, shape[0]))
        return
    rows, width = shape
    deviation = 1 / math.sqrt(width)
    for start in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - start)
        scales = deviation * np.exp(random.normal(0, 0.5, (count, 1))).astype(np.float32)
        yield to_bf16(cut(pool, random, count * width).reshape(count, width) * scales)


def cut(pool: np.ndarray, random: np.random.Generator, count: int) -> np.ndarray:
    start = int(random.integers(0, len(pool) - count))
    return pool[start : start + count]


def to_bf16(x: np.ndarray) -> bytes:
    """Round float32 to BF16, half to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


# ------------------------------------------------------------------------------------------------- headers


def headers_only(root: Path, *, layers: int = 93, experts: int = 896, hidden: int = 7168, width: int = 1664) -> Path:
    """Three trillion parameters in FP8 blocks (deepseek_v3 names, 500,000 tensors) as true headers over holes.

    One file for each layer; apparent size 3 TB, a few hundred megabytes on disk.
    """
    config = deepseek_config(layers, experts, hidden, width)
    parts = [deepseek_layer(index, config) for index in range(layers)]
    parts.append(bf16({"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}))
    parts.append(bf16({"lm_head": (config["vocab_size"], hidden)}))
    root.mkdir(parents=True)
    write_files(root, parts)
    write_json(root / "config.json", config)
    return root


def deepseek_config(layers: int, experts: int, hidden: int, width: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 18432,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "vocab_size": 163840,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }


def deepseek_layer(index: int, config: dict[str, Any]) -> list[Row]:
    prefix, hidden, heads = f"model.layers.{index}", config["hidden_size"], config["num_attention_heads"]
    attention, q_rank, kv_rank = f"{prefix}.self_attn", config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, v_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rows = bf16({f"{prefix}.input_layernorm": (hidden,), f"{prefix}.post_attention_layernorm": (hidden,)})
    rows += bf16({f"{attention}.q_a_layernorm": (q_rank,), f"{attention}.kv_a_layernorm": (kv_rank,)})
    rows += fp8_block(f"{attention}.q_a_proj", q_rank, hidden)
    rows += fp8_block(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
    rows += fp8_block(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    rows += fp8_block(f"{attention}.kv_b_proj", heads * (nope + v_dim), kv_rank)
    rows += fp8_block(f"{attention}.o_proj", hidden, heads * v_dim)
    if index < config["first_k_dense_replace"]:
        return rows + gated(f"{prefix}.mlp", hidden, config["intermediate_size"])
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    rows += bf16({f"{prefix}.mlp.gate": (experts, hidden)})
    rows.append((f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (experts,)))
    rows += gated(f"{prefix}.mlp.shared_experts", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        rows += gated(f"{prefix}.mlp.experts.{expert}", hidden, width)
    return rows


def gated(name: str, hidden: int, width: int) -> list[Row]:
    rows = fp8_block(f"{name}.gate_proj", width, hidden) + fp8_block(f"{name}.up_proj", width, hidden)
    return rows + fp8_block(f"{name}.down_proj", hidden, width)


# --------------------------------------------------------------------------------------------------- files


def split(rows: list[Row], file_bytes: int) -> list[list[Row]]:
    parts: list[list[Row]] = [[]]
    for row in rows:
        if parts[-1] and nbytes([*parts[-1], row]) > file_bytes:
            parts.append([])
        parts[-1].append(row)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="new folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gb", type=float, help="size in 10^9 bytes")
    what.add_argument("--headers", action="store_true", help="3 trillion parameters, headers alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.headers:
        headers_only(args.out)
    else:
        synthetic(args.out, round(args.gb * common.GB), seed=args.seed)
    shown, taken = common.folder_bytes(args.out), sum(f.stat().st_blocks * 512 for f in common.files_under([args.out]))
    print(f"{args.out}: {shown / common.GB:.2f} GB, {taken / common.GB:.2f} GB on disk")


if __name__ == "__main__":
    main()
