"""The instruments themselves: what they report is checked against what is known."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

BENCH = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def scripts_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


class Fixed(nn.Module):
    """A model with given logits, whatever it reads."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.values[None, : input_ids.shape[1]])


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_scores_against_float64():
    import scoring

    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(200, 37, generator=generator) for _ in range(2))
    windows = torch.randint(0, 37, (3, 130), generator=generator)
    base, rows = scoring.score(Fixed(p), {"c": Fixed(q), "same": Fixed(p)}, windows)

    log_p, log_q = log_softmax(p.double().numpy()[:129]), log_softmax(q.double().numpy()[:129])
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    nll = [[-log[np.arange(129), ids[1:]].mean() for ids in windows.numpy()] for log in (log_p, log_q)]
    change = np.subtract(nll[1], nll[0])
    found = scoring.compare(base, rows["c"])
    assert found["kl"] == pytest.approx(kl, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(nll[1])), rel=1e-5)
    assert found["change_percent"] == pytest.approx(100 * math.expm1(change.mean()), rel=1e-4)
    error = 100 * math.exp(change.mean()) * change.std(ddof=1) / math.sqrt(3)
    assert found["change_percent_error"] == pytest.approx(error, rel=1e-4)
    assert scoring.compare(base, rows["same"])["kl"] == 0
    assert scoring.compare(base, rows["same"])["change_percent"] == 0
    assert scoring.kl_difference(rows["same"], rows["c"])[0] == pytest.approx(-kl, rel=1e-5)


def test_peak_memory_counts_children_and_time_counts_waiting():
    import common

    child = "b = bytearray(150_000_000); import time; time.sleep(0.5)"
    code = f"""
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", {child!r}]) for _ in range(2)]
for process in children:
    process.wait()
"""
    found = common.run([sys.executable, "-c", code])
    assert found.processes == 3
    assert 300e6 < found.peak_anon < 450e6
    assert found.peak_rss >= found.peak_anon
    assert found.seconds >= 0.5


def test_failed_commands_stop_a_benchmark():
    import common

    with pytest.raises(SystemExit, match="the reason"):
        common.run([sys.executable, "-c", "raise ValueError('the reason')"])


