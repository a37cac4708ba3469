"""The closing table of `make bench`: every target of every result, met or missed, with its machine; and plots.

Reads the JSON results and measures nothing: a row says what its result said. `targets.svg` shows each figure as a share
of its bound, `convert_speed.svg` the candidates of the conversion side by side; equal results give equal files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common

_LONGEST = 3.0
"""Bars end here: a figure three times its bound is missed, however much more it is."""
_MET, _MISSED, _PEER = "#2a7a4b", "#b3261e", "#8a8f98"


class Target(NamedTuple):
    """One row: `share` of the bound that is used up, above 1 when it is missed; of a bound of 0 nothing, or all."""

    benchmark: str
    what: str
    value: float
    bound: float
    at_most: bool
    met: bool

    @property
    def share(self) -> float:
        over, under = (self.value, self.bound) if self.at_most else (self.bound, self.value)
        return max(0.0, over / under) if under > 0 else (0.0 if self.met else _LONGEST)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result of this project's benchmarks, by name of its file; other JSON is left out."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: data for name, data in found.items() if isinstance(data, dict) and data.get("targets")}


def targets(found: dict[str, dict[str, Any]]) -> list[Target]:
    return [
        Target(name, row["what"], row["value"], row["bound"], row["at_most"], row["met"])
        for name, data in found.items()
        for row in data["targets"]
    ]


def show(found: dict[str, dict[str, Any]], rows: Sequence[Target]) -> None:
    """Print where each result is from, then one row for each target."""
    where = [
        [name, data["machine"]["cpu"], data.get("card", {}).get("name", "-"), data["versions"]["torch"], data["commit"]]
        for name, data in found.items()
    ]
    common.table(["result", "processor", "card", "torch", "commit"], where)
    print()
    lines = [
        [row.what, row.benchmark, f"{row.value:.4g}", f"{'<=' if row.at_most else '>='} {row.bound:g}", _verdict(row)]
        for row in rows
    ]
    common.table(["figure", "result", "value", "target", ""], lines)
    missed = sum(not row.met for row in rows)
    print(f"\n{len(rows) - missed} of {len(rows)} targets met, {missed} missed")


def _verdict(row: Target) -> str:
    return "met" if row.met else "MISSED"


def plot(found: dict[str, dict[str, Any]], rows: Sequence[Target], folder: Path) -> list[Path]:
    """Write the plots; the paths as they are written."""
    import matplotlib

    # Ids of an SVG are random without a salt, and its text would be drawn as paths.
    with matplotlib.rc_context({"svg.hashsalt": "quantkit", "svg.fonttype": "none", "font.size": 8}):
        return list(_plots(found, rows, folder))


def _plots(found: dict[str, dict[str, Any]], rows: Sequence[Target], folder: Path) -> Iterator[Path]:
    labels = [f"{row.what} ({row.benchmark})" for row in rows]
    shares = [min(row.share, _LONGEST) for row in rows]
    colors = [_MET if row.met else _MISSED for row in rows]
    yield _bars(folder / "targets.svg", labels, shares, colors, "share of the bound; beyond 1 it is missed", mark=1.0)
    if speed := found.get("convert_speed"):
        seconds = {name: run["compared_seconds"] for name, run in speed["candidates"].items()}
        colors = [_MET if name == "quantkit" else _PEER for name in seconds]
        axis = f"seconds for {speed['source_bytes'] / common.GB:.1f} GB, BF16 to INT8"
        yield _bars(folder / "convert_speed.svg", list(seconds), list(seconds.values()), colors, axis)


def _bars(
    path: Path, labels: list[str], values: list[float], colors: list[str], axis: str, *, mark: float | None = None
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.2 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(labels, values, color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.spines[["top", "right"]].set_visible(False)
    if mark is not None:
        axes.axvline(mark, color="black", linewidth=0.8)
    figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="of a trial: results in build/bench/results")
    folder = common.SCRATCH / "results" if parser.parse_args().small else common.RESULTS
    found = results(folder)
    if not found:
        raise SystemExit(
            f"error: no results in {folder.relative_to(common.ROOT)}; run a benchmark first (`make bench`)"
        )
    rows = targets(found)
    show(found, rows)
    for path in plot(found, rows, folder):
        print(f"written: {path.relative_to(common.ROOT)}")


if __name__ == "__main__":
    main()
