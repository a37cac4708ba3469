#!/usr/bin/env python3
"""The whole main job on a small real model, every step the command that a user would type.

    python runtime/demo.py --output demo_output

Inspect, calibrate, convert to both forms, verify, load and generate; then perplexity before and after by kind of
text. A second run in the same folder does again only what is cheap: finished outputs are recognised and kept.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import click

from quantkit.console import console, expected_failures
from quantkit.errors import UsageError

MODEL = ROOT / "tests" / "models" / "tiny-minimax-m2"
TEXTS = ROOT / "tests" / "models" / "texts"
KINDS = ("code", "math", "english", "chinese")
LENGTH = 512
BATCH = 4
PROMPT = "The sea"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("demo_output"), show_default=True)
@click.option("--model", type=click.Path(path_type=Path), default=MODEL, help="Any small checkpoint with a tokenizer.")
@click.option("--samples", type=click.IntRange(1), default=64, show_default=True, help="Of calibration text.")
@click.option("--windows", type=click.IntRange(1), default=1000, help="Most windows of each kind; default: all.")
def command(output: Path, model: Path, samples: int, windows: int) -> None:
    """Run the main job on a small model and show what it cost and what it kept."""
    start = time.monotonic()
    model, output = _short(model), _short(output)
    calibration, checkpoint, shards = (output / name for name in ("calibration", "checkpoint", "shards"))
    quantkit = Tool("quantkit", [sys.executable, "-m", "quantkit"])
    smoke = Tool("python runtime/smoke_load.py", [sys.executable, str(HERE / "smoke_load.py")])
    convert = ["convert", str(model), "--calibration", str(calibration)]

    quantkit.run("What is it?", "inspect", str(model))
    quantkit.run(
        "Calibrate on the shipped mixed text",
        *("calibrate", str(model), "-o", str(calibration), "--samples", str(samples)),
    )
    quantkit.run(
        "Convert: a checkpoint for engines",
        *(*convert, "-o", str(checkpoint)),
    )
    quantkit.run(
        "Convert: shards for one rank",
        *(*convert, "-o", str(shards), "--format", "sharded"),
    )
    quantkit.run("Verify both against the source", "verify", str(checkpoint), "--source", str(model))
    quantkit.run("", "verify", str(shards), "--source", str(model))
    prompt = ["--prompt", PROMPT, "--max-new-tokens", "40", "--json"]
    reports = [
        json.loads(smoke.run(title, str(folder), *prompt, capture=True))
        for title, folder in (("Load, run and generate", checkpoint), ("", shards))
    ]
    _show(model, output, reports, _perplexities(model, checkpoint, windows), time.monotonic() - start)


@dataclass(frozen=True)
class Tool:
    """A command line: as it is shown, and as it is run by this interpreter."""

    shown: str
    argv: list[str]

    def run(self, title: str, *arguments: str, capture: bool = False) -> str:
        """Show a command, run it, and stop with its exit code when it fails; its stdout when `capture`."""
        out = console()
        if title:
            out.rule(title, align="left")
        out.print(f"$ {self.shown} {shlex.join(arguments)}", style="bold", markup=False)
        done = subprocess.run(
            [*self.argv, *arguments],
            stdout=subprocess.PIPE if capture else None,
            text=True,
            check=False,
            env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        if done.returncode:
            out.print(f"stopped: the command above failed with exit code {done.returncode}", markup=False)
            raise SystemExit(done.returncode)
        return done.stdout or ""


def _short(path: Path) -> Path:
    """Relative to the current folder where it lies below it, as a user would type it."""
    resolved = path.resolve()
    here = Path.cwd()
    return resolved.relative_to(here) if resolved.is_relative_to(here) and resolved != here else resolved


class Row(NamedTuple):
    """Perplexity of one kind of text before and after; the change and its standard error in percent."""

    kind: str
    before: float
    after: float
    change: float
    error: float


def _perplexities(model: Path, converted: Path, most: int) -> list[Row]:
    """Perplexity of the source in transformers and of the converted model in our runtime, on the same windows."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from quantkit.archs.modeling import load_tokenizer
    from quantkit.console import Progress
    from quantkit_instruments.perplexity import change, from_losses, window_losses, windows
    from quantkit_runtime import device as devices
    from quantkit_runtime.graft import load_model

    console().rule(f"Perplexity of held-out text, float32, windows of {LENGTH}", align="left")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = load_tokenizer(model)
    held_out = {kind: windows(tokenizer, _texts(kind), LENGTH)[:most] for kind in KINDS}
    models = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        load_model(converted, devices.resolve("cpu"), torch.float32).model,
    )
    rows = []
    with Progress("perplexity", 2 * sum(len(part) for part in held_out.values()), "windows") as progress:
        for kind, tokens in held_out.items():
            losses = [window_losses(part, tokens, BATCH, progress.advance) for part in models]
            values = (from_losses(loss, tokens.shape[1]).value for loss in losses)
            rows.append(Row(kind, *values, *change(*losses)))
    return rows


def _texts(kind: str) -> list[str]:
    path = TEXTS / f"{kind}.jsonl"
    if not path.is_file():
        raise UsageError(f"{path} is not there", "run the demo from a full checkout")
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _show(model: Path, output: Path, reports: list[dict[str, Any]], rows: list[Row], seconds: float) -> None:
    """The last table: size, perplexity, INT8 GEMMs, and where everything lies."""
    from rich.table import Table

    from quantkit.memory import human_bytes

    out = console()
    out.rule("Before and after", align="left")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("before", "after", "change", "standard error"):
        table.add_column(name, justify="right")
    before, after = _weight_bytes(model), _weight_bytes(output / "checkpoint")
    table.add_row("weights", human_bytes(before), human_bytes(after), f"{100 * (after / before - 1):+.1f} %", "")
    for row in rows:
        table.add_row(
            f"perplexity, {row.kind}",
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            f"{row.change:+.2f} %",
            f"{row.error:.2f} %",
        )
    out.print(table)
    for form, report in zip(("checkpoint", "shards"), reports, strict=True):
        int8 = report["int8"]
        out.print(f"INT8 GEMMs run / expected, {form}: {int8['run']} / {int8['expected']}", markup=False)
    same = reports[0]["generated"]["tokens"] == reports[1]["generated"]["tokens"]
    out.print(f"both forms generate the same tokens: {'yes' if same else 'NO'}")
    out.print(f"calibration report: {output / 'calibration' / 'report.html'}", markup=False)
    out.print(f"checkpoint for engines: {output / 'checkpoint'}", markup=False)
    out.print(f"shards for quantkit-runtime: {output / 'shards'}", markup=False)
    out.print(f"{seconds:.0f} seconds on {len(os.sched_getaffinity(0))} cores")
    if not same:
        raise SystemExit(4)


if __name__ == "__main__":
    with expected_failures():
        command.main(prog_name="demo.py")
