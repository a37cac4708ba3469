"""`quantkit verify` against hashlib on the same files with as many threads.

    python tests/bench/verify_speed.py [--small] [--gb 8] [--repeat 5]

verify reads every byte once for two digests (sha256 of the file, xxh3-128 of each tensor); hashlib makes sha256 alone.
Both find the files in the page cache, or both on the disk (written back and dropped before every run); the order
alternates. Throughput is counted over the time that grows with the data: the start of `verify` (interpreter, imports,
manifest), taken with `--quick` in the same run, is subtracted; the whole command is printed beside it.
"""

from __future__ import annotations

import shutil
from statistics import median
from typing import Any

import common
from convert_speed import fresh, last_line, quantkit, source_of


def verify(folder: Any, threads: int, *options: str) -> common.Measured:
    return common.run([*common.QUANTKIT, "verify", folder, "--jobs", str(threads), *options])


def hashing(folder: Any, threads: int) -> float:
    script = common.BENCH / "copy_and_hash.py"
    run = common.run([common.QUANTKIT[0], script, folder, "-", "--threads", str(threads)])
    return float(last_line(run)["seconds"])


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--gb", type=float, help="size of the BF16 source; half of it is verified (8; small: 0.35)")
    parser.add_argument("--repeat", type=int, help="repetitions (5; small: 2)")
    parser.add_argument("--jobs", type=int, default=2, help="threads of both")
    args = parser.parse_args()
    args.gb, args.repeat = args.gb or (0.35 if args.small else 8), args.repeat or (2 if args.small else 5)
    report = common.Report("verify_speed", args.small, {key: getattr(args, key) for key in ("gb", "repeat", "jobs")})
    args.work.mkdir(parents=True, exist_ok=True)
    source, output = source_of(args.work, args.gb), fresh(args.work / "int8")
    quantkit(source, output, args.jobs)
    size = common.folder_bytes(output)
    rows: dict[str, dict[str, list[float]]] = {}
    memory = 0
    for state in ("cached", "disk"):
        ready = common.fill_cache if state == "cached" else common.drop_cache
        times: dict[str, list[float]] = {"hashlib": [], "verify": [], "start": []}
        for _ in range(args.repeat):
            ready(output)
            times["hashlib"].append(hashing(output, args.jobs))
            ready(output)
            found = verify(output, args.jobs)
            times["verify"].append(found.seconds)
            memory = max(memory, found.peak_rss)
            ready(output)
            times["start"].append(verify(output, args.jobs, "--quick").seconds)
        rows[state] = times
    shutil.rmtree(output)
    report.data |= {"bytes": size, "peak_rss": memory, "seconds": rows}
    table = []
    for state, times in rows.items():
        plain, whole, start = (median(times[key]) for key in ("hashlib", "verify", "start"))
        # only as much faster than its start as the clock can tell: at tiny sizes nothing is left to divide by
        net = max(whole - start, 1e-3)
        rates = [size / plain / 1e6, size / net / 1e6, size / whole / 1e6]
        table.append([state, *(f"{rate:,.0f}" for rate in rates), f"{start:.2f}"])
        report.data[f"ratio_{state}"] = plain / net
        report.data[f"ratio_{state}_with_start"] = plain / whole
    common.table(["page cache", "hashlib MB/s", "verify MB/s", "whole command MB/s", "start s"], table)
    for state in rows:
        report.target(f"throughput against hashlib, {state}", report.data[f"ratio_{state}"], 0.9, at_most=False)
    report.write()


if __name__ == "__main__":
    main()
