"""What all reports share: complete tables of strings, both languages alike."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import jinja2
import pytest
import yaml
from markupsafe import Markup

from quantkit.report import page

FOLDER = Path(str(resources.files("quantkit.report")))
REPORTS = sorted(
    path.name.removesuffix(".html.j2") for path in FOLDER.glob("templates/*.j2") if "base" not in path.name
)


def used(report: str) -> tuple[set[str], set[str]]:
    """Keys that a template names, and beginnings of those that it puts together."""
    template = (FOLDER / "templates" / f"{report}.html.j2").read_text(encoding="utf-8")
    found = re.findall(r"\bt\(\"([a-z0-9_]+)\"(\s*~)?", template)
    return {key for key, joined in found if not joined}, {key for key, joined in found if joined}


@pytest.mark.parametrize("report", REPORTS)
def test_every_string_is_there_in_both_languages(report: str) -> None:
    strings = page.load_strings(report)
    named, begun = used(report)
    assert named - strings.keys() == set()
    assert all(any(key.startswith(start) for key in strings) for start in begun)
    for key, text in strings.items():
        assert text.en.strip(), key
        assert text.zh.strip(), key
        assert sorted(re.findall(r"{\w+}", text.en)) == sorted(re.findall(r"{\w+}", text.zh)), key


@pytest.mark.parametrize("report", REPORTS)
def test_templates_hold_no_words(report: str) -> None:
    """All words come from the table: outside of tags, expressions and statements a template has only signs."""
    text = (FOLDER / "templates" / f"{report}.html.j2").read_text(encoding="utf-8")
    text = re.sub(r"{%\s*block title\s*%}.*?{%\s*endblock\s*%}", "", text, flags=re.S)
    bare = re.sub(r"{{.*?}}|{%.*?%}|{#.*?#}|<[^>]*>|&nbsp;", " ", text, flags=re.S)
    assert re.findall(r"[^\W\d_]{2,}", bare) == []


def test_tables_have_no_unused_strings() -> None:
    common = set(yaml.safe_load((FOLDER / "strings" / "common.yaml").read_text(encoding="utf-8")))
    everything = set().union(*(used(report)[0] for report in REPORTS))
    assert common - everything == set()


def test_values_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    t = page._translator({"key": page.Text("a {x} < b", "甲 {x}")})
    assert t("key", x="<i>") == '<span lang="en">a &lt;i&gt; &lt; b</span><span lang="zh">甲 &lt;i&gt;</span>'
    assert "<code>n</code>" in t("key", x=Markup("<code>n</code>"))


def test_labels_of_plots_and_only_they_are_translated() -> None:
    strings = {"plot_layer": page.Text("layer", "层"), "layer": page.Text("data", "数据")}
    found = page.translate_svg('<svg><text x="1">layer</text><text>data</text></svg>', strings)
    assert found == (
        '<svg><text x="1"><tspan lang="en">layer</tspan><tspan lang="zh">层</tspan></text><text>data</text></svg>'
    )


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        page.render("calibration", {})
