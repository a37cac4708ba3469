"""The page of a comparison as a reader sees it: a pass and a failure, a phone, English, Chinese, no network."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from quantkit.compare.report import page, sentences, write_report
from quantkit.compare.result import Comparison, Difference, Finding, Operator
from quantkit.report.page import load_strings
from quantkit_instruments.compare import Options, run
from tests.browser import Browser, check_report


@pytest.fixture(scope="module")
def result(baseline: Path, minimax: Path) -> Comparison:
    """Of the source itself, in bfloat16: every table has rows, nothing is exactly zero."""
    return run(Options(baseline, minimax, device="cpu", dtype="bfloat16", verify=False))


@pytest.fixture(scope="module")
def failed(result: Comparison) -> Comparison:
    """With a finding of every kind that has a sentence."""
    keys = [key.removeprefix("finding_") for key in load_strings("comparison") if key.startswith("finding_")]
    findings = tuple(
        Finding.model_validate(
            {"layer": number % 3, "operator": "attn.o", "what": what, "why": why, "error": 0.5, "detail": "<2>"}
        )
        for number, (what, why) in enumerate(key.split("_", 1) for key in keys)
    )
    difference = Difference(what="config", name="rope_theta", source="1", candidate="2")
    operators = (Operator(name="self_attn.q_proj", end="out", error=0.01, bad=True),)
    changes = {"passed": False, "findings": findings, "companions": (difference,), "operators": operators}
    return result.model_copy(update={**changes, "first_bad_layer": 1})


def test_in_a_browser(result: Comparison, failed: Comparison, tmp_path: Path, browser: Browser) -> None:
    for number, each in enumerate((result, failed)):
        path = tmp_path / f"{number}.html"
        write_report(path, each)
        check_report(browser, path, "Next-token distributions", "下一词元分布")


def test_every_finding_has_its_sentence(failed: Comparison) -> None:
    assert {finding.what for finding in failed.findings} == set(get_args(Finding.model_fields["what"].annotation))
    shown, html = sentences(failed), page(failed)
    assert shown[0] == "config.json, rope_theta: 1 in the source, 2 in the candidate"
    assert len(shown) == 1 + len(failed.findings)
    assert "&lt;2&gt;" in html
    assert "<2>" not in html


def test_figures_are_those_of_the_result(result: Comparison) -> None:
    html = page(result)
    for row in result.layers:
        assert f"{row.error:.2%}" in html
    for row in result.kinds:
        assert f"{row.perplexity_ratio:.4f}" in html
    assert all(
        check.name in {key.removeprefix("check_") for key in load_strings("comparison")} for check in result.checks
    )
