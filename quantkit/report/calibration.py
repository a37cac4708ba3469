"""The report of a calibration: `report.html` from `calibration.json` and nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import yaml

from quantkit.report import page
from quantkit.report.held_out import form_rows, held_out_tables, kv_plot, method_rows, worst_groups
from quantkit.report.plots import heat_map, line_plot
from quantkit.spec.calibration import CalibrationSummary, ClippingRow, GemmSummary

MAX_ROWS = 25
"""Rows of the tables of single GEMMs; the summary holds all of them."""


def render(summary: CalibrationSummary) -> str:
    """The page as one self-contained HTML document."""
    return page.render("calibration", {"summary": summary, **_context(summary)})


def _context(summary: CalibrationSummary) -> dict[str, Any]:
    gemms = summary.gemms
    by_outliers = sorted(
        (row for row in gemms if row.outlier_channels), key=lambda row: (-row.outlier_channels, row.name)
    )
    return {
        "layers": len({row.layer for row in gemms}),
        "quantized": sum(row.quantized for row in gemms),
        "token_errors": line_plot(_by_role(gemms, "token_error"), "layer", "relative error"),
        "group_errors": line_plot(_by_role(gemms, "group_error"), "layer", "relative error"),
        "worst": sorted((row for row in gemms if row.quantized), key=lambda row: (-row.token_error, row.name))[
            :MAX_ROWS
        ],
        "roles": _role_table(gemms),
        "outliers": by_outliers[:MAX_ROWS],
        "outlier_total": len(by_outliers),
        "expert_map": _expert_map(summary.expert_tokens),
        "fallbacks": [row for row in gemms if row.fallback],
        "clipping": _clipping_maps(summary.clipping),
        "sources": _source_table(summary),
        **held_out_tables(summary.held_out),
        "forms": form_rows(summary.decisions.forms) if summary.decisions else [],
        "worst_groups": worst_groups(summary.decisions.groups) if summary.decisions else [],
        "methods": method_rows(summary.methods, MAX_ROWS),
        "kv_plot": kv_plot(summary.kv_cache),
        "recipe": yaml.safe_dump(summary.recipe, sort_keys=False, allow_unicode=True),
    }


def _by_role(gemms: Iterable[GemmSummary], field: str) -> dict[str, list[tuple[float, float]]]:
    """Role -> (layer, mean over experts) points; roles that share an input in every layer make one line."""
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in gemms:
        found[row.role][row.layer or 0].append(getattr(row, field))
    lines = {
        role: tuple((float(layer), float(np.mean(values))) for layer, values in sorted(layers.items()))
        for role, layers in sorted(found.items())
    }
    return {name: list(points) for name, points in _merge_equal(lines).items()}


def _merge_equal(named: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with equal values under one name, `attn.k, attn.q, attn.v`."""
    names: dict[Any, list[str]] = {}
    for name, value in named.items():
        names.setdefault(value, []).append(name)
    return {", ".join(members): value for value, members in names.items()}


def _role_table(gemms: Iterable[GemmSummary]) -> list[dict[str, Any]]:
    by_role: defaultdict[str, list[GemmSummary]] = defaultdict(list)
    for row in gemms:
        by_role[row.role].append(row)
    return [
        {
            "role": role,
            "gemms": len(rows),
            "quantized": sum(row.quantized for row in rows),
            "absmax": max(row.absmax for row in rows),
            "token_error": float(np.mean([row.token_error for row in rows])),
            "group_error": float(np.mean([row.group_error for row in rows])),
            "group_size": ", ".join(sorted({str(row.group_size) for row in rows})),
            "outliers": sum(row.outlier_channels for row in rows),
        }
        for role, rows in sorted(by_role.items())
    ]


def _expert_map(tokens: Mapping[int, tuple[int, ...]]) -> str:
    if not tokens:
        return ""
    width = max(map(len, tokens.values()))
    values = np.full((len(tokens), width), np.nan)
    for row, (_, counts) in enumerate(sorted(tokens.items())):
        values[row, : len(counts)] = np.asarray(counts) / max(1, sum(counts)) * len(counts)
    names = [f"{layer}" for layer in sorted(tokens)] if len(tokens) <= 24 else []
    return heat_map(values, "expert", "layer", y_names=names, colour_label="tokens / even share", numbers=False)


def _clipping_maps(rows: Iterable[ClippingRow]) -> dict[str, str]:
    """Role names -> matrix of the shares; roles with equal matrices (a shared input) once."""
    by_role: defaultdict[str, list[tuple[str, str, float]]] = defaultdict(list)
    for row in rows:
        by_role[row.role].append((row.scales_from, row.clipped, row.share))
    merged = _merge_equal({role: tuple(found) for role, found in sorted(by_role.items())})
    return {roles: _clipping_map(found) for roles, found in merged.items()}


def _clipping_map(found: Iterable[tuple[str, str, float]]) -> str:
    shares = {(scales_from, clipped): share for scales_from, clipped, share in found}
    kinds = sorted({kind for pair in shares for kind in pair})
    values = np.array([[shares.get((a, b), np.nan) for b in kinds] for a in kinds])
    return heat_map(
        values,
        "text that exceeds the range",
        "range seen on",
        x_names=kinds,
        y_names=kinds,
        colour_label="share of channels",
        percent=True,
    )


def _source_table(summary: CalibrationSummary) -> list[dict[str, Any]]:
    counts: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for sample in summary.samples:
        counts[sample.kind, sample.source] += 1
        tokens[sample.kind, sample.source] += sample.tokens
    return [
        {"kind": kind, "source": source, "samples": count, "tokens": tokens[kind, source]}
        for (kind, source), count in sorted(counts.items())
    ]
