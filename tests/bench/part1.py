"""Figures of the main job: perplexity in transformers and in our runtime, and interruptions.

    python tests/bench/part1.py perplexity --model tests/models/smollm2-135m --recipe w8a8 --recipe w8a8-rotate
    python tests/bench/part1.py kill --times 10

`perplexity` converts without calibration, loads the checkpoint in transformers with compressed-tensors as it is (dense
models) or in our runtime, and measures float32, windows of 512, on the held-out texts, against the bounds that the
project set itself. `kill` sends SIGKILL at random moments of calibrate and convert and compares bytes with an
undisturbed run. About 10 minutes each on 2 free cores.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import torch
from torch import Tensor

from quantkit.archs.modeling import load_tokenizer
from quantkit.convert.run import convert
from quantkit.recipe import load_recipe
from quantkit_instruments.perplexity import change, from_losses, window_losses, windows
from tests.acceptance.conftest import PYTHON, SMALL, cli, snapshot, succeeded
from tests.acceptance.kill import run_killed

MODELS = ROOT / "tests" / "models"
BOUNDS = {"code": 2.5, "math": 2.5, "english": 2.5, "chinese": 4.5}
"""Percent above BF16 that a dense model of this size may lose without calibration."""


def held_out(model: Path, most: int) -> dict[str, Tensor]:
    tokenizer = load_tokenizer(model)
    texts = {
        kind: [json.loads(line)["text"] for line in (MODELS / "texts" / f"{kind}.jsonl").open(encoding="utf-8")]
        for kind in BOUNDS
    }
    return {kind: windows(tokenizer, lines)[:most] for kind, lines in texts.items()}


def in_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def in_our_runtime(folder: Path) -> Any:
    from quantkit_runtime import device as devices
    from quantkit_runtime.graft import load_model

    return load_model(folder, devices.resolve("cpu"), torch.float32).model


LOADERS = {"transformers": in_transformers, "runtime": in_our_runtime}


def measure_perplexity(arguments: argparse.Namespace) -> None:
    texts = held_out(arguments.model, arguments.windows)
    source = in_transformers(arguments.model)
    before = {kind: window_losses(source, tokens) for kind, tokens in texts.items()}
    del source
    values = [f"{kind} {from_losses(losses, 512).value:.3f} ({len(losses)} windows)" for kind, losses in before.items()]
    print(f"{arguments.model.name}, source: {', '.join(values)}", flush=True)
    for recipe in arguments.recipe:
        with tempfile.TemporaryDirectory() as scratch:
            convert(arguments.model, Path(scratch) / "out", load_recipe(recipe))
            for loader in arguments.loader:
                model = LOADERS[loader](Path(scratch) / "out")
                parts = []
                for kind, tokens in texts.items():
                    percent, error = change(before[kind], window_losses(model, tokens))
                    verdict = "within" if percent <= BOUNDS[kind] else "ABOVE"
                    parts.append(f"{kind} {percent:+.2f} % (error {error:.2f}, {verdict} {BOUNDS[kind]})")
                print(f"{recipe}, {loader}: {'; '.join(parts)}", flush=True)


def kill(arguments: argparse.Namespace) -> None:
    model = MODELS / "tiny-minimax-m2"
    rng = random.Random(arguments.seed)
    spans = {"calibrate": 8.0, "convert": 0.8}
    with tempfile.TemporaryDirectory() as scratch:
        for command, span in spans.items():
            options = [*SMALL] if command == "calibrate" else ["--max-shard-size", "1MB", "--jobs", "2"]
            undisturbed, disturbed = (Path(scratch) / f"{command}-{name}" for name in ("once", "killed"))
            succeeded(cli(command, model, "-o", undisturbed, *options))
            same = killed = 0
            for _ in range(arguments.times):
                shutil.rmtree(disturbed, ignore_errors=True)
                argv = [PYTHON, "-m", "quantkit", command, str(model), "-o", str(disturbed), *options]
                killed += run_killed(argv, disturbed, rng.uniform(0, span))
                succeeded(cli(command, model, "-o", disturbed, *options))
                same += snapshot(disturbed) == snapshot(undisturbed)
            print(f"{command}: {arguments.times} runs, {killed} killed, {same} byte-identical afterwards", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(required=True)
    perplexity = commands.add_parser("perplexity")
    perplexity.add_argument("--model", type=Path, default=MODELS / "smollm2-135m")
    perplexity.add_argument("--recipe", action="append")
    perplexity.add_argument("--loader", action="append", choices=LOADERS)
    perplexity.add_argument("--windows", type=int, default=1000, help="most windows of each kind")
    perplexity.set_defaults(run=measure_perplexity)
    killing = commands.add_parser("kill")
    killing.add_argument("--times", type=int, default=10)
    killing.add_argument("--seed", type=int, default=0)
    killing.set_defaults(run=kill)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.run is measure_perplexity:
        arguments.recipe = arguments.recipe or ["w8a8"]
        arguments.loader = arguments.loader or ["transformers"]
    arguments.run(arguments)


if __name__ == "__main__":
    main()
