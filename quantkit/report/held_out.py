"""Parts of the calibration report about the quantized model as a whole: held-out text, decisions, methods."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.plots import line_plot
from quantkit.spec.calibration import NOTHING, KvSummary, MethodRow
from quantkit.spec.decisions import FormDecisions, GroupError, HeldOut

WORST_GROUPS = 12
"""Groups whose share of the divergence is shown; the summary holds all of them."""


def held_out_tables(found: HeldOut | None) -> dict[str, Any]:
    """Rows by kind of text for each quantized stream, and plots over positions and layers."""
    if found is None:
        return {"held_out": {}, "kl_by_position": "", "layer_errors": "", "routing": ""}
    streams = {
        name: [
            {
                "kind": kind,
                "positions": found.positions[kind],
                "kl": kl,
                "kl_error": found.kl_error[name][kind],
                "perplexity_source": found.perplexity_source[kind],
                "perplexity": found.perplexity[name][kind],
                "change": found.perplexity[name][kind] / found.perplexity_source[kind] - 1,
                "top1": found.top1[name][kind],
            }
            for kind, kl in sorted(by_kind.items())
        ]
        for name, by_kind in found.kl.items()
    }
    return {
        "held_out": streams,
        "kl_by_position": _lines(found.kl_by_position, "first position", "KL, nats"),
        "layer_errors": _lines(
            {name: dict(enumerate(values)) for name, values in found.layer_error.items()}, "layer", "squared error"
        ),
        "routing": _lines(found.routing, "layer", "agreement"),
    }


def _lines(series: Mapping[str, Mapping[int, float]], x_label: str, y_label: str) -> str:
    """A line for each stream; "" when none has two points."""
    points = {name: [(float(x), y) for x, y in sorted(values.items())] for name, values in series.items()}
    return line_plot(points, x_label, y_label) if any(len(row) > 1 for row in points.values()) else ""


def form_rows(forms: Mapping[str, FormDecisions]) -> list[dict[str, Any]]:
    """Predicted and measured divergence of each form, the worst kind of text."""
    return [
        {
            "form": name,
            "exceptions": len(form.exceptions),
            "budget": form.budget,
            "predicted": max(form.predicted_kl.values(), default=0.0),
            "measured": max(form.measured_kl.values()) if form.measured_kl else None,
            "kept_share": form.kept_share,
            "within": form.within_budget,
            "rows": form.exceptions,
        }
        for name, form in sorted(forms.items())
    ]


def worst_groups(groups: Sequence[GroupError]) -> list[dict[str, Any]]:
    """The groups with the largest share of the divergence on any kind of text, scheme by scheme."""
    rows: list[dict[str, Any]] = [
        {
            "group": row.group,
            "weights": row.weights,
            "share": {scheme: max(by_kind.values(), default=0.0) for scheme, by_kind in row.share.items()},
        }
        for row in groups
    ]
    return sorted(rows, key=lambda row: (-max(row["share"].values(), default=0.0), row["group"]))[:WORST_GROUPS]


def kv_plot(rows: Sequence[KvSummary]) -> str:
    """Errors of an INT8 cache over the layers."""
    series = {
        "keys": {row.layer: row.key_error for row in rows},
        "values": {row.layer: row.value_error for row in rows},
    }
    return _lines(series, "layer", "relative error")


def method_rows(methods: Sequence[MethodRow], most: int) -> list[dict[str, Any]]:
    """Per method: places, changed ones, mean error before and after, GEMMs that have no place, largest gains."""
    by_method: defaultdict[str, list[MethodRow]] = defaultdict(list)
    without: Counter[str] = Counter()
    for row in methods:
        if row.note.startswith(NOTHING):
            without[row.method] += row.gemms
        else:
            by_method[row.method].append(row)
    return [
        {
            "method": name,
            "places": len(rows),
            "changed": sum(row.after != row.before for row in rows),
            "before": sum(row.before for row in rows) / len(rows),
            "after": sum(row.after for row in rows) / len(rows),
            "without": without[name],
            "rows": sorted(rows, key=lambda row: (row.after - row.before, row.name))[:most],
        }
        for name, rows in sorted(by_method.items())
    ]
