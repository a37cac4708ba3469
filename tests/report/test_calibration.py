"""The calibration report as a reader sees it: a dense page, a phone, English, Chinese, no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from markupsafe import escape

from quantkit.calibrate.run import calibrate
from quantkit.recipe import load_recipe, validated
from quantkit.report import calibration
from quantkit.report.calibration import render
from quantkit.spec.calibration import CalibrationSummary, KvSummary, MethodRow
from tests.browser import Browser, check_report

METHODS = (
    MethodRow(method="smooth", layer=0, name="layers.0.attn.in", before=0.0213, after=0.0151, note="strength 0.6"),
    MethodRow(method="smooth", layer=1, name="layers.1.attn.in", before=0.0111, after=0.0111, note="does not pay"),
)
CACHE = tuple(
    KvSummary(
        layer=layer,
        key_absmax=(3.0, 4.0),
        value_absmax=(1.0, 2.0),
        key_error=0.0077,
        value_error=0.0066,
        k_scale=0.0089,
        v_scale=0.0045,
    )
    for layer in range(2)
)


@pytest.fixture(scope="module")
def summary(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationSummary:
    """Of a real model: kept roles, shared experts, held-out text, decisions for both forms of output."""
    values = load_recipe("w8a8").model_dump()
    values["calibration"] |= {"samples": 6, "seq_len": 72, "held_out": 3}
    values |= {"auto_keep": {"kl": 0.001, "max_share": 0.3}, "auto_group": {"kl": 0.001}}
    values["rules"] = [{"match": "*", "scheme": "keep", "reason": "less to decide", "layers": [0, 1, 2, 3]}]
    with pytest.MonkeyPatch.context() as patch:  # the page is drawn once, by `report`
        patch.setattr(calibration, "render", lambda _summary: "")
        return calibrate(deepseek, tmp_path_factory.mktemp("report") / "out", validated(values, "test"))


@pytest.fixture(scope="module")
def report(summary: CalibrationSummary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(summary.model_copy(update={"methods": METHODS, "kv_cache": CACHE})), encoding="utf-8")
    return path


def test_in_a_browser(report: Path, browser: Browser) -> None:
    check_report(browser, report, "Clipping between kinds of text", "不同类别文本之间的截断")
    chinese = browser.open(report, language="zh").text
    assert "词元数 / 平均值" in chinese  # a label of a plot
    assert "tokens / even share" not in chinese
    assert "Decisions" in browser.open(report).text
    assert "留出文本" in chinese


def test_numbers_are_those_of_the_summary(summary: CalibrationSummary, report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    worst = max((row for row in summary.gemms if row.quantized), key=lambda row: row.token_error)
    assert f"<code>{worst.name}</code>" in page
    assert f"{worst.token_error:.2%}" in page
    held_out, decisions = summary.held_out, summary.decisions
    assert held_out is not None
    assert decisions is not None
    for stream, by_kind in held_out.kl.items():
        for kind, kl in by_kind.items():
            assert f">{1000 * kl:.2f}<" in page  # one sample of each kind: no standard error
            assert f"{held_out.perplexity[stream][kind]:.3f}" in page
    for shown in ("2.13%", "1.51%", "strength 0.6", "1.62%", "1.31%", "0.77%", "0.0089"):  # 1.62, 1.31: means
        assert shown in page
    exceptions = [row for form in decisions.forms.values() for row in form.exceptions]
    assert exceptions
    for row in exceptions:
        assert f"<code>{row.group}</code>" in page
        assert str(escape(row.reason)) in page


def test_data_cannot_become_markup(summary: CalibrationSummary) -> None:
    gemms = tuple(row for row in summary.gemms if row.role == "attn.o")
    changes = {"model_type": "<script>x</script>", "warnings": ("<b>{0}</b>",), "gemms": gemms, "clipping": ()}
    page = render(summary.model_copy(update=changes))
    assert "<script>x" not in page
    assert "&lt;b&gt;{0}&lt;/b&gt;" in page
