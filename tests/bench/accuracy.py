"""Accuracy of our recipes and of llmcompressor on one harness: perplexity and KL by kind of text.

    python tests/bench/accuracy.py [--small] [--model smollm2-135m ...] [--recipe w8a8 ...] [--reuse]

Text: tests/models/texts, never used for calibration; windows of 512; float32. Each candidate is a folder on disk. The
checkpoint form is loaded in the same way for all, by transformers with compressed-tensors, and a second time by our
runtime (whose INT8 products are exact, and which divides by 127 where compressed-tensors divides by 127.5). Mixtures
of experts and shards load in the runtime alone; the peer is measured on the dense model.
The peer calibrates on 128 samples of 512 tokens from calibration_data, ours as the recipes say; times are whole
commands, ours (calibrate and convert) and the peer's, whose call alone stands beside. `--small` uses four layers and
few windows: it tries the harness and measures nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import peers
import scoring
import torch
from convert_speed import fresh, last_line

from quantkit.archs.modeling import load_tokenizer
from quantkit.recipe import Calibration, shipped_recipes
from quantkit_instruments.perplexity import windows

MODELS = common.ROOT / "tests" / "models"
KINDS = ("code", "math", "english", "chinese")
DENSE = "smollm2-135m"
PEER_METHODS = ("rtn", "smoothquant-gptq")
PEER_SAMPLES, PEER_LENGTH = 128, 512
BEST = "w8a8-best"

UNCALIBRATED = frozenset({"w8a8"})
"""Recipes whose result does not depend on text: converted without calibration."""

SHARDED = frozenset({"w8a8-group128", "w8a8-best-shards"})
"""Recipes with activations per group, which no engine loads from a checkpoint."""

MODEL_RECIPES = frozenset(
    {"deepseek-v3", "glm-4.5", "glm-5", "gpt-oss", "kimi-k2", "minimax-m2", "minimax-m3", "qwen3-moe", "qwen3.5-moe"}
)

NOT_MEASURED = MODEL_RECIPES | {"bf16", "w8a8-kv8", "w8a8-experts"}
"""The source itself; INT8 keys, which a forward without a cache does not meet; parts of `w8a8` for large mixtures."""

CHANGE_TARGETS: Mapping[tuple[bool, str], Mapping[str, float]] = {
    (True, "w8a8"): {"": 2.5, "chinese": 4.5},
    (True, "w8a8-smooth"): {"": 1.0},
    (True, BEST): {"": 0.5},
    (True, "w8a8-best-shards"): {"": 0.3},
    (False, BEST): {"": 0.15},
}
"""(dense, recipe) -> bound on the change of perplexity in percent, by kind or for all others."""


@dataclass(frozen=True)
class Made:
    """A candidate's folder, what it took and what text it saw.

    Attributes:
        seconds: whole commands, from the start of the process to its end.
        call_seconds: a peer's call alone: its imports, loading the model and saving it are not in it; None for ours.
        kept_share: of the weights of GEMMs, what the recipe's budget left in the source's dtype.
    """

    name: str
    folder: Path
    loaders: tuple[str, ...]
    seconds: float
    tokens: int
    kept_share: float = 0.0
    call_seconds: float | None = None


# ----------------------------------------------------------------------------------------------- candidates


def ours(recipe: str, source: Path, work: Path, dense: bool, options: list[str]) -> Made:
    """Calibrate and convert by the command line."""
    calibration, out = fresh(work / f"{recipe}.calibration"), fresh(work / recipe)
    convert = [*common.QUANTKIT, "convert", source, "-o", out, "--recipe", recipe, "--json"]
    seconds, tokens = 0.0, 0
    if recipe not in UNCALIBRATED:
        words = ["calibrate", source, "-o", calibration, "--recipe", recipe, "--json", *options]
        found = common.run([*common.QUANTKIT, *words])
        seconds, tokens = found.seconds, json.loads(found.stdout)["tokens"]
        convert += ["--calibration", calibration]
    if recipe in SHARDED:
        convert += ["--format", "sharded"]
    seconds += common.run(convert).seconds
    kept = kept_share(calibration, "sharded" if recipe in SHARDED else "checkpoint")
    both = dense and recipe not in SHARDED
    loaders = ("compressed-tensors", "quantkit-runtime") if both else ("quantkit-runtime",)
    return Made(recipe, out, loaders, seconds, tokens, kept)


def kept_share(calibration: Path, form: str) -> float:
    """Of a calibration; 0 where nothing was decided."""
    artifact = calibration / "calibration.json"
    decisions = json.loads(artifact.read_text("utf-8")).get("decisions") if artifact.is_file() else None
    share: float = decisions["forms"][form]["kept_share"] if decisions else 0.0
    return share


def peer(method: str, source: Path, work: Path, samples: Path, device: str) -> Made:
    name = f"llmcompressor {method}"
    out = fresh(work / name.replace(" ", "-"))
    script = common.BENCH / "peer_llmcompressor.py"
    words = ["oneshot", source, out, "--method", method, "--device", device]
    words += [] if method == "rtn" else ["--samples", samples]
    run = common.run([peers.python_of("llmcompressor"), script, *words])
    result = last_line(run)
    loaders = ("compressed-tensors", "quantkit-runtime")
    return Made(name, out, loaders, run.seconds, result["calibration_tokens"], call_seconds=result["seconds"])


def made_before(work: Path, row: Mapping[str, Any] | None) -> Made | None:
    """What an earlier run made and noted; None where it is gone, or a peer was noted by the time of its call alone."""
    if row is None or not (work / row["folder"] / "config.json").is_file():
        return None
    if is_peer(row["name"]) and row.get("call_seconds") is None:
        return None
    return Made(**{**row, "folder": work / row["folder"], "loaders": tuple(row["loaders"])})


def is_peer(name: str) -> bool:
    return name.startswith("llmcompressor")


def time_and_text(made: Sequence[Made]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table."""
    headings = ["", "seconds", "of them the call", "calibration tokens", "weights kept"]
    calls = {row.name: "" if row.call_seconds is None else f"{row.call_seconds:.1f}" for row in made}
    rows = [[m.name, f"{m.seconds:.1f}", calls[m.name], f"{m.tokens:,}", f"{m.kept_share:.1%}"] for m in made]
    return headings, rows


