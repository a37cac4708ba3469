"""Plots as SVG text that stands in the page: no scripts, no network, equal bytes for equal data."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")

_STYLE: Any = {
    "svg.hashsalt": "quantkit",  # ids inside the file depend on its content only
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}


def _styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw in this style alone: neither a user's matplotlibrc nor another library's settings may change the bytes."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)
            return draw(*args, **kwargs)

    return styled


@_styled
def line_plot(series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """One line per name through its (x, y) points; y is logarithmic, without zeros, beyond a decade of values."""
    figure, axes = _figure(4.8, 3.1 + (0.17 * ((len(series) + 1) // 2) if len(series) > 1 else 0))
    values = [y for points in series.values() for _, y in points if y > 0]
    logarithmic = bool(values) and max(values) > 10 * min(values)
    for index, (name, points) in enumerate(series.items()):
        shown = [point for point in points if point[1] > 0 or not logarithmic]
        x, y = [point[0] for point in shown], [point[1] for point in shown]
        axes.plot(x, y, marker="osv^D"[index % 5], markersize=3.5, linewidth=1.2, label=name, color=f"C{index % 10}")
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(series) > 1:
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return _svg(figure)


@_styled
def heat_map(
    values: NDArray[np.float64],
    x_label: str,
    y_label: str,
    *,
    x_names: Sequence[str] = (),
    y_names: Sequence[str] = (),
    colour_label: str = "",
    percent: bool = False,
    numbers: bool = True,
) -> str:
    """A matrix as coloured cells; small ones carry their numbers. NaN cells stay grey."""
    from matplotlib.colors import ListedColormap

    rows, columns = values.shape
    labelled = bool(y_names)
    figure, axes = _figure(min(9.0, 2.2 + 0.34 * columns + labelled), min(9.0, 1.3 + 0.32 * rows + labelled * 0.7))
    axes.grid(False)
    axes.imshow(np.isnan(values), aspect="auto", cmap=ListedColormap(["#dddddd"]))
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0.0, interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, label=colour_label)
    if percent:
        bar.ax.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if x_names:
        axes.set_xticks(range(columns), x_names, rotation=35, ha="right")
    if y_names:
        axes.set_yticks(range(rows), y_names)
    if not y_names:
        axes.yaxis.get_major_locator().set_params(integer=True)
    if numbers and values.size <= 100:
        _write_numbers(axes, values)
    return _svg(figure)


def _write_numbers(axes: Any, values: NDArray[np.float64]) -> None:
    middle = float(np.nanmax(values)) / 2
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8, color=colour)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    """The `<svg>` element, without the XML prologue and without date and version; on a phone it scrolls before its
    labels become too small to read."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = target.getvalue()
    shrinks_to = 0.75 * figure.get_figwidth()
    return text[text.index("<svg") :].replace("<svg ", f'<svg style="min-width: {shrinks_to:.2f}in" ', 1)
