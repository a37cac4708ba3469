"""Checkpoints of full size without their bytes: real headers over a hole in each file, terabytes in kilobytes."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quantkit.spec.tensorfile import build_header, tensor_nbytes

Row = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


def nbytes(rows: Iterable[Row]) -> int:
    return sum(tensor_nbytes(dtype, shape) for _, dtype, shape in rows)


def write(root: Path, config: dict[str, Any], rows: Iterable[Row]) -> Path:
    """A one-file checkpoint without an index."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    write_file(root / "model.safetensors", list(rows), {}, None)
    return root


def write_files(
    root: Path, parts: Sequence[Sequence[Row]], payload: Callable[[Sequence[Row]], Iterable[bytes]] | None = None
) -> None:
    """Files of the published naming and their index; without `payload` the data is a hole."""
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        weight_map |= dict.fromkeys((row[0] for row in part), name)
        write_file(root / name, part, {"format": "pt"}, payload)
    total = sum(map(nbytes, parts))
    write_json(root / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_file(
    path: Path,
    rows: Sequence[Row],
    metadata: dict[str, str],
    payload: Callable[[Sequence[Row]], Iterable[bytes]] | None,
) -> None:
    header = build_header(rows, metadata)
    with path.open("wb") as file:
        file.write(header)
        if payload is None:
            file.truncate(len(header) + nbytes(rows))
        else:
            file.writelines(payload(rows))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def bf16(name: str, *shape: int) -> list[Row]:
    return [(f"{name}.weight", "BF16", shape)]


def fp8_block(name: str, n: int, k: int) -> list[Row]:
    """A weight in FP8 with float32 scales of 128 x 128 blocks."""
    return [
        (f"{name}.weight", "F8_E4M3", (n, k)),
        (f"{name}.weight_scale_inv", "F32", (-(-n // 128), -(-k // 128))),
    ]


def mixtral_8x7b() -> tuple[dict[str, Any], list[Row]]:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    rows = bf16("model.embed_tokens", 32000, 4096) + bf16("lm_head", 32000, 4096) + bf16("model.norm", 4096)
    for layer in (f"model.layers.{index}" for index in range(32)):
        rows += bf16(f"{layer}.input_layernorm", 4096) + bf16(f"{layer}.post_attention_layernorm", 4096)
        rows += bf16(f"{layer}.self_attn.q_proj", 4096, 4096) + bf16(f"{layer}.self_attn.o_proj", 4096, 4096)
        rows += bf16(f"{layer}.self_attn.k_proj", 1024, 4096) + bf16(f"{layer}.self_attn.v_proj", 1024, 4096)
        rows += bf16(f"{layer}.block_sparse_moe.gate", 8, 4096)
        for expert in (f"{layer}.block_sparse_moe.experts.{index}" for index in range(8)):
            rows += bf16(f"{expert}.w1", 14336, 4096) + bf16(f"{expert}.w3", 14336, 4096)
            rows += bf16(f"{expert}.w2", 4096, 14336)
    return config, rows


def minimax_m2() -> tuple[dict[str, Any], list[Row]]:
    config = {
        "model_type": "minimax_m2",
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 200064,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    rows = bf16("model.embed_tokens", 200064, 3072) + bf16("lm_head", 200064, 3072) + bf16("model.norm", 3072)
    for layer in (f"model.layers.{index}" for index in range(62)):
        rows += bf16(f"{layer}.input_layernorm", 3072) + bf16(f"{layer}.post_attention_layernorm", 3072)
        rows += bf16(f"{layer}.self_attn.q_norm", 6144) + bf16(f"{layer}.self_attn.k_norm", 1024)
        rows += fp8_block(f"{layer}.self_attn.q_proj", 6144, 3072) + fp8_block(f"{layer}.self_attn.o_proj", 3072, 6144)
        rows += fp8_block(f"{layer}.self_attn.k_proj", 1024, 3072) + fp8_block(f"{layer}.self_attn.v_proj", 1024, 3072)
        rows += [(f"{layer}.block_sparse_moe.gate.weight", "F32", (256, 3072))]
        rows += [(f"{layer}.block_sparse_moe.e_score_correction_bias", "F32", (256,))]
        for expert in (f"{layer}.block_sparse_moe.experts.{index}" for index in range(256)):
            rows += fp8_block(f"{expert}.w1", 1536, 3072) + fp8_block(f"{expert}.w3", 1536, 3072)
            rows += fp8_block(f"{expert}.w2", 3072, 1536)
    return config, rows
