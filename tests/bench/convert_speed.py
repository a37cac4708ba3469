"""Conversion against copying and hashing, and against llmcompressor's `model_free_ptq`, on one disk in one run.

    python tests/bench/convert_speed.py [--small] [--gb 4] [--repeat 3] [--without-peer]

A: copy the source with fsync, hash the source and the INT8 output with hashlib (copy_and_hash.py), as many threads as
   B has.
B: `quantkit convert`, recipe w8a8, checkpoint form; the whole command, interpreter start and imports included.
C: `model_free_ptq` W8A8 on the same input; only the call is timed, its imports are not; it neither hashes nor syncs.
The order is B, A, C in every repetition. Before each, everything is written back and source and outputs are dropped
from the page cache (posix_fadvise); the output that A hashes is read into the cache first, as B has it there as well.
The peak memory of B is also taken at 1 GB and 8 GB.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import common
import peers
from synthetic import synthetic

Times = dict[str, list[common.Measured]]


def quantkit(source: Path, out: Path, jobs: int) -> common.Measured:
    return common.run([*common.QUANTKIT, "convert", source, "-o", out, "--recipe", "w8a8", "--jobs", str(jobs)])


def yardstick(source: Path, copy: Path, output: Path, threads: int) -> common.Measured:
    script = common.BENCH / "copy_and_hash.py"
    return common.run([common.QUANTKIT[0], script, source, copy, "--hash", output, "--threads", str(threads)])


def peer(source: Path, out: Path, workers: int) -> common.Measured:
    script = common.BENCH / "peer_llmcompressor.py"
    return common.run([peers.python_of("llmcompressor"), script, "convert", source, out, "--workers", str(workers)])


def last_line(run: common.Measured) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def source_of(work: Path, gb: float) -> Path:
    """The synthetic checkpoint of a size; kept between runs."""
    root = work / f"synthetic-{gb:g}gb"
    if not (root / "config.json").is_file():
        print(f"making {root.name}", flush=True)
        synthetic(fresh(root), round(gb * common.GB))
    return root


def repetition(work: Path, source: Path, args: Any, runs: Times) -> None:
    output, copy = fresh(work / "int8"), fresh(work / "copy")
    common.drop_cache(source)
    runs["quantkit"].append(quantkit(source, output, args.jobs))
    common.drop_cache(source, output)
    common.fill_cache(output)
    runs["copy and hash"].append(yardstick(source, copy, output, args.jobs))
    shutil.rmtree(copy)
    for workers in [] if args.without_peer else args.peer_workers:
        foreign = fresh(work / "peer")
        common.drop_cache(source, output)
        runs[f"llmcompressor, {workers} workers"].append(peer(source, foreign, workers))
        shutil.rmtree(foreign)
    shutil.rmtree(output)


def compare(report: common.Report, work: Path, args: Any) -> None:
    source = source_of(work, args.gb)
    names = ["quantkit", "copy and hash"]
    names += [] if args.without_peer else [f"llmcompressor, {workers} workers" for workers in args.peer_workers]
    runs: Times = {name: [] for name in names}
    for _ in range(args.repeat):
        repetition(work, source, args, runs)
    # each candidate by its own clock where it has one: the peer's imports and the yardstick's start do not count
    seconds = {
        name: median(found.seconds if name == "quantkit" else last_line(found)["seconds"] for found in rows)
        for name, rows in runs.items()
    }
    report.data["source_bytes"] = common.folder_bytes(source)
    report.data["candidates"] = {
        name: {**common.summarize(rows), "compared_seconds": seconds[name]} for name, rows in runs.items()
    }
    report.data["candidates"]["copy and hash"]["steps"] = [last_line(row)["steps"] for row in runs["copy and hash"]]
    common.table(
        ["candidate", "seconds", "min", "max", "cpu s", "peak RSS MiB", "PSS", "anonymous"],
        [
            [
                name,
                f"{seconds[name]:.2f}",
                f"{min(row.seconds for row in rows):.2f}",
                f"{max(row.seconds for row in rows):.2f}",
                f"{median(row.cpu_seconds for row in rows):.1f}",
                *(common.mib(max(getattr(row, key) for row in rows)) for key in ("peak_rss", "peak_pss", "peak_anon")),
            ]
            for name, rows in runs.items()
        ],
    )
    report.target("time against copy and hash", seconds["quantkit"] / seconds["copy and hash"], 1.5)
    if not args.without_peer:
        fastest = min(value for name, value in seconds.items() if name.startswith("llmcompressor"))
        report.target("times as fast as model_free_ptq", fastest / seconds["quantkit"], 3, at_most=False)


def memory(report: common.Report, work: Path, args: Any) -> None:
    """Peak memory over sizes: bounded, and the same."""
    peaks: dict[str, dict[str, int]] = {}
    for gb in args.memory_gb:
        source, output = source_of(work, gb), fresh(work / "int8")
        common.drop_cache(source)
        found = quantkit(source, output, args.jobs)
        peaks[f"{gb:g}"] = {"peak_rss": found.peak_rss, "peak_pss": found.peak_pss, "peak_anon": found.peak_anon}
        shutil.rmtree(output)
        if gb != args.gb and not args.keep:
            shutil.rmtree(source)
    report.data["memory_by_gb"] = peaks
    rows = [[f"{gb} GB", *(common.mib(value) for value in peak.values())] for gb, peak in peaks.items()]
    common.table(["source", "peak RSS MiB", "PSS", "anonymous"], rows)
    largest, smallest = (pick(peak["peak_rss"] for peak in peaks.values()) for pick in (max, min))
    report.target("peak RSS in GiB", largest / 2**30, 1)
    report.target("largest over smallest peak RSS", largest / smallest, 1.1)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--gb", type=float, help="size of the source in 10^9 bytes (4; small: 0.35)")
    parser.add_argument("--memory-gb", type=float, nargs="*", help="sizes to take the memory at (1 8; small: 0.35 0.7)")
    parser.add_argument("--repeat", type=int, help="repetitions (3; small: 1)")
    parser.add_argument("--jobs", type=int, default=2, help="threads of both")
    parser.add_argument("--peer-workers", type=int, nargs="+", default=[1, 2], help="the faster one counts")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep all synthetic sources")
    args = parser.parse_args()
    args.gb = args.gb or (0.35 if args.small else 4)
    args.repeat = args.repeat or (1 if args.small else 3)
    args.memory_gb = ([0.35, 0.7] if args.small else [1, 8]) if args.memory_gb is None else args.memory_gb
    if not args.without_peer and not peers.versions("llmcompressor"):
        raise SystemExit("error: there is no environment of llmcompressor\nnext: make peers, or give --without-peer")
    args.work.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(args, key) for key in ("gb", "repeat", "jobs", "peer_workers", "memory_gb")}
    settings["page_cache"] = "written back and dropped (posix_fadvise) before every run; hashed output cached"
    report = common.Report("convert_speed", args.small, settings)
    report.data["peer_versions"] = {} if args.without_peer else peers.versions("llmcompressor")
    compare(report, args.work, args)
    if args.memory_gb:
        memory(report, args.work, args)
    report.write()


if __name__ == "__main__":
    main()
