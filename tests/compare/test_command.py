"""`quantkit-runtime compare` as it is used: forms, transforms, exit codes, JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.compare.result import Comparison
from quantkit.convert.run import convert
from quantkit.recipe import load_recipe
from quantkit_instruments.cli import main
from quantkit_instruments.compare import Options, run

Make = Callable[[str], Path]


def test_shards_of_one_rank_give_the_figures_of_the_checkpoint(
    baseline_of: Make, source: Make, int8: Make, tmp_path: Path
) -> None:
    convert(source("qwen3_moe"), tmp_path / "shards", load_recipe("w8a8"), form="sharded")
    shards, checkpoint = (
        run(Options(baseline_of("qwen3_moe"), folder, device="cpu"))
        for folder in (tmp_path / "shards", int8("qwen3_moe"))
    )
    assert shards.passed
    assert shards.candidate["form"] == "sharded"
    assert (shards.kinds, shards.layers) == (checkpoint.kinds, checkpoint.layers)


def test_rotated_weights_are_compared_in_their_own_basis(baseline_of: Make, source: Make, tmp_path: Path) -> None:
    convert(source("tiny-deepseek-v3"), tmp_path / "out", load_recipe("w8a8-rotate"))
    result = run(Options(baseline_of("tiny-deepseek-v3"), tmp_path / "out", device="cpu"))
    assert result.passed
    assert "rotate_residual" in result.candidate["transforms"]
    assert "transforms" in result.notes
    assert all(0 < row.error < 0.1 for row in result.layers)
    assert result.operators == ()


def test_a_fact_is_retrieved_from_the_long_text(baseline_of: Make, int8: Make) -> None:
    """The trained mixture copies what stands before: with the fact its answer is likelier, INT8 or not."""
    result = run(Options(baseline_of("tiny-minimax-m2"), int8("tiny-minimax-m2"), device="cpu", verify=False))
    places = {row.name: row for row in result.needles}
    assert set(places) == {"nowhere", "start", "middle", "end"}
    assert places["end"].source > places["nowhere"].source + 1
    assert places["end"].candidate > places["nowhere"].candidate + 1


def test_exit_codes_json_and_report(baseline_of: Make, source: Make, int8: Make, tmp_path: Path) -> None:
    words = ["compare", str(baseline_of("llama")), str(int8("llama")), "--device", "cpu"]
    done = CliRunner().invoke(main, [*words, "--json", "--report", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    result = Comparison.model_validate(json.loads(done.stdout))
    assert result.passed
    assert "<title>Comparison of llama</title>" in (tmp_path / "report.html").read_text()
    (tmp_path / "limits.yaml").write_text("int8: {kl_mean: 1.0e-9}\n")
    failed = CliRunner().invoke(main, [*words, "--limits", str(tmp_path / "limits.yaml")])
    assert failed.exit_code == 4
    assert "kl_mean is" in failed.output
    other = CliRunner().invoke(main, ["compare", str(baseline_of("llama")), str(source("tiny-minimax-m2"))])
    assert other.exit_code == 3
    assert "the candidate has 6 layers, the baseline's source 3" in other.output


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_no_baseline(what: str, int8: Make, tmp_path: Path) -> None:
    folder = tmp_path / "baseline"
    if what == "file":
        folder.write_text("x")
    done = CliRunner().invoke(main, ["compare", str(folder), str(int8("llama"))])
    assert done.exit_code == 3
    assert "holds no finished baseline" in done.output
    assert "Traceback" not in done.output


def test_a_candidate_without_a_tokenizer(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    shutil.copytree(int8("llama"), tmp_path / "out")
    for path in (tmp_path / "out").glob("tokenizer*"):
        path.unlink()
    result = run(Options(baseline_of("llama"), tmp_path / "out", device="cpu", verify=False))
    assert {row.what for row in result.companions} == {"no_tokenizer", "no_template"}
    assert result.findings == ()


def test_limits_say_where_a_key_belongs(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text("kl_mean: 0.2\n")
    words = ["compare", str(baseline_of("llama")), str(int8("llama")), "--limits", str(tmp_path / "limits.yaml")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "choices: float, int8" in done.output
    assert "int8: {kl_mean: 0.2}" in done.output


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_report_that_cannot_be_written_shows_before_anything_runs(
    parent: str, baseline_of: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    report = tmp_path / parent / "page.html"
    done = CliRunner().invoke(main, ["compare", str(baseline_of("llama")), "not-even-there", "--report", str(report)])
    assert done.exit_code == 2
    assert f"{tmp_path / parent} is not a folder" in done.output
