"""Planning for three trillion parameters from headers alone: time and memory of `inspect` and `convert --dry-run`.

    python tests/bench/plan_speed.py [--small]

93 layers with 896 experts each, 496,639 tensors in FP8 blocks, 3 TB of holes behind true headers (synthetic.py).
"""

from __future__ import annotations

import json
import shutil

import common
from convert_speed import fresh
from synthetic import headers_only

# mesh of a whole cluster: every expert tensor is assigned to one of 64 groups
SHARDED = ("--format", "sharded", "--tp", "8", "--pp", "4", "--ep", "64", "--dp", "8")


def main() -> None:
    parser = common.arguments(__doc__)
    args = parser.parse_args()
    layers = 6 if args.small else 93
    report = common.Report("plan_speed", args.small, {"layers": layers, "experts": 896, "sharded": " ".join(SHARDED)})
    root = headers_only(fresh(args.work / "headers"), layers=layers)
    index = json.loads((root / "model.safetensors.index.json").read_text())
    report.data["tensors"] = len(index["weight_map"])
    report.data["source_bytes"] = index["metadata"]["total_size"]
    out = args.work / "never-written"
    commands = {
        "inspect": ("inspect", str(root), "--json"),
        "convert --dry-run": ("convert", str(root), "-o", str(out), "--dry-run", "--json"),
        "convert --dry-run, 256 ranks": ("convert", str(root), "-o", str(out), "--dry-run", "--json", *SHARDED),
    }
    found = {}
    for name, words in commands.items():
        common.drop_cache(root)
        found[name] = common.run([*common.QUANTKIT, *words])
    report.data["commands"] = {name: run.row() for name, run in found.items()}
    plan = json.loads(found["convert --dry-run"].stdout)
    report.data["parameters"] = plan["parameters"]
    print(f"{plan['parameters'] / 1e12:.2f} T parameters, {report.data['tensors']:,} tensors")
    common.show(found)
    for name, run in found.items():
        report.target(f"{name}: seconds", run.seconds, 60)
        report.target(f"{name}: peak RSS in GiB", run.peak_rss / 2**30, 2)
    shutil.rmtree(root)
    report.write()


if __name__ == "__main__":
    main()
