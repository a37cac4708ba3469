"""The engine on a card from end to end: a Llama of 24 layers on disk, converted, loaded, beside its BF16 source.

    python tests/bench/gpu_engine.py [--prefill] [--small] [--work DIR]

What runs are the commands that a user has: `quantkit convert`, `quantkit-runtime bench` with the source as baseline
and with the fusions one by one, and with two cards or more the same of shards for `--tp 2` and `commcheck`. The memory
that `bench` plans is held against the peak that the card counted. `--prefill` measures prefill alone: chunks of 512
against one forward, two cards against one, and the result goes to `gpu_prefill_engine`. `--small` tries the script on a
tiny model, on the CPU too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from convert_speed import fresh
from synthetic import write_json

INSTRUMENTS = ("-m", "quantkit_instruments.cli")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 24,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 1024}


def rows(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a layer's tensors on disk."""
    h, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
    shapes |= {"self_attn.o_proj": (h, q), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h)}
    shapes |= {"mlp.down_proj": (h, inner), "input_layernorm": (h,), "post_attention_layernorm": (h,)}
    yield from ((f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items())


def write_model(root: Path, config: dict[str, Any], device: str) -> Path:
    """A checkpoint with normal weights, drawn on the card since that takes seconds; a file for each layer."""
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        drawn = torch.empty(shape, device=device).normal_(0, shape[1] ** -0.5, generator=generator)
        return drawn.to(torch.bfloat16).cpu()

    fresh(root).mkdir(parents=True)
    table = (config["vocab_size"], config["hidden_size"])
    outside = [("model.embed_tokens.weight", table), ("lm_head.weight", table), ("model.norm.weight", table[1:])]
    parts = [list(rows(config, layer)) for layer in range(config["num_hidden_layers"])] + [outside]
    index = {}
    for number, part in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor(shape) for name, shape in part}, root / file, metadata={"format": "pt"})
        index |= {name: file for name, _ in part}
    write_json(root / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_json(root / "config.json", config)
    return root


def report_of(words: Sequence[Any]) -> Any:
    """The JSON that a command prints."""
    return json.loads(common.run([sys.executable, *words]).stdout)


def by_shape(rows: Sequence[dict[str, Any]], value: str) -> dict[tuple[int, int], float]:
    return {(row["length"], row.get("batch", 1)): row[value] for row in rows}


def compare(title: str, ours: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Times of `other` over ours, by phase and shape."""
    found: dict[str, dict[str, float]] = {}
    print(f"\n{title}")
    for phase, value in (("prefill", "ttft"), ("decode", "p50")):
        mine, theirs = by_shape(ours[phase], value), by_shape(other[phase], value)
        shapes = [shape for shape in mine if shape in theirs]
        found[phase] = {f"{length} x {batch}": theirs[length, batch] / mine[length, batch] for length, batch in shapes}
        cells = [
            [
                f"{phase} {length:,} x {batch}",
                f"{mine[length, batch] * 1e3:.3f}",
                f"{theirs[length, batch] * 1e3:.3f}",
                f"{theirs[length, batch] / mine[length, batch]:.2f}",
            ]
            for length, batch in shapes
        ]
        common.table(["tokens x sequences", "ms", "other, ms", "times as fast"], cells)
    return found


def memory_error(found: dict[str, Any]) -> float:
    """How far the planned peak is from the measured one, as a share of it."""
    planned, measured = found["memory"]["peak"], found["memory_peak"]
    print(f"memory: planned {planned / 2**30:.3f} GiB, measured peak {(measured or 0) / 2**30:.3f} GiB")
    return abs(planned - measured) / measured if measured else float("nan")


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prefill", action="store_true", help="only prefill: chunks against one forward, tp 2")
    args = parser.parse_args()
    config = CONFIG | (SMALL if args.small else {})
    work = args.work / "gpu_engine"
    source, int8 = work / "source", work / "int8"
    cards = torch.cuda.device_count() if args.device == "cuda" else 0
    report = common.Report(
        "gpu_prefill_engine" if args.prefill else "gpu_engine", args.small, {"config": config, "cards": cards}
    )
    write_model(source, config, args.device)
    common.run([*common.QUANTKIT, "convert", source, "-o", fresh(int8), "--recipe", "w8a8"])
    if cards > 1 or args.small:
        shard(work)
    if args.prefill:
        prefill(report, work, args)
        report.write()
        return
    lengths, batches = ("32", "1,2") if args.small else ("128,512,2048,8192", "1,2,4,8,16,32,64")
    shapes = ["--device", args.device, "--lengths", lengths, "--batches", batches, "--steps", "32", "--json"]
    shapes += ["--sweep-length", "32"] if args.small else []
    single = report_of([*INSTRUMENTS, "bench", int8, "--baseline", "bf16", source, *shapes])
    report.data["single"] = single
    ours, bf16 = single["candidate"], single["baseline"]
    report.data["times_bf16"] = ratios = compare("INT8 against the source in BF16", ours, bf16)
    errors = [memory_error(found) for found in (ours, bf16)]
    if cards:
        report.target("planned against measured peak of memory, worst", max(errors), 0.05)
        report.target("decode, one sequence: times as fast as BF16", ratios["decode"]["128 x 1"], 1.9, at_most=False)
        report.target("decode, 8 sequences: times as fast as BF16", ratios["decode"]["512 x 8"], 1.6, at_most=False)
    if cards > 1 or args.small:
        two_ranks(report, work, ours, shapes, args.device)
    prefill(report, work, args)
    report.write()  # here too: what follows is long
    length = "32" if args.small else "512"
    few = ["--lengths", length, "--sweep-length", length, "--batches", "1", "--steps", "32", "--json"]
    fusions = report_of([*INSTRUMENTS, "bench", int8, "--ablate", "--device", args.device, *few])["ablation"]
    report.data["ablation"] = fusions
    common.table(
        ["fusions", "first token, ms", "p50, ms a token"],
        [[row["added"], f"{row['ttft'] * 1e3:.2f}", f"{row['p50'] * 1e3:.3f}"] for row in fusions],
    )
    report.write()


def shard(work: Path) -> None:
    """The INT8 model for `--tp 2`."""
    shards = fresh(work / "tp2")
    common.run([*common.QUANTKIT, "convert", work / "int8", "-o", shards, "--format", "sharded", "--tp", "2"])


def prefill(report: common.Report, work: Path, args: Any) -> None:
    """One card and two, in chunks of 512 and whole: what the chunks cost, and what a second card gives."""
    longest = "32" if args.small else "8192"
    lengths = longest if args.small else f"512,2048,{longest}"
    common_options = ["--lengths", lengths, "--batches", "1", "--sweep-length", lengths.split(",")[0], "--steps", "8"]
    common_options += ["--repeats", "3", "--device", args.device, "--json"]
    found: dict[str, dict[str, Any]] = {}
    meshes = {"one card": [work / "int8"], "two cards": [work / "tp2"]}
    two = report.data["settings"]["cards"] > 1 or args.small
    for mesh, folder in meshes.items():
        for chunk in ("8" if args.small else "512", longest):
            if mesh == "one card" or two:
                words = [*INSTRUMENTS, "bench", *folder, "--chunk", chunk, *common_options]
                run = report_of(words if mesh == "one card" else [*TORCHRUN, *words])["candidate"]
                found[f"{mesh}, chunks of {chunk}"] = run
    report.data["prefill"] = found
    cells = []
    for name, run in found.items():
        facts, ttft = run["prefill_runs"], by_shape(run["prefill"], "ttft")
        graphs = f"graphs of {', '.join(map(str, facts['graphs']))}" if facts["graphs"] else facts["eager_because"]
        times = [f"{seconds * 1e3:.2f}" for seconds in ttft.values()]
        cells.append([name, *times, f"{graphs} ({facts['replays']} replays)", facts["attention"]])
        if args.device == "cuda":
            memory_error(run)
    common.table(["first token, ms", *(f"{length} tokens" for length in lengths.split(",")), "ran", "attention"], cells)
    if args.device != "cuda":
        return
    time_of = {name: by_shape(run["prefill"], "ttft")[int(longest), 1] for name, run in found.items()}
    chunked, whole = (time_of[f"one card, chunks of {chunk}"] for chunk in ("512", longest))
    report.target("8,192 tokens in chunks of 512 over one forward: time", chunked / whole, 1.5)
    if two:
        ratio = chunked / time_of["two cards, chunks of 512"]
        report.target("8,192 tokens in chunks of 512: two cards times one", ratio, 1.0, at_most=False)


def two_ranks(report: common.Report, work: Path, single: dict[str, Any], shapes: list[str], device: str) -> None:
    """Shards for `--tp 2` beside the same weights on one card."""
    shards = work / "tp2"
    found = report_of([*TORCHRUN, *INSTRUMENTS, "bench", shards, *shapes])["candidate"]
    report.data["tp2"] = found
    report.data["tp2_times_single"] = ratios = compare("two cards against one", found, single)
    memory_error(found)
    report.data["commcheck"] = report_of([*TORCHRUN, *INSTRUMENTS, "commcheck", shards, "--device", device, "--json"])
    if device == "cuda":
        report.target("TP2 decode, 128 x 1: times one card", ratios["decode"]["128 x 1"], 1.0, at_most=False)
        report.target("TP2 prefill, 8,192 tokens: times one card", ratios["prefill"]["8192 x 1"], 1.0, at_most=False)


if __name__ == "__main__":
    main()
