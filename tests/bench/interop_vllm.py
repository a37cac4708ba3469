"""Load our dense INT8 checkpoint in vLLM's CPU build, generate, and hold text and log against what must be.

    .peers/vllm/bin/python tests/bench/interop_vllm.py INT8_CHECKPOINT [--source BF16_CHECKPOINT]

Runs in its own environment (`make interop` builds it) and imports nothing of quantkit. Two facts are required:
- the log says that a kernel for INT8 (W8A8) was selected for the compressed-tensors scheme;
- the texts are words: not empty, no replacement characters, not one token again and again.
With `--source` the same prompts also go through the BF16 model, and the share of equal leading tokens is printed. It
is not required to be high: the INT8 kernel of CPUs without VNNI saturates.
Exit code 1 when a fact does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def add(a, b):\n    return",
    "Once upon a time, there was a little girl who",
)
INT8_LINE = re.compile(r"Int8|int8|w8a8|W8A8")
SELECTED = re.compile(r"(Selected|Using) \S*(Int8|int8)\S*.*")


def generate(folder: str, tokens: int) -> list[dict[str, Any]]:
    """Greedy continuations; this is the child process whose log is read."""
    from vllm import LLM, SamplingParams

    # its INT8 kernel takes bfloat16 or half only
    model = LLM(folder, dtype="bfloat16", max_model_len=256, enforce_eager=True, max_num_seqs=4, seed=0)
    found = model.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=tokens))
    return [{"text": row.outputs[0].text, "tokens": list(row.outputs[0].token_ids)} for row in found]


def run(folder: Path, tokens: int, threads: int) -> tuple[list[dict[str, Any]], str]:
    """Generate in a process of its own -> texts and its whole log."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "NO_COLOR": "1",
    }
    command = [sys.executable, __file__, str(folder), "--child", "--tokens", str(tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"error: vLLM could not load or run {folder}:\n{log[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('[{"text"')]
    return json.loads(lines[-1]), log


def is_text(row: dict[str, Any]) -> bool:
    tokens = row["tokens"]
    return bool(row["text"].strip()) and "\ufffd" not in row["text"] and len(set(tokens)) > max(2, len(tokens) // 6)


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Share of tokens before the first difference."""
    equal = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += max(len(a["tokens"]), len(b["tokens"]))
        for x, y in zip(a["tokens"], b["tokens"], strict=False):
            if x != y:
                break
            equal += 1
    return equal / total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("\n" + json.dumps(generate(str(args.checkpoint), args.tokens), ensure_ascii=False))
        return 0
    rows, log = run(args.checkpoint, args.tokens, args.threads)
    selected = next((match[0].strip() for line in log.splitlines() if (match := SELECTED.search(line))), "")
    for prompt, row in zip(PROMPTS, rows, strict=True):
        print(f"{prompt!r} -> {row['text']!r}")
    texts = all(is_text(row) for row in rows)
    print(f"{'ok    ' if selected else 'FAILED'}  kernel: {selected or 'no line of the log names an INT8 kernel'}")
    print(f"{'ok    ' if texts else 'FAILED'}  every continuation is text")
    if args.source:
        plain, _ = run(args.source, args.tokens, args.threads)
        print(f"note    {agreement(rows, plain):.0%} of the tokens come before the first difference to the BF16 model")
    if not selected:
        print("\n".join(line for line in log.splitlines() if INT8_LINE.search(line))[:4000], file=sys.stderr)
    return 0 if selected and texts else 1


if __name__ == "__main__":
    sys.exit(main())
