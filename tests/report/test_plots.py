"""Plots: what is drawn, and the same bytes for the same data."""

from __future__ import annotations

import re

import numpy as np
import pytest

from quantkit.report.plots import heat_map, line_plot


def ticks(plot: str) -> list[str]:
    return re.findall(r">([^<>]+)</text>", plot)


def test_same_bytes() -> None:
    series = {"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.0, 3.0)]}
    assert line_plot(series, "x", "y") == line_plot(series, "x", "y")
    assert line_plot(series, "x", "y") != line_plot({"a": series["a"]}, "x", "y")


@pytest.mark.filterwarnings("error")
def test_zeros_are_left_out_of_logarithmic_axes() -> None:
    plot = line_plot({"a": [(0.0, 0.0), (1.0, 1e-4), (2.0, 1e-1)]}, "x", "y")
    assert plot.count("<use") - line_plot({"a": [(1.0, 1e-4), (2.0, 1e-1)]}, "x", "y").count("<use") == 0
    assert line_plot({"a": [(0.0, 0.0), (1.0, 0.0)]}, "x", "y").startswith("<svg")


def test_cells_carry_their_numbers() -> None:
    values = np.array([[np.nan, 0.25], [0.5, np.nan]])
    plot = heat_map(values, "x", "y", x_names=["a", "b"], y_names=["a", "b"], percent=True)
    assert {"25%", "50%"} <= set(ticks(plot))
    assert "nan" not in plot


def test_settings_of_others_change_nothing() -> None:
    import matplotlib

    def drawn() -> tuple[str, str]:
        lines = line_plot({"a": [(0, 1.0), (1, 200.0)], "b": [(0, 2.0)]}, "x", "y")
        return lines, heat_map(np.array([[0.1, 0.9]]), "x", "y", x_names=["left", "right"])

    before = drawn()
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 7, "svg.hashsalt": "other", "axes.grid": False}):
        assert drawn() == before
