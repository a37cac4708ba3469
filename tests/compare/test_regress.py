"""`compare --save` and `quantkit-runtime regress`: what is unchanged passes, another arithmetic is seen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from quantkit.cli import main as toolkit
from quantkit.compare.saved import TOLERANCES, Figure, Tolerance, movements, read_saved
from quantkit.convert.run import convert
from quantkit.host import versions
from quantkit.recipe import load_recipe
from quantkit.spec.manifest import COMPARISON_NAME, read_manifest
from quantkit.spec.mesh import Mesh
from quantkit.spec.tensorfile import read_header
from quantkit_instruments.cli import main as runtime
from quantkit_runtime.kernels import registry

Make = Callable[[str], Path]


def call(*words: object) -> Result:
    done = CliRunner().invoke(runtime, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def compare(folder: Path, *options: object) -> Result:
    return call("compare", folder / "baseline", folder / "out", "--device", "cpu", *options)


@pytest.fixture
def empty(baseline_of: Make, int8: Make, tmp_path: Path) -> Path:
    """A folder with a baseline and a candidate of it."""
    shutil.copytree(baseline_of("llama"), tmp_path / "baseline")
    shutil.copytree(int8("llama"), tmp_path / "out")
    return tmp_path


@pytest.fixture
def folder(empty: Path) -> Path:
    """The same with a saved comparison."""
    done = compare(empty, "--save")
    assert done.exit_code == 0, done.output
    assert f"quantkit-runtime regress {empty / 'out'}" in done.output
    return empty


def scaled(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """From now on the INT8 product is off by this factor."""
    find = registry.find

    def found(op: str, *arguments: Any, **options: Any) -> registry.Kernel:
        kernel = find(op, *arguments, **options)
        if op != "w8a8_gemm":
            return kernel
        return registry.Kernel(kernel.name, lambda *operands: kernel.run(*operands) * factor)

    monkeypatch.setattr(registry, "find", found)


# ---------------------------------------------------------------------------------------------------- figures


def test_what_is_unchanged_passes(folder: Path) -> None:
    done = call("regress", folder / "out", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["changed"] == []
    assert {row["name"].split()[0] for row in report["figures"]} >= {"kl_mean", "layer_error", "head_kl"}
    assert all(row["then"] == row["now"] for row in report["figures"])
    assert any(row["then"] for row in report["figures"])


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_kernel_that_is_off_is_seen_where_limits_do_not_see_it(
    factor: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, factor)
    assert compare(folder).exit_code == 0, "else this test shows nothing"
    done = call("regress", folder / "out")
    assert done.exit_code == 4
    assert "layer_error layers.0: " in done.output
    assert "MOVED" in done.output
    assert "changed since: nothing that is recorded" in done.output


def test_figures_that_improve_are_seen_too(folder: Path) -> None:
    """As when weights run in another arithmetic than the one that was saved."""
    then = read_saved(folder / "out").figures
    better = {
        name: Figure(value=figure.value / 2) if name.startswith("layer_error") else figure
        for name, figure in then.items()
    }
    assert {row.name.split()[0] for row in movements(then, better) if not row.passed} == {"layer_error"}
    assert all(row.passed for row in movements(then, then))
    assert not all(row.passed for row in movements(then, {}))
    unknown = {name: Figure(value=float("nan")) for name in then}
    assert not any(row.passed for row in movements(then, unknown, 1000))
    assert {name.split()[0] for name in then} <= TOLERANCES.keys()


def test_chance_is_allowed_for_by_the_number_of_tokens() -> None:
    tolerance = Tolerance(share=0.05, spread=1.0, floor=0.001)
    assert tolerance.allowed(Figure(value=2.0)) == pytest.approx(2 * 0.05 + 0.001)
    assert tolerance.allowed(Figure(value=-2.0, tokens=400)) == pytest.approx(2 * (0.05 + 1 / 20) + 0.001)


def test_a_changed_weight_is_seen(empty: Path) -> None:
    assert compare(empty, "--save", "--no-verify").exit_code == 0
    (path,) = (empty / "out").glob("*.safetensors")
    tensors = read_header(path).tensors
    at = next(tensors[name] for name in tensors if name.endswith("layers.1.mlp.down_proj.weight_scale"))
    raw = bytearray(path.read_bytes())
    raw[at.start : at.end] = (np.frombuffer(raw[at.start : at.end], "<f4") * np.float32(1.1)).tobytes()
    path.write_bytes(raw)
    done = call("regress", empty / "out")
    assert done.exit_code == 4, done.output
    assert "layer 1: the weight mlp.down is 1.1 times the source" in done.output
    assert compare(empty, "--save").exit_code == 3, "checksums are checked unless they were not when it was saved"


def test_versions_that_changed_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {**versions(), "torch": "9.0.0", "driver": "amdgpu 6.12.12"}
    for module in ("regress", "since"):
        monkeypatch.setattr(f"quantkit_instruments.{module}.versions", lambda: now)
    done = call("regress", folder / "out", "--json")
    assert done.exit_code == 0, "other versions alone are no failure"
    assert [row["name"] for row in json.loads(done.stdout)["changed"]] == ["torch", "driver"]
    scaled(monkeypatch, 1.03)
    assert "changed since: torch, driver" in call("regress", folder / "out").output


# ------------------------------------------------------------------------------------ what doctor and smoke-load say


def test_doctor_and_smoke_load_say_what_changed(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = empty / "out"
    assert "changed" not in {row["check"] for row in json.loads(call("doctor", out, "--json").stdout)["findings"]}
    before = versions()
    monkeypatch.setattr(
        "quantkit_instruments.since.versions", lambda: {**before, "torch": "9.0.0", "kernels": "f" * 64}
    )
    said = f"kernels {before['kernels'][:12]}, now {'f' * 12}; torch {before['torch']}, now 9.0.0"
    done = call("doctor", out)
    assert f"since the conversion: {said}" in done.output
    assert f"next: quantkit-runtime compare BASELINE {out} --save" in done.output
    done = call("smoke-load", out, "--device", "cpu", "--max-new-tokens", 1)
    assert done.exit_code == 0, done.output
    assert f"note: since the conversion: {said}" in done.output
    monkeypatch.undo()
    assert compare(empty, "--save").exit_code == 0
    monkeypatch.setattr("quantkit_instruments.since.versions", lambda: {**before, "driver": "amdgpu 7"})
    report = json.loads(call("smoke-load", out, "--device", "cpu", "--max-new-tokens", 1, "--json").stdout)
    assert [row["event"] for row in report["changed_since"]] == ["the conversion", "the saved comparison"]
    assert {row["command"] for row in report["changed_since"]} == {f"quantkit-runtime regress {out}"}


def test_shards_of_several_ranks_are_merged_to_be_compared(
    empty: Path, source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison runs in one process, so the command that is shown makes one folder of them first."""
    shards, whole = empty / "shards of 2", empty / "whole"
    convert(source("llama"), shards, load_recipe("w8a8"), form="sharded", mesh=Mesh(tp=2), jobs=1)
    before = versions()
    monkeypatch.setattr("quantkit_instruments.since.versions", lambda: {**before, "torch": "9.0.0"})
    found = json.loads(call("doctor", shards, "--json").stdout)["findings"][-1]["remedy"]
    assert found == f"quantkit merge '{shards}' -o WHOLE && quantkit-runtime compare BASELINE WHOLE --save"
    places = {"WHOLE": str(whole), "BASELINE": str(empty / "baseline")}
    merging, comparing = (
        [places.get(word, word) for word in shlex.split(command)[1:]] for command in found.split(" && ")
    )
    assert CliRunner().invoke(toolkit, merging).exit_code == 0
    assert call(*comparing, "--device", "cpu").exit_code == 0


