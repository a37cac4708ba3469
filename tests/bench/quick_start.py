"""From a clone to a real model that is converted, verified and run, by the README's commands alone.

    python tests/bench/quick_start.py [--small]

Clones this repository's last commit and types the block of *Quick start*, each line in a shell of its own, in an empty
environment: `make` creates it. pip's cache and the fetched model's are those of the user, and stand in the result.
`--small` leaves `make` out and takes the environment and the model of this checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import common
from convert_speed import fresh

MODEL = Path("tests/models/smollm2-135m")
WHEELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkit"


def lines() -> list[str]:
    """What a new user types."""
    text = (common.ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- quick -->\n```\n(.*?)```", text, re.DOTALL)
    if not found:
        raise SystemExit("error: README.md has no block that is marked as the quick start")
    return [line.partition("   #")[0].rstrip() for line in found[1].splitlines() if not line.startswith(". ")]


def main() -> None:
    args = common.arguments(__doc__).parse_args()
    report = common.Report("quick_start", args.small, {"model_in_cache": any(WHEELS.glob("*.whl"))})
    clone = fresh(args.work / "quick_start")
    subprocess.run(["git", "clone", "--quiet", str(common.ROOT), str(clone)], check=True)
    commands, programs = lines(), clone.resolve() / ".venv" / "bin"
    if args.small:
        commands, programs = commands[1:], Path(sys.executable).parent
        (clone / MODEL).symlink_to(common.ROOT / MODEL)
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = {line: common.run(["bash", "-c", f'cd "$0" && {line}', clone], env=path) for line in commands}
    common.show(done)
    total = sum(run.seconds for run in done.values())
    report.data["commands"] = {line: run.row() for line, run in done.items()}
    report.data["cpu_seconds"] = sum(run.cpu_seconds for run in done.values())
    report.target("from a clone to a model that ran: seconds", total, 600)
    report.write()


if __name__ == "__main__":
    main()