def test_synthetic_checkpoints_are_deterministic_and_bounded(tmp_path, monkeypatch):
    import synthetic

    small = synthetic.Shape(hidden=64, expert_width=32, experts=3, heads=2, kv_heads=1, head_dim=16, vocab=80)
    monkeypatch.setattr(synthetic, "Shape", lambda: small)
    first, again, other = (
        synthetic.synthetic(tmp_path / name, 200_000, seed=seed, file_bytes=50_000)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    names = sorted(path.name for path in first.iterdir())
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    weights = [name for name in names if name.endswith(".safetensors")]
    assert len(weights) > 2
    assert (first / weights[0]).read_bytes() != (other / weights[0]).read_bytes()
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert abs(index["metadata"]["total_size"] - 200_000) < synthetic.nbytes(small.layer(0))
    for name in weights:
        with safe_open(first / name, "pt") as file:
            for key in file.keys():
                assert index["weight_map"][key] == name
                assert file.get_tensor(key).float().isfinite().all()


def test_bf16_rounding_is_torchs():
    import synthetic

    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(np.frombuffer(synthetic.to_bf16(x), "<u2"), expected)


def test_headers_only_takes_no_space(tmp_path):
    import common
    import synthetic

    root = synthetic.headers_only(tmp_path / "model", layers=2, experts=16)
    files = common.files_under([root])
    assert sum(path.stat().st_size for path in files) > 3_000_000_000
    assert sum(path.stat().st_blocks * 512 for path in files) < 2_000_000


def test_results_hold_no_paths(tmp_path, monkeypatch):
    import common

    monkeypatch.setattr(common, "SCRATCH", tmp_path)
    report = common.Report("harness", True, {})
    report.data["where"] = str(common.ROOT / "x")
    with pytest.raises(SystemExit, match="absolute paths"):
        report.write()


def test_missed_targets_are_marked(capsys):
    import common

    report = common.Report("harness", True, {})
    report.target("ratio", 2.0, 1.5)
    report.target("share", 0.95, 0.9, at_most=False)
    assert [row["met"] for row in report.data["targets"]] == [False, True]
    assert "MISSED" in capsys.readouterr().out


def test_whole_commands_are_compared_and_the_call_stands_beside(tmp_path, monkeypatch, capsys):
    """A peer that says its call took 4 s of a process of 10 s, against ours of 6 s."""
    import accuracy
    import common

    said = json.dumps({"seconds": 4.0, "calibration_tokens": 500})
    measured = common.Measured(10.0, 10.0, 0, 0, 0, 1, f"a line of its own\n{said}\n")
    monkeypatch.setattr(common, "run", lambda command: measured)
    rival = accuracy.peer("smoothquant-gptq", tmp_path, tmp_path, tmp_path / "samples.jsonl", "cpu")
    best = accuracy.Made(accuracy.BEST, tmp_path, ("quantkit-runtime",), 6.0, 2000, 0.2)
    assert (rival.seconds, rival.call_seconds) == (10.0, 4.0)
    assert accuracy.noted(rival) == {"seconds": 10.0, "call_seconds": 4.0, "calibration_tokens": 500, "kept_share": 0.0}
    assert accuracy.noted(best)["call_seconds"] is None
    report = common.Report("harness", True, {})
    accuracy.time_targets(report, best, rival)
    assert [(row["value"], row["met"]) for row in report.data["targets"]] == [(0.6, False), (4.0, True)]
    capsys.readouterr()
    common.table(*accuracy.time_and_text([best, rival]))
    ours, theirs = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert (ours[1], theirs[2:4]) == ("6.0", ["10.0", "4.0"])


def test_candidates_of_an_earlier_run_are_taken_with_their_times(tmp_path):
    """As `made.json` holds them; one of a peer from before whole commands were timed is made again."""
    import accuracy

    ours = accuracy.Made(accuracy.BEST, tmp_path / "best", ("quantkit-runtime",), 6.0, 2000, 0.2)
    peer = accuracy.Made("llmcompressor rtn", tmp_path / "rtn", ("compressed-tensors",), 10.0, 0, call_seconds=4.0)
    for made in (ours, peer):
        made.folder.mkdir()
        (made.folder / "config.json").write_text("{}")
    rows = {made.name: json.loads(json.dumps({**vars(made), "folder": made.folder.name})) for made in (ours, peer)}
    assert [accuracy.made_before(tmp_path, row) for row in rows.values()] == [ours, peer]
    for row in rows.values():
        del row["call_seconds"]
    assert [accuracy.made_before(tmp_path, row) for row in rows.values()] == [ours, None]
    assert accuracy.made_before(tmp_path, {**rows[ours.name], "folder": "gone"}) is None
    assert accuracy.made_before(tmp_path, None) is None


def test_results_of_every_age_are_summed_up(capsys):
    """Those that are committed; none of the older ones has the times of a peer's whole commands."""
    import common
    import summary

    found = summary.results(common.RESULTS)
    rows = summary.targets(found)
    assert "accuracy-smollm2-135m" in found
    summary.show(found, rows)
    assert capsys.readouterr().out.count("\n") > len(rows)


def test_the_summary_says_what_the_results_say(tmp_path, capsys, monkeypatch):
    import common
    import summary

    monkeypatch.setattr(common, "SCRATCH", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    report = common.Report("convert_speed", True, {})
    report.target("ratio", 2.0, 1.5)
    report.target("share", 0.95, 0.9, at_most=False)
    report.target("lost files", 0, 0)
    report.target("found files", 1, 0)
    report.target("difference", -0.5, 0)
    report.data |= {"source_bytes": 10**9, "candidates": {"quantkit": {"compared_seconds": 2.0}}}
    report.write()
    (tmp_path / "results/other.json").write_text('{"no": "targets"}')
    found = summary.results(tmp_path / "results")
    rows = summary.targets(found)
    assert list(found) == ["convert_speed"]
    assert [row.share for row in rows] == [pytest.approx(4 / 3), pytest.approx(0.9 / 0.95), 0.0, 3.0, 0.0]
    capsys.readouterr()
    summary.show(found, rows)
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines()[-7:-2]] == ["MISSED", "met", "met", "MISSED", "met"]
    assert shown.endswith("3 of 5 targets met, 2 missed\n")
    first = {path.name: path.read_bytes() for path in summary.plot(found, rows, tmp_path)}
    assert {path.name: path.read_bytes() for path in summary.plot(found, rows, tmp_path)} == first
    assert list(first) == ["targets.svg", "convert_speed.svg"]
    assert b"lost files (convert_speed)" in first["targets.svg"]
