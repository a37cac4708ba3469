"""The page of a comparison, and its findings as sentences for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.writer import write_atomic
from quantkit.compare.result import Comparison, Difference, Finding
from quantkit.errors import UsageError
from quantkit.report.page import load_strings, render
from quantkit.report.plots import line_plot
from quantkit.spec.files import is_folder

MAX_FINDINGS = 25
"""Findings on the page; the result holds all of them."""

_ENORMOUS = 1e6


def check_place(path: Path) -> None:
    """Before a comparison runs: its page can be written there.

    Raises:
        UsageError: no such folder, or one that cannot be written to.
    """
    if not is_folder(path.parent) or not os.access(path.parent, os.W_OK | os.X_OK):
        why = "cannot be written to" if is_folder(path.parent) else "is not a folder"
        raise UsageError(f"--report {path}: {path.parent} {why}", "make the folder, or give another place")


def write_report(path: Path, result: Comparison) -> None:
    """Write the page, English and Chinese, as one self-contained file."""
    write_atomic(path, [page(result).encode()])


def page(result: Comparison) -> str:
    """The page as one HTML document."""
    return render(
        "comparison",
        {
            "result": result,
            "findings": result.findings[:MAX_FINDINGS],
            "layer_plot": _layer_plot(result),
            "key_of": _key,
            "size": _size,
            "share": _share,
            "number": lambda value: f"{value:.4g}" if value < _ENORMOUS else "∞",
            "quoted": repr,
        },
    )


def _layer_plot(result: Comparison) -> str:
    strings = load_strings("comparison")
    lines = {
        strings["plot_alone"].en: [(float(row.layer), min(row.error, 10.0)) for row in result.layers],
        strings["plot_own"].en: [(float(row.layer), min(row.own_error, 10.0)) for row in result.layers],
        strings["plot_long"].en: [
            (float(row.layer), min(row.long_error, 10.0)) for row in result.layers if row.long_error is not None
        ],
    }
    return line_plot(
        {name: points for name, points in lines.items() if points}, strings["plot_layer"].en, strings["plot_error"].en
    )


def sentences(result: Comparison) -> list[str]:
    """What is wrong, in English, the files beside the weights first."""
    return [*map(_difference, result.companions), *(_sentence(finding) for finding in result.findings)] or [
        *_limits(result)
    ]


def _limits(result: Comparison) -> Iterator[str]:
    """Where no single fault was found: limits that are not kept."""
    for check in result.checks:
        if not check.passed:
            where = f" ({check.where})" if check.where else ""
            yield f"{check.name} is {check.value:.4g}, allowed {check.limit:g}{where}"


def _difference(row: Difference) -> str:
    text = load_strings("comparison")[f"companion_{row.what}"].en
    return text.format(name=row.name, source=row.source, candidate=row.candidate)


def _sentence(row: Finding) -> str:
    strings = load_strings("comparison")
    place = strings["at_outside"].en if row.layer is None else strings["at_layer"].en.format(layer=row.layer)
    place += "" if row.expert is None else f", {strings['at_expert'].en.format(expert=row.expert)}"
    text = strings[_key(row)].en.format(operator=row.operator, detail=row.detail, error=_size(row))
    return f"{place}: {text}"


def _key(row: Finding) -> str:
    """Name of the finding's sentence in the strings."""
    return f"finding_{row.what}_{row.why}"


def _size(row: Finding) -> str:
    return f"{row.error:.3g}" if row.what == "head" else _share(row.error)


def _share(error: float) -> str:
    return f"{error:.2%}" if error < _ENORMOUS else "∞"
