"""HTML reports: one file each, offline, English and Chinese with a switch.

A report is a template in `templates/` that extends `base.html.j2`, and a table in `strings/` (YAML: key -> `en`, `zh`)
beside `common.yaml`. Templates write `{{ t("key", n=3) }}` for every sentence; names of tensors, roles and files are
data and are not translated. The page asks the network for nothing; its only script switches the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml
from markupsafe import Markup, escape

LANGUAGES = ("en", "zh")


class Text(NamedTuple):
    """One string in both languages; `{name}` stands for a value."""

    en: str
    zh: str


Strings = Mapping[str, Text]

_PLOT_PREFIX = "plot_"
"""Keys of the strings that plots may hold as their labels."""

_SVG_TEXT = re.compile(r">([^<>]+)</text>")


def _file(folder: str, name: str) -> str:
    return (resources.files("quantkit.report") / folder / name).read_text(encoding="utf-8")


@cache
def load_strings(report: str) -> Strings:
    """The strings of a report: `common.yaml` and its own table."""
    rows: dict[str, dict[str, str]] = {}
    for name in ("common", report):
        rows |= yaml.safe_load(_file("strings", f"{name}.yaml"))
    return {key: Text(**row) for key, row in rows.items()}


def render(report: str, context: Mapping[str, Any]) -> str:
    """The page of `templates/REPORT.html.j2` as one self-contained HTML document.

    The template sees `t(key, **values)` (a string in both languages), `svg(plot)` (a plot with its labels in both),
    the filters `percent`, `short`, `count` and what `context` holds; a name that is missing is an error.
    """
    import jinja2

    strings = load_strings(report)
    loader = jinja2.FunctionLoader(lambda name: _file("templates", name))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["percent"] = lambda value, digits=2: f"{value:.{digits}%}"
    environment.filters["short"] = lambda value: f"{value:.3g}"
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.globals["t"] = _translator(strings)
    environment.globals["svg"] = lambda plot: Markup(translate_svg(plot, strings))
    return environment.get_template(f"{report}.html.j2").render(**context).rstrip() + "\n"


def _translator(strings: Strings) -> Callable[..., Markup]:
    def t(key: str, **values: Any) -> Markup:
        """Both languages; the page shows one. Values are escaped unless they are Markup."""
        safe = {name: escape(value) for name, value in values.items()}
        return Markup("").join(
            Markup('<span lang="{}">{}</span>').format(language, Markup(escape(text)).format(**safe))
            for language, text in zip(LANGUAGES, strings[key], strict=True)
        )

    return t


def translate_svg(plot: str, strings: Strings) -> str:
    """A plot whose labels stand in both languages.

    Labels are recognized by their English text; those that are no `plot_` string of the table are data and stay.
    """
    chinese = {escape(text.en): escape(text.zh) for key, text in strings.items() if key.startswith(_PLOT_PREFIX)}

    def both(found: re.Match[str]) -> str:
        label = found[1].strip()
        if label not in chinese:
            return found[0]
        return f'><tspan lang="en">{label}</tspan><tspan lang="zh">{chinese[Markup(label)]}</tspan></text>'

    return _SVG_TEXT.sub(both, plot)