def noted(row: Made) -> dict[str, Any]:
    """Time and text of a candidate, for the results."""
    return {
        "seconds": row.seconds,
        "call_seconds": row.call_seconds,
        "calibration_tokens": row.tokens,
        "kept_share": row.kept_share,
    }


def time_targets(report: common.Report, best: Made, rival: Made) -> None:
    """Whole command against whole command."""
    report.target(f"{best.name}: time of commands against SmoothQuant + GPTQ", best.seconds / rival.seconds, 0.5)
    report.target(f"{best.name}: tokens against SmoothQuant + GPTQ", best.tokens / rival.tokens, 4, at_most=False)


def only(row: Made, loaders: list[str]) -> Made:
    """The candidate with the wanted loaders alone, unless it has no other."""
    return replace(row, loaders=tuple(name for name in row.loaders if name in loaders) or row.loaders)


def write_samples(source: Path, path: Path, count: int, length: int) -> None:
    """Token ids for the peer, drawn as `quantkit calibrate` draws them."""
    from quantkit.calibrate.data import draw_samples

    drawn = draw_samples(load_tokenizer(source), Calibration(samples=count, seq_len=length))
    path.write_text("".join(json.dumps({"input_ids": sample.ids.tolist()}) + "\n" for sample in drawn.samples))


def make(model: str, source: Path, work: Path, args: Any) -> list[Made]:
    """All candidates of a model; with --reuse those that an earlier run made."""
    work.mkdir(parents=True, exist_ok=True)
    dense, notes = model == DENSE, work / "made.json"
    known = json.loads(notes.read_text()) if args.reuse and notes.is_file() else {}
    samples = work / "peer_samples.jsonl"
    if dense and args.peers:
        write_samples(source, samples, *((8, 64) if args.small else (PEER_SAMPLES, PEER_LENGTH)))
    options = ["--device", args.device, *(["--samples", "24", "--seq-len", "64"] if args.small else [])]
    jobs = {recipe: lambda recipe=recipe: ours(recipe, source, work, dense, options) for recipe in args.recipe}
    if dense and args.peers:
        jobs |= {f"llmcompressor {m}": lambda m=m: peer(m, source, work, samples, args.device) for m in PEER_METHODS}
    made = []
    for name, job in jobs.items():
        found = made_before(work, known.get(name))
        if found is None:
            print(f"{model}: {name} ...", flush=True)
            found = job()
        made.append(found)
        known[name] = {**vars(found), "folder": found.folder.name}
        notes.write_text(json.dumps(known, indent=1))
    return made


