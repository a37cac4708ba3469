"""The report of an acceptance: `acceptance.html` from `acceptance.json` and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml

from quantkit.acceptance.outcome import AcceptanceReport, Check
from quantkit.report import page
from quantkit.report.plots import line_plot

LOADS = ("short", "long", "mixed")


def render(report: AcceptanceReport) -> str:
    """The page as one self-contained HTML document."""
    dimensions = tuple(dict.fromkeys(check.dimension for check in report.checks))
    context: dict[str, Any] = {
        "report": report,
        "dimensions": {name: [check for check in report.checks if check.dimension == name] for name in dimensions},
        "counts": {name: _counts(report, name) for name in dimensions},
        "loads": [check for check in report.checks if check.name in LOADS and check.measured],
        "memory": _plot(report, "memory_mib", "MiB"),
        "latency": _plot(report, "token_latency_s", "seconds per token"),
        "settings": yaml.safe_dump(report.settings, sort_keys=False),
        "figures": _figures,
    }
    return page.render("acceptance", context)


def sentences(check: Check) -> list[str]:
    """The findings in English, for the terminal."""
    strings = page.load_strings("acceptance")
    return [strings[finding.key].en.format(**finding.values) for finding in check.findings]


def _counts(report: AcceptanceReport, dimension: str) -> Counter[str]:
    return Counter(check.status for check in report.checks if check.dimension == dimension)


def _figures(check: Check) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in check.measured.items())


def _plot(report: AcceptanceReport, name: str, unit: str) -> str:
    points = report.series.get(name, ())
    if len(points) < 2:
        return ""
    return line_plot({name: points}, "seconds", unit)
