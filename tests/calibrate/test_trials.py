"""Held-out text: the streams against the converted model in the runtime, decisions, and what convert makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from quantkit.archs.modeling import load_tokenizer
from quantkit.calibrate.data import draw
from quantkit.calibrate.run import calibrate
from quantkit.calibrate.scores import POSITIONS
from quantkit.convert.parts import Part, merge_manifest, prepare_recorded, run_part
from quantkit.convert.run import convert, prepare
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import read_summary
from tests.calibrate.conftest import small_recipe

pytestmark = pytest.mark.usefixtures("no_plots")


def deciding(**tables: Any) -> Recipe:
    """The default recipe with budgets and little text."""
    return Recipe.model_validate({**small_recipe(held_out=6).model_dump(), **tables})


KEEPING = deciding(auto_keep={"kl": 0.004, "max_share": 0.3, "never": ["attn.o"]}, auto_group={"kl": 0.006})


@pytest.fixture(scope="module")
def decided(minimax: Path, no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("decided") / "out"
    calibrate(minimax, out, KEEPING)
    return out


def whole_model_kl(source: Path, converted: Path, recipe: Recipe) -> dict[str, float]:
    """KL divergence on the held-out samples, by whole models in memory: transformers' and quantkit-runtime's."""
    from transformers import AutoModelForCausalLM

    from quantkit_runtime.device import resolve
    from quantkit_runtime.graft import load_model

    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ours = load_model(converted, resolve("cpu"), torch.float32, verify=False).model.eval()
    found: dict[str, list[float]] = {}
    for sample in draw(load_tokenizer(source), recipe.calibration)[1].samples:
        where = np.rint(np.linspace(0, len(sample.ids) - 1, min(POSITIONS, len(sample.ids)))).astype(int)
        with torch.no_grad():
            log_p, log_q = (
                model(input_ids=sample.ids[None], use_cache=False).logits[0, where].double().log_softmax(-1)
                for model in (plain, ours)
            )
        found.setdefault(sample.kind, []).append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    return {kind: float(np.mean(values)) for kind, values in found.items()}


LAST_EXPERTS = [
    {"match": "*", "scheme": "keep", "reason": "a test", "layers": [0, 1, 2, 3, 4]},
    {"match": "attn.*", "scheme": "keep", "reason": "a test"},
]


@pytest.mark.parametrize(("rules", "close"), [(LAST_EXPERTS, 1e-3), ([], 0.1)])
def test_divergence_is_that_of_the_converted_model(
    rules: list[Any], close: float, minimax: Path, tmp_path: Path
) -> None:
    """Where no router follows, but for float32 logarithms; else a tie may send a token to another expert."""
    recipe = deciding(rules=rules)
    summary = calibrate(minimax, tmp_path / "calibration", recipe)
    convert(minimax, tmp_path / "out", recipe, calibration=tmp_path / "calibration")
    assert summary.held_out is not None
    wanted = whole_model_kl(minimax, tmp_path / "out", recipe)
    assert summary.held_out.kl["all"] == pytest.approx(wanted, rel=close)
    assert summary.held_out.routing["all"].keys() == summary.held_out.routing["bf16"].keys() == set(range(6))
    assert all(0.9 < share <= 1 for share in summary.held_out.routing["all"].values())


def test_bf16_is_the_yardstick(decided: Path) -> None:
    """The source in BF16 differs from itself in float32, but less than the quantized model."""
    held_out = read_summary(decided).held_out
    assert held_out is not None
    assert 0 < np.mean([*held_out.kl["bf16"].values()]) < np.mean([*held_out.kl["checkpoint"].values()])
    assert all(
        0 < error < other
        for error, other in zip(held_out.layer_error["bf16"], held_out.layer_error["checkpoint"], strict=True)
    )


def test_exceptions_meet_the_prediction_and_have_reasons(decided: Path) -> None:
    found = read_summary(decided).decisions
    assert found is not None
    assert found.forms.keys() == {"checkpoint", "sharded"}
    for form in found.forms.values():
        assert form.exceptions
        assert form.kept_share <= 0.3
        assert not [row for row in form.exceptions if row.roles == ("attn.o",) and row.scheme == "keep"]
        assert all("of the error that reaches the output" in row.reason for row in form.exceptions)
        assert form.measured_kl.keys() == form.predicted_kl.keys() == found.measured_kl.keys()
        assert np.mean([*form.measured_kl.values()]) < np.mean([*found.measured_kl.values()])
    assert {row.scheme for row in found.forms["checkpoint"].exceptions} == {"keep"}
    for kind in found.measured_kl:
        assert sum(group.share["w8a8"][kind] for group in found.groups) == pytest.approx(1)


def test_checkpoint_form_keeps_what_was_decided(decided: Path, minimax: Path, tmp_path: Path) -> None:
    manifest = convert(minimax, tmp_path / "out", KEEPING, calibration=decided)
    decisions = read_summary(decided).decisions
    assert decisions is not None
    kept = {(row.layer, role) for row in decisions.forms["checkpoint"].exceptions for role in row.roles}
    wanted = {(t.layer, t.role): "keep" if (t.layer, t.role) in kept else "w8a8" for t in gemms(manifest)}
    assert {(t.layer, t.role): t.scheme for t in gemms(manifest)} == wanted
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    for layer, role in kept & {(layer, f"attn.{part}") for layer in range(6) for part in "qkv"}:
        module = f"model.layers.{layer}.self_attn.{role[-1]}_proj"
        assert module in ignore
        assert f"{module}.weight_scale" not in names
    reasons = {rule["reason"] for rule in manifest.recipe["rules"]}  # type: ignore[attr-defined]
    assert reasons == {row.reason for row in decisions.forms["checkpoint"].exceptions}
    assert not [row for check in verify(tmp_path / "out", source=minimax).checks for row in check.failures]
    again = convert(tmp_path / "out", tmp_path / "shards", KEEPING, form="sharded")
    assert {t.scheme for t in gemms(again)} == {"w8a8", "keep"}


def gemms(manifest: Any) -> list[Any]:
    roles = ("attn.q", "attn.k", "attn.v", "attn.o", "expert.gate", "expert.up", "expert.down", "attn.qkv")
    return [t for t in manifest.tensors if t.part == "weight" and t.role in (*roles, "expert.gate_up")]


def test_shards_have_groups_where_decided(decided: Path, minimax: Path, tmp_path: Path) -> None:
    manifest = convert(minimax, tmp_path / "out", KEEPING, calibration=decided, form="sharded")
    decisions = read_summary(decided).decisions
    assert decisions is not None
    wanted = {row.scheme for row in decisions.forms["sharded"].exceptions} | {"w8a8"}
    assert {t.scheme for t in gemms(manifest)} == wanted
    assert "w8a8-group128" in wanted


def test_parts_of_several_machines_apply_the_decisions(decided: Path, minimax: Path, tmp_path: Path) -> None:
    planned = prepare(minimax, KEEPING, calibration=decided)
    run_part(planned, tmp_path / "out", Part(1, 1), jobs=1)
    manifest = merge_manifest(prepare_recorded(tmp_path / "out", minimax, calibration=decided), tmp_path / "out")
    assert manifest == convert(minimax, tmp_path / "alone", KEEPING, calibration=decided)


def test_decisions_are_on_the_weights_as_methods_left_them(minimax: Path, tmp_path: Path) -> None:
    """Rotation, smoothing, GPTQ, then decisions: shards hold groups, kept GEMMs and codes of the calibration."""
    recipe = small_recipe("w8a8-best-shards", samples=12, seq_len=32)
    summary = calibrate(minimax, tmp_path / "calibration", recipe)
    assert summary.decisions is not None
    assert summary.decisions.forms["sharded"].exceptions
    manifest = convert(minimax, tmp_path / "out", recipe, calibration=tmp_path / "calibration", form="sharded")
    kept = {(row.layer, row.scheme) for row in summary.decisions.forms["sharded"].exceptions}
    assert kept <= {(tensor.layer, tensor.scheme) for tensor in gemms(manifest)}
    report = verify(tmp_path / "out", source=minimax, calibration=tmp_path / "calibration")
    assert not [failure for check in report.checks for failure in check.failures]


def test_a_recipe_that_decides_needs_its_calibration(minimax: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves exceptions to a calibration"):
        convert(minimax, tmp_path / "out", KEEPING)
    with pytest.raises(UsageError, match="decide on held-out text"):
        calibrate(
            minimax,
            tmp_path / "calibration",
            deciding(auto_keep={"kl": 0.1}).model_copy(
                update={"calibration": KEEPING.calibration.model_copy(update={"held_out": 0})}
            ),
        )


def test_groups_alone_have_no_checkpoint_form(decided: Path, minimax: Path, tmp_path: Path) -> None:
    """An artifact as a recipe without `auto_keep` leaves it."""
    recipe = KEEPING.model_copy(update={"auto_keep": None})
    shutil.copytree(decided, tmp_path / "calibration")
    path = tmp_path / "calibration" / "calibration.json"
    values = json.loads(path.read_bytes())
    values["recipe"] = recipe.model_dump(mode="json")
    del values["decisions"]["forms"]["checkpoint"]
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match="no decisions for the checkpoint form"):
        convert(minimax, tmp_path / "out", recipe, calibration=tmp_path / "calibration")
    assert convert(minimax, tmp_path / "out", recipe, calibration=tmp_path / "calibration", form="sharded").tensors


def test_same_decisions_for_any_jobs_and_after_a_stop(
    decided: Path, minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.calibrate import trial

    original, calls = trial._save, []

    def save(*args: Any) -> None:
        original(*args)
        calls.append(args[0].name)
        if len(calls) in (2, 9):
            raise KeyboardInterrupt

    monkeypatch.setattr(trial, "_save", save)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            calibrate(minimax, tmp_path / "out", KEEPING, jobs=1)
    calibrate(minimax, tmp_path / "out", KEEPING, jobs=3)
    assert len(calls) == 12, "layers that were done were done again"
    assert (tmp_path / "out" / "calibration.json").read_bytes() == (decided / "calibration.json").read_bytes()
