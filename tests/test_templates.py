"""Chat templates are programs of others: what they may cost is bounded, and what they say is what transformers says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit import templates
from quantkit.templates import TemplateFailure, render

TURNS = [{"role": "user", "content": "What is the sea?"}, {"role": "assistant", "content": "Salt water."}]


def say(template: str) -> str:
    return render(template, TURNS, {"eos_token": "<end>"}, generate=True)


def test_a_usual_template() -> None:
    text = "{% for m in messages %}{{ m.role }}:{{ m.content | tojson }}{{ eos_token }}{% endfor %}"
    text += "{{ add_generation_prompt }}"
    assert say(text) == 'user:"What is the sea?"<end>assistant:"Salt water."<end>True'


def test_the_date_is_fixed() -> None:
    assert say("{{ strftime_now('%d %b %Y') }}") == "01 Jan 2000"


@pytest.fixture(scope="module")
def hurried() -> Iterator[None]:
    """One second of computing for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "_renderer", templates._Renderer(seconds=1))
        yield
        templates._renderer.close()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 seconds"),
        ("{{ 10 ** (10 ** 9) }}", "more than 1 seconds"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'x' * 17000000 }}", "17,000,000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% include 'config.json' %}", "loader"),
        ("{{", "TemplateSyntaxError"),
    ],
)
def test_what_is_refused(template: str, why: str, hurried: None) -> None:
    with pytest.raises(TemplateFailure, match=why):
        say(template)
    assert say("{{ messages | length }}") == "2", "the next one is rendered, by a new process where the old one died"


def test_its_process_can_write_no_file() -> None:
    assert say("x") == "x"
    process = templates._renderer._process
    assert process is not None
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max file size")) == ["0", "0"]
    os.kill(process.pid, 9)
    with pytest.raises(TemplateFailure, match="ends its process"):
        say("x")
    assert say("x") == "x"