# -------------------------------------------------------------------------------------------------- the saved file


def test_it_belongs_to_the_folder_and_to_nothing_made_of_it(folder: Path) -> None:
    text = (folder / "out" / COMPARISON_NAME).read_text()
    assert str(folder) not in text
    verified = CliRunner().invoke(toolkit, ["verify", str(folder / "out")])
    assert verified.exit_code == 0, verified.output
    manifest = convert(folder / "out", folder / "again", load_recipe("w8a8"), form="sharded", jobs=1)
    assert not (folder / "again" / COMPARISON_NAME).exists()
    assert COMPARISON_NAME in {row.name for row in manifest.dropped}
    assert read_saved(folder / "out").candidate_digest == read_manifest(folder / "out/quantkit_manifest.json").digest


def test_a_save_that_is_killed_leaves_the_last_one_and_the_folder_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before = folder / "out", (folder / "out" / COMPARISON_NAME).read_bytes()
    process = os.fork()
    if process == 0:
        monkeypatch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        compare(folder, "--save")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in out.glob("*.quantkit-tmp")] == [f".{COMPARISON_NAME}.quantkit-tmp"]
    assert (out / COMPARISON_NAME).read_bytes() == before
    assert CliRunner().invoke(toolkit, ["verify", str(out)]).exit_code == 0
    manifest = convert(out, folder / "again", load_recipe("w8a8"), jobs=1)
    assert not list((folder / "again").glob(".*.quantkit-tmp"))
    assert f".{COMPARISON_NAME}.quantkit-tmp" in {row.name for row in manifest.dropped}
    (out / ".config.json.quantkit-tmp").touch()
    assert CliRunner().invoke(toolkit, ["verify", str(out)]).exit_code == 4, "of anything else it is a finding"