def truncated(source: Path, out: Path, layers: int) -> Path:
    """The first layers of a model, to try the harness."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, fresh(out))
    tensors = load_file(source / "model.safetensors")
    kept = {
        n: t for n, t in tensors.items() if ".layers." not in n or int(n.split(".layers.")[1].split(".")[0]) < layers
    }
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "layer_types"}, indent=1))
    return out


# -------------------------------------------------------------------------------------------------- scoring


def texts(kind: str) -> list[str]:
    return [json.loads(line)["text"] for line in (MODELS / "texts" / f"{kind}.jsonl").read_text("utf-8").splitlines()]


def measure(source: Path, made: list[Made], limit: int | None, device: str) -> dict[str, Any]:
    """Scores by candidate (and loader) and kind of text."""
    tokenizer = load_tokenizer(source)
    reference = scoring.load_source(source, device)
    loaded = {(row.name, loader): scoring.LOADERS[loader](row.folder, device) for row in made for loader in row.loaders}
    named = {f"{name} [{loader}]": model for (name, loader), model in loaded.items()}
    found: dict[str, Any] = {"source": {}, "candidates": {name: {} for name in named}, "raw": {}}
    for kind in KINDS:
        tokens = windows(tokenizer, texts(kind))[:limit]
        base, rows = scoring.score(reference, named, tokens.to(device))
        found["source"][kind] = {
            "perplexity": scoring.compare(base, base_row(base))["perplexity"],
            "windows": len(tokens),
        }
        found["raw"][kind] = rows
        for name, row in rows.items():
            found["candidates"][name][kind] = scoring.compare(base, row)
        print(
            f"  {kind}: {len(tokens)} windows, source perplexity {found['source'][kind]['perplexity']:.3f}", flush=True
        )
    return found


def base_row(base: scoring.Windows) -> scoring.Windows:
    return scoring.Windows(base.nll, [0.0] * len(base.nll), [1.0] * len(base.nll))


def targets(report: common.Report, model: str, made: list[Made], found: Mapping[str, Any]) -> None:
    dense = model == DENSE
    for row in made:
        name = f"{row.name} [{row.loaders[0]}]"
        bounds = CHANGE_TARGETS.get((dense, row.name), {})
        for kind in KINDS if bounds else ():
            value = found["candidates"][name][kind]["change_percent"]
            report.target(f"{model} {row.name}, {kind}: change of perplexity in %", value, bounds.get(kind, bounds[""]))
        for kind in KINDS if row.name == BEST and not dense else ():
            layers = found["candidates"][name][kind]["routing_agreement_by_layer"].values()
            report.target(f"{model} {row.name}, {kind}: least routing agreement", min(layers), 0.995, at_most=False)
    by_name = {row.name: row for row in made}
    best, rivals = by_name.get(BEST), [row for row in made if is_peer(row.name)]
    if best is None or not rivals:
        return
    against_peers(report, best, rivals, found)
    time_targets(report, best, by_name["llmcompressor smoothquant-gptq"])


def against_peers(report: common.Report, best: Made, rivals: list[Made], found: Mapping[str, Any]) -> None:
    """KL below every peer's on every kind, by paired differences."""
    report.data["kl_differences"] = {}
    for rival in rivals:
        for kind in KINDS:
            rows = found["raw"][kind]
            mine, theirs = (rows[f"{row.name} [{row.loaders[0]}]"] for row in (best, rival))
            value, error = scoring.kl_difference(mine, theirs)
            report.data["kl_differences"][f"{rival.name}, {kind}"] = {"difference": value, "error": error}
            report.target(f"{best.name} - {rival.name}, {kind}: KL (error {error:.2g})", value, 0)


def run_model(model: str, args: Any) -> None:
    source = MODELS / model
    if not (source / "config.json").is_file():
        raise SystemExit(f"error: {source} is missing\nnext: make smollm2")
    work = args.work / "accuracy" / model
    if args.small and model == DENSE:
        source = truncated(source, args.work / "accuracy" / f"{model}-4-layers", 4)
    limit = args.windows or (2 if args.small else None)
    report = common.Report(
        f"accuracy-{model}",
        args.small,
        {"window": 512, "windows_limit": limit, "dtype": "float32", "device": args.device},
    )
    report.data["peer_versions"] = peers.versions("llmcompressor") if model == DENSE and args.peers else {}
    made = [only(row, args.loader) for row in make(model, source, work, args)]
    found = measure(source, made, limit, args.device)
    scoring.show(found["candidates"])
    print("\ntime and text")
    common.table(*time_and_text(made))
    report.data |= {"source": found["source"], "candidates": found["candidates"]}
    report.data["made"] = {row.name: noted(row) for row in made}
    targets(report, model, made, found)
    report.write()


def main() -> None:
    parser = common.arguments(__doc__)
    every = [name for name in shipped_recipes() if name not in NOT_MEASURED]
    parser.add_argument("--model", nargs="+", default=[DENSE, "tiny-minimax-m2", "tiny-deepseek-v3"])
    parser.add_argument("--recipe", nargs="+", default=every, help="shipped recipes; all of them by default")
    loaders = sorted(scoring.LOADERS)
    parser.add_argument("--loader", nargs="+", choices=loaders, default=loaders, help="fewer of them take less time")
    parser.add_argument("--without-peers", dest="peers", action="store_false")
    parser.add_argument("--reuse", action="store_true", help="take the folders that an earlier run made")
    parser.add_argument("--windows", type=int, help="most windows of a kind of text (all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of calibration, peers and scoring")
    args = parser.parse_args()
    if args.peers and DENSE in args.model and not peers.versions("llmcompressor"):
        raise SystemExit("error: there is no environment of llmcompressor\nnext: make peers, or give --without-peers")
    torch.set_num_threads(args.threads)
    for model in args.model:
        run_model(model, args)


if __name__ == "__main__":
    main()
