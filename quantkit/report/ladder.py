"""The report of a precision ladder: `ladder.html` from `ladder.json` and nothing else."""

from __future__ import annotations

from typing import Any

from quantkit.ladder.run import LadderReport
from quantkit.memory import human_bytes
from quantkit.report import page
from quantkit.report.plots import line_plot


def render(report: LadderReport) -> str:
    """The page as one self-contained HTML document."""
    kinds = list(report.rungs[0].scores.kinds) if report.rungs else []
    context: dict[str, Any] = {
        "report": report,
        "kinds": kinds,
        "bytes": human_bytes,
        "by_position": _by_position(report),
    }
    return page.render("ladder", context)


def _by_position(report: LadderReport) -> str:
    """KL over positions, where there is more than one bucket."""
    series = {
        row.rung.name: [(float(start), score.kl) for start, score in row.scores.positions.items()]
        for row in report.rungs
    }
    if all(len(points) < 2 for points in series.values()):
        return ""
    return line_plot(series, "first position", "KL, nats")
