"""Memory that grows with the number of tensors: a real conversion and its verification, 500,000 small tensors.

    python tests/bench/many_tensors.py [--small]

The names and files of the synthetic model of plan_speed.py (93 layers, 896 experts, FP8 in blocks), with experts of
16 x 16 values, which are zeros in sparse files; output files of 4 MB, so that there are about as many as of the whole
model. What is measured is the plan, the journal, the manifest and the comparison, hardly any weights.
"""

from __future__ import annotations

import json
import shutil

import common
from convert_speed import fresh
from synthetic import headers_only


def main() -> None:
    parser = common.arguments(__doc__)
    args = parser.parse_args()
    layers = 6 if args.small else 93
    report = common.Report("many_tensors", args.small, {"layers": layers, "experts": 896, "jobs": 2})
    root, out = (
        headers_only(fresh(args.work / "many"), layers=layers, hidden=16, width=16),
        fresh(args.work / "many-out"),
    )
    report.data["tensors"] = len(json.loads((root / "model.safetensors.index.json").read_text())["weight_map"])
    commands = {
        "convert": ("convert", str(root), "-o", str(out), "--max-shard-size", "4MB", "--jobs", "2"),
        "verify": ("verify", str(out), "--jobs", "2"),
        "verify --source": ("verify", str(out), "--source", str(root), "--jobs", "2"),
    }
    found = {name: common.run([*common.QUANTKIT, *words]) for name, words in commands.items()}
    report.data["commands"] = {name: run.row() for name, run in found.items()}
    print(f"{report.data['tensors']:,} tensors")
    common.show(found)
    for name, run in found.items():
        report.target(f"{name}: peak RSS in GiB", run.peak_rss / 2**30, 2)
    for folder in (root, out):
        shutil.rmtree(folder)
    report.write()


if __name__ == "__main__":
    main()
