"""Hold vLLM's figures for an INT8 checkpoint against its own BF16 figures, and write both down.

Required, else exit code 1:
- on every kind of text the INT8 perplexity lies within 0.5 % of vLLM's BF16 perplexity;
- the log of the INT8 run names an INT8 kernel for the dense layers and an INT8 backend for the experts.
What the experts computed with is reported, not required. Where vLLM looks up a tuned configuration named
`int8_w8a16`, it runs them with INT8 weights and floating-point activations, whatever the checkpoint asks for.

usage: compare.py BF16.json INT8.json INT8.log INT8_CHECKPOINT RESULT.json [KEY=VALUE ...]
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

LIMIT = 0.005
"""Largest relative difference between the two perplexities of a kind of text."""

REQUIRED = {
    "dense": re.compile(r"Selected \S*Int8\S* for CompressedTensorsW8A8Int8"),
    "experts": re.compile(r"Using \S+ Int8 MoE backend"),
}
TUNED = re.compile(r"E=\d+,N=\d+,device_name=\S+,dtype=(\w+)\.json")


def log_facts(log: str) -> dict[str, str | None]:
    """The line of each required kernel and the file name of the experts' tuned configuration; None where absent."""
    found = {name: pattern.search(log) for name, pattern in {**REQUIRED, "experts_config": TUNED}.items()}
    return {name: match[0] if match else None for name, match in found.items()}


def expert_activations(config: str | None) -> str:
    """What vLLM fed to the expert GEMMs, read off the name of the configuration it looked up."""
    if config is None:
        return "unknown: the log names no configuration"
    kind = config.split("dtype=")[1].removesuffix(".json")
    return "bfloat16 (weight-only)" if kind.endswith("w8a16") else kind


def compare(bf16: dict[str, Any], int8: dict[str, Any], log: str) -> dict[str, Any]:
    """The record: versions, perplexities by kind, their ratio, log lines, and what failed."""
    ratio = {kind: int8["perplexity"][kind] / value for kind, value in bf16["perplexity"].items()}
    facts = log_facts(log)
    failed = [f"{kind}: ratio {value:.5f}" for kind, value in ratio.items() if not abs(value - 1) <= LIMIT]
    failed += [f"{name}: no such line in the log" for name in REQUIRED if facts[name] is None]
    return {
        **{key: int8[key] for key in ("vllm", "torch", "card", "quantization")},
        "perplexity_bf16": bf16["perplexity"],
        "perplexity_int8": int8["perplexity"],
        "ratio": ratio,
        "limit": LIMIT,
        "log": facts,
        "expert_activations": expert_activations(facts["experts_config"]),
        "failed": failed,
    }


def main() -> None:
    """Read, compare, write; the exit code says whether all that is required holds."""
    bf16, int8, log, checkpoint, output, *notes = sys.argv[1:]
    record = compare(json.loads(Path(bf16).read_text()), json.loads(Path(int8).read_text()), Path(log).read_text())
    weights = sorted(Path(checkpoint).glob("*.safetensors"))
    record["sha256"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights}
    record |= dict(note.split("=", 1) for note in notes)
    Path(output).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    sys.exit(1 if record["failed"] else 0)


if __name__ == "__main__":
    main()
