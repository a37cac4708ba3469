"""Measured figures of the READMEs against the results that they are from: `readme_figures.yaml` says which is which."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.conftest import ROOT
from tests.acceptance.readme import TEXTS, cells

FIGURES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("readme_figures.yaml").read_text())["figures"]
RESULTS = ROOT / "tests" / "bench" / "results"
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?")
MEASURED = re.compile(r"\d ?%|\d (x\b|MiB|GiB|s\b|TOPS|seconds|times|minutes)")


def prose(text: str) -> list[str]:
    """Lines outside code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()


def without_code(line: str) -> str:
    return re.sub(r"`[^`]*`", "", line)


def numbers(line: str) -> list[str]:
    """Numbers as they are written: of a table's row without its first cell."""
    shown = " | ".join(cells(line)[1:]) if line.startswith("|") else line
    return NUMBER.findall(without_code(shown))


def line_of(figure: dict[str, Any]) -> str:
    found = [line for line in prose(TEXTS["en"]) if line.startswith(figure["line"])]
    assert len(found) == 1, f"{len(found)} lines of README.md begin with {figure['line']!r}"
    return found[0]


def lookup(result: str, path: str) -> float:
    """A value of a result; `path` as the YAML file says."""
    found: Any = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))
    path, _, factor = path.partition(" * ")
    path, _, divisor = path.partition(" / ")
    for step in path.split("/"):
        found = (
            next(row for row in found if step in (row.get("what"), row.get("name")))
            if isinstance(found, list)
            else found[step]
        )
    return float(found) * float(factor or 1) / float(divisor or 1)


def allowed(tolerance: float | str, value: float, shown: str) -> float:
    """What a figure may differ by: the tolerance, and half of its last digit."""
    _, _, digits = shown.partition(".")
    rounding = 0.5 * 10 ** -len(digits)
    share = str(tolerance).removesuffix("%")
    return rounding + (abs(value) * float(share) / 100 if str(tolerance).endswith("%") else float(share))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["line"])
def test_figures_are_those_of_the_results(figure: dict[str, Any]) -> None:
    line = line_of(figure)
    if "stated" in figure:
        return
    base = f"{figure['base']}/" if "base" in figure else ""
    assert len(numbers(line)) == len(figure["values"]), numbers(line)
    for shown, path in zip(numbers(line), figure["values"], strict=True):
        if path is None:
            continue
        value = lookup(figure["result"], base + path)
        off = abs(float(shown.replace(",", "")) - value)
        assert off <= allowed(figure["tolerance"], value, shown) * (1 + 1e-9), f"{path}: {shown} here, {value} there"


def test_no_figure_is_without_a_result() -> None:
    named = {line_of(figure) for figure in FIGURES}
    bare = [line for line in prose(TEXTS["en"]) if MEASURED.search(without_code(line)) and line not in named]
    assert not bare, "figures that readme_figures.yaml does not explain"


@pytest.mark.parametrize("language", TEXTS)
def test_both_languages_have_the_same_figures(language: str) -> None:
    def of(text: str) -> tuple[list[list[str]], list[list[str]]]:
        lines = [line for line in prose(text) if line.startswith(("|", "## "))]
        rest = re.split(r"^## .*$", "\n".join(line for line in prose(text) if line[:1] != "|"), flags=re.MULTILINE)
        return [numbers(line) for line in lines], [sorted(NUMBER.findall(without_code(part))) for part in rest]

    assert of(TEXTS[language]) == of(TEXTS["en"])


def test_a_figure_that_differs_is_found() -> None:
    """The comparison itself: rounding passes, one more digit does not."""
    assert allowed(0, 1.04, "1.0") == pytest.approx(0.05)
    assert allowed("10 %", 200.0, "210") == pytest.approx(20.5)
    assert allowed(0.1, -3.0, "-3.00") == pytest.approx(0.105)
    assert numbers("| `a 1` 2 x | +3.5 (4.0) | 1,024 MiB |") == ["+3.5", "4.0", "1,024"]
