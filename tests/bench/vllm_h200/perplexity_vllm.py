"""Prompt perplexity of a checkpoint inside vLLM, by kind of text.

Each window is one prompt; vLLM returns the log-probability of every prompt token but the first, and the perplexity is
exp(-mean) over all of them. The checkpoint is loaded as it is: no flag names its quantization, so vLLM must find the
scheme in `quantization_config` by itself. Eager mode and no prefix cache: every window is computed, in full.

usage: perplexity_vllm.py CHECKPOINT IDS.json RESULT.json [ATTENTION_BACKEND]
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

# One process, so that the log of the kernels in use is this process's log; no usage report, nothing fetched.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm


def window_loss(tokens: list[int], logprobs: list) -> float:
    """Sum of the negative log-likelihoods of a window's tokens but the first, in nats."""
    return -sum(row[token].logprob for token, row in zip(tokens[1:], logprobs[1:], strict=True))


def perplexities(engine: vllm.LLM, windows_by_kind: dict[str, list[list[int]]]) -> dict[str, float]:
    """Perplexity by kind of text."""
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
    result = {}
    for kind, rows in windows_by_kind.items():
        prompts = [{"prompt_token_ids": row} for row in rows]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        loss = math.fsum(window_loss(row, out.prompt_logprobs) for row, out in zip(rows, outputs, strict=True))
        result[kind] = math.exp(loss / sum(len(row) - 1 for row in rows))
    return result


def main() -> None:
    """Load, measure, write the figures with the versions that gave them."""
    checkpoint, ids, output = sys.argv[1:4]
    engine = vllm.LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=1 << 30,
        dtype="bfloat16",
        attention_backend=sys.argv[4] if len(sys.argv) > 4 else "TRITON_ATTN",
        enable_prefix_caching=False,
    )
    figures = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "quantization": engine.llm_engine.model_config.quantization,
        "perplexity": perplexities(engine, json.loads(Path(ids).read_text(encoding="utf-8"))),
    }
    Path(output).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print("RESULT", json.dumps(figures))


if __name__ == "__main__":
    main()
