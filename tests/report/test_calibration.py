"""The calibration report as a reader sees it: a dense page, a phone, English, Chinese, no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.calibrate.run import calibrate
from quantkit.recipe import load_recipe, validated
from quantkit.report.calibration import render
from quantkit.spec.calibration import CalibrationSummary, EvaluationRow
from tests.browser import Browser, check_report

EVALUATION = (
    EvaluationRow(kind="code", first=0, last=127, tokens=4064, perplexity_source=6.784, perplexity=6.851, kl=0.0109),
    EvaluationRow(
        kind="chinese", first=0, last=127, tokens=4064, perplexity_source=12.192, perplexity=12.41, kl=0.0253
    ),
)


@pytest.fixture(scope="module")
def summary(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationSummary:
    """Of a real model: kept roles, fallbacks, shared experts."""
    values = load_recipe("w8a8").model_dump()
    values["calibration"] |= {"samples": 6, "seq_len": 32}
    return calibrate(deepseek, tmp_path_factory.mktemp("report") / "out", validated(values, "test"))


@pytest.fixture(scope="module")
def report(summary: CalibrationSummary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(summary.model_copy(update={"evaluation": EVALUATION})), encoding="utf-8")
    return path


def test_in_a_browser(report: Path, browser: Browser) -> None:
    check_report(browser, report, "Clipping between kinds of text", "不同类别文本之间的截断")
    chinese = browser.open(report, language="zh").text
    assert "词元数 / 平均值" in chinese  # a label of a plot
    assert "tokens / even share" not in chinese


def test_numbers_are_those_of_the_summary(summary: CalibrationSummary, report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    worst = max((row for row in summary.gemms if row.quantized), key=lambda row: row.token_error)
    assert f"<code>{worst.name}</code>" in page
    assert f"{worst.token_error:.2%}" in page
    assert "12.192" in page
    assert "+1.79 %" in page  # 12.41 / 12.192


def test_data_cannot_become_markup(summary: CalibrationSummary) -> None:
    gemms = tuple(row for row in summary.gemms if row.role == "attn.o")
    changes = {"model_type": "<script>x</script>", "warnings": ("<b>{0}</b>",), "gemms": gemms, "clipping": ()}
    page = render(summary.model_copy(update=changes))
    assert "<script>x" not in page
    assert "&lt;b&gt;{0}&lt;/b&gt;" in page
