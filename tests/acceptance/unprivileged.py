"""Program: the main job by a user who may write to one folder only. Arguments: source, text file, output folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from quantkit.cli import main as quantkit
from quantkit_instruments.cli import main as runtime


def run(program: click.Group, *arguments: object) -> None:
    try:
        program.main([str(argument) for argument in arguments], standalone_mode=False)
    except SystemExit as done:
        if done.code:
            raise


def main(source: Path, text: Path, out: Path) -> None:
    for folder in (source, Path.home()):
        assert not os.access(folder, os.W_OK), f"{folder} can be written to: the test would prove nothing"
    run(quantkit, "inspect", source)
    run(quantkit, "plan", source, "--device", "K100_AI")
    small = ("--samples", "8", "--seq-len", "32", "--force-sources", "--data", text)
    run(quantkit, "calibrate", source, "-o", out / "calibration", *small)
    run(quantkit, "convert", source, "-o", out / "int8", "--calibration", out / "calibration", "--jobs", "2")
    run(quantkit, "convert", source, "-o", out / "shards", "--format", "sharded", "--jobs", "1")
    run(quantkit, "verify", out / "int8", "--source", source)
    for made in ("int8", "shards"):
        run(runtime, "smoke-load", out / made, "--prompt", "The sea", "--max-new-tokens", "2")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