def test_another_candidate_or_baseline_is_refused(folder: Path, baseline_of: Make, source: Make) -> None:
    (folder / "baseline").rename(folder / "moved")
    done = call("regress", folder / "out")
    assert done.exit_code == 2
    assert "--baseline" in done.output
    assert call("regress", folder / "out", "--baseline", folder / "moved").exit_code == 0
    done = call("regress", folder / "out", "--baseline", baseline_of("tiny-minimax-m2"))
    assert done.exit_code == 3
    assert "is not the baseline of the saved comparison" in done.output
    convert(source("llama"), folder / "other", load_recipe("bf16"), jobs=1)
    shutil.copy(folder / "out" / COMPARISON_NAME, folder / "other")
    done = call("regress", folder / "other", "--baseline", folder / "moved")
    assert done.exit_code == 3
    assert "was converted again" in done.output
    for command in (("doctor", folder / "other"), ("smoke-load", folder / "other", "--device", "cpu")):
        done = call(*command)
        assert done.exit_code == 0, done.output
        said = "since the saved comparison: it is of another conversion: copied from another folder"
        assert said in " ".join(done.output.split())
        assert "quantkit-runtime regress" not in done.output
    assert "another conversion" not in call("doctor", folder / "out").output


def test_it_runs_where_it_was_saved_or_says_on_what_that_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "out"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call("compare", folder / "baseline", out, "--save").exit_code == 0
    saved = read_saved(out)
    assert saved.device == "cpu", "also where a card is there when it is run again"
    on_a_card = saved.model_copy(update={"device": "cuda", "facts": {**saved.facts, "device": "NVIDIA H200"}})
    (out / COMPARISON_NAME).write_bytes(on_a_card.sealed())
    done = call("regress", out)
    assert done.exit_code == 2
    assert f"the comparison in {out} was saved on cuda (NVIDIA H200)" in done.output
    assert f"quantkit-runtime compare {folder / 'baseline'} {out} --save" in done.output
    assert "--device" not in done.output, "regress has no such option"


def test_a_changed_or_missing_file_is_refused(folder: Path) -> None:
    path = folder / "out" / COMPARISON_NAME
    whole = path.read_text()
    for broken in (whole.replace('"dtype": "float32"', '"dtype": "bfloat16"'), whole[:100], "[]", ""):
        assert broken != whole
        path.write_text(broken)
        done = call("regress", folder / "out")
        assert done.exit_code == 3, done.output
        assert "--save" in done.output
        assert "--save" in call("doctor", folder / "out").output
    path.unlink()
    done = call("regress", folder / "out")
    assert done.exit_code == 2
    assert "--save" in done.output


def test_only_what_passed_and_can_be_identified_is_saved(empty: Path, source: Make) -> None:
    (empty / "limits.yaml").write_text("int8: {kl_mean: 1.0e-9}\n")
    assert compare(empty, "--save", "--limits", empty / "limits.yaml").exit_code == 4
    assert not (empty / "out" / COMPARISON_NAME).exists()
    done = call("compare", empty / "baseline", source("llama"), "--save")
    assert done.exit_code == 2
    assert "has no manifest" in done.output
    (empty / "out" / COMPARISON_NAME).mkdir()
    done = compare(empty, "--save")
    assert (done.exit_code, "is in the way" in done.output, "KL mean" in done.output) == (2, True, False), "at once"
    (empty / "out" / COMPARISON_NAME).rmdir()
    (empty / "limits.yaml").write_text("int8: {kl_mean: 0.5}\n")
    assert compare(empty, "--save", "--limits", empty / "limits.yaml").exit_code == 0
    assert read_saved(empty / "out").limits.kl_mean == 0.5, "and a rerun keeps to them"


def test_a_saved_name_that_no_folder_can_have(folder: Path) -> None:
    path = folder / "out" / COMPARISON_NAME
    path.write_bytes(read_saved(folder / "out").model_copy(update={"baseline": "b" * 300}).sealed())
    done = call("regress", folder / "out")
    assert done.exit_code == 2, done.output
    assert "the baseline of the saved comparison is not at" in done.output
    again = call("regress", folder / "out", "--baseline", folder / "baseline")
    assert again.exit_code == 0, again.output
