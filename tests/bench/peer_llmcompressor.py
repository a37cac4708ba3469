"""llmcompressor's side of the benchmarks; runs in its own environment (`make peers`), imports nothing of quantkit.

    .peers/llmcompressor/bin/python tests/bench/peer_llmcompressor.py convert SOURCE OUT --workers 2
    .peers/llmcompressor/bin/python tests/bench/peer_llmcompressor.py oneshot SOURCE OUT --method rtn
    .peers/llmcompressor/bin/python tests/bench/peer_llmcompressor.py oneshot SOURCE OUT --method smoothquant-gptq \
        --samples samples.jsonl

`convert` is `model_free_ptq` with the preset W8A8, file by file. `oneshot` builds the model and runs modifiers on it,
as its examples do: W8A8 on every Linear but lm_head, SmoothQuant of strength 0.8 with its own mappings, GPTQ with its
defaults. Samples are token ids, one `{"input_ids": [...]}` a line, drawn from the text that ours calibrate on.
The last line of stdout is a JSON object with the seconds of the call itself: imports, loading and saving not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

SMOOTHING_STRENGTH = 0.8


def convert(args: argparse.Namespace) -> dict[str, Any]:
    from llmcompressor import model_free_ptq

    ignore = ["lm_head", "re:.*embed_tokens$", r"re:.*mlp\.gate$"]  # head, embedding, router: as quantkit keeps them
    start = time.perf_counter()
    model_free_ptq(
        model_stub=args.source,
        save_directory=args.out,
        scheme="W8A8",
        ignore=ignore,
        max_workers=args.workers,
        device="cpu",
    )
    return {"seconds": time.perf_counter() - start}


def modifiers(method: str) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
    if method == "rtn":
        return [QuantizationModifier(**scheme)]
    return [SmoothQuantModifier(smoothing_strength=SMOOTHING_STRENGTH), GPTQModifier(**scheme)]


def oneshot(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot as run
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=getattr(torch, args.dtype)).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    options: dict[str, Any] = {}
    tokens = 0
    if args.samples:
        rows = [json.loads(line)["input_ids"] for line in Path(args.samples).read_text().splitlines()]
        tokens = sum(map(len, rows))
        data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
        longest = max(map(len, rows))
        options = {"dataset": data, "num_calibration_samples": len(rows), "max_seq_length": longest}
        options |= {"shuffle_calibration_samples": False}
    start = time.perf_counter()
    run(model=model, tokenizer=tokenizer, recipe=modifiers(args.method), **options)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.save_pretrained(args.out, save_compressed=True)
    tokenizer.save_pretrained(args.out)
    return {"seconds": seconds, "calibration_tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("convert", "oneshot"):
        command = commands.add_parser(name)
        command.add_argument("source")
        command.add_argument("out")
        command.add_argument("--threads", type=int, default=2)
    commands.choices["convert"].add_argument("--workers", type=int, default=1)
    commands.choices["oneshot"].add_argument("--method", choices=["rtn", "smoothquant-gptq"], required=True)
    commands.choices["oneshot"].add_argument("--samples", help="JSONL of token ids; without it nothing is calibrated")
    # bfloat16 would be the model's own, but is several times slower on CPUs without instructions for it
    commands.choices["oneshot"].add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    commands.choices["oneshot"].add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    result = {"convert": convert, "oneshot": oneshot}[args.command](args)
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
