#!/usr/bin/env python3
"""Load converted weights, run them and report every GEMM: `quantkit-runtime smoke-load` as a script.

Runs from a checkout, installed or not. Example:

    python runtime/smoke_load.py OUT --prompt "Once upon a time"
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from quantkit.console import expected_failures
from quantkit_instruments.commands.smoke_load import command

if __name__ == "__main__":
    with expected_failures():
        command.main(prog_name="smoke_load.py")
