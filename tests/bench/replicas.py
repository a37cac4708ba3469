"""Published models in full size, headers alone: what every command that reads headers takes for them.

    python tests/bench/replicas.py [--small]      # --small: the smallest two models

For each model and each number of cards of `recipes/plans`: `inspect`, `plan`, and `convert --dry-run` of both forms,
with the mesh that `plan` puts first. It fails where a command does, and where the class with all layers has other
tensors than the replica.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import common
from convert_speed import fresh

from tests.models.replica import make_replica, rows_of
from tests.plan.facts import CONFIGS
from tests.plan.published import CARDS, DEVICE, RECIPES

SMALLEST = ("gpt-oss-120b", "Qwen3-30B-A3B")


def commands_of(model: str, root: Path, out: Path) -> dict[str, common.Measured]:
    """Every command for one model, by what it does."""
    recipe = ("--recipe", RECIPES[model])
    convert = ("convert", str(root), "-o", str(out), "--dry-run", "--json", *recipe)
    found = {
        "inspect": common.run([*common.QUANTKIT, "inspect", str(root), "--json", *recipe]),
        "checkpoint": common.run([*common.QUANTKIT, *convert]),
    }
    for cards in CARDS:
        words = ("plan", str(root), "--device", DEVICE, "--cards", str(cards), "--json", *recipe)
        found[f"plan {cards}"] = common.run([*common.QUANTKIT, *words], check=False)
        plan: dict[str, Any] = json.loads(found[f"plan {cards}"].stdout)
        if plan["commands"]:
            mesh = shlex.split(plan["commands"][0])
            sizes = mesh[mesh.index("--format") :]
            found[f"shards {cards}"] = common.run([*common.QUANTKIT, *convert, *sizes])
    return found


def main() -> None:
    parser = common.arguments(__doc__)
    args = parser.parse_args()
    report = common.Report("replicas", args.small, {"cards": list(CARDS), "device": DEVICE})
    report.data["models"] = {}
    for model in SMALLEST if args.small else RECIPES:
        if sorted(rows_of(model, CONFIGS[model])) != sorted(rows_of(model, CONFIGS[model], whole=True)):
            raise SystemExit(f"{model}: the layers do not repeat as tests/models/replica.py says")
        root = make_replica(model, fresh(args.work / "replicas") / model)
        found = commands_of(model, root, args.work / "never-written")
        report.data["models"][model] = {name: run.row() for name, run in found.items()}
        print(model)
        common.show(found)
        report.target(f"{model}: slowest command in seconds", max(run.seconds for run in found.values()), 60)
        report.target(f"{model}: peak RSS in GiB", max(run.peak_rss for run in found.values()) / 2**30, 2)
        shutil.rmtree(root)
    report.write()


if __name__ == "__main__":
    main()
