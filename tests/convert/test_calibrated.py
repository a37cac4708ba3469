"""Scales of a calibration artifact: used where they are given, refused where they do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.reader import Source
from quantkit.convert.parts import Part, merge_manifest, prepare_recorded, run_part
from quantkit.convert.run import convert, prepare
from quantkit.convert.verify import verify
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import SCALES_NAME, SUMMARY_NAME, CalibrationSummary
from quantkit.spec.files import file_sha256
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import ref_int8, tensors, tree

_ROLES = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
}
_EXPERTS = {"w1": "expert.gate", "w3": "expert.up", "w2": "expert.down"}


def key_name(name: str) -> str:
    """`layers.3.expert.gate.7` of a disk name, written out here instead of parsed by the code under test."""
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer
    expert = re.search(r"experts\.(\d+)\.(w\d)\.", name)
    if expert:
        return f"layers.{layer[1]}.{_EXPERTS[expert[2]]}.{expert[1]}"
    return f"layers.{layer[1]}.{next(role for part, role in _ROLES.items() if part in name)}"


def quantized_names(source: dict[str, Tensor]) -> list[str]:
    return [name for name in source if re.search(r"experts\.\d+\.w|self_attn\.[qkvo]_proj", name)]


@pytest.fixture
def artifact(minimax: Path, tmp_path: Path, w8a8: Recipe) -> Callable[..., Path]:
    """An artifact whose scales are `factor` of those of the weights alone."""

    def make(factor: float = 0.75, drop: str = "", **changes: Any) -> Path:
        folder = tmp_path / "calibration"
        folder.mkdir()
        source = tensors(minimax)
        scales = {
            f"{key_name(name)}.weight_scale": torch.from_numpy(ref_int8(source[name])[1]) * factor
            for name in quantized_names(source)
        }
        scales.pop(drop, None)
        save_file(scales, folder / SCALES_NAME)
        fields: dict[str, Any] = {
            "tool_version": "0",
            "recipe": w8a8.model_dump(mode="json"),
            "architecture": "minimax_m2",
            "model_type": "minimax_m2",
            "source_digest": Source(minimax).digest(),
            "samples": (),
            "tokens": 0,
            "expected_gemms": 0,
            "observed_gemms": 0,
            "gemms": (),
            "expert_tokens": {},
            "files": {SCALES_NAME: file_sha256(folder / SCALES_NAME)},
        }
        summary = CalibrationSummary.model_validate({**fields, **changes})
        (folder / SUMMARY_NAME).write_text(summary.model_dump_json())
        return folder

    return make


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_scales_are_those_of_the_artifact(
    form: str, artifact: Callable[..., Path], minimax: Path, tmp_path: Path, w8a8: Recipe
) -> None:
    mesh = Mesh(tp=2) if form == "sharded" else None
    manifest = convert(minimax, tmp_path / "out", w8a8, calibration=artifact(), form=form, mesh=mesh, jobs=1)  # type: ignore[arg-type]
    assert manifest.calibration_digest
    report = verify(tmp_path / "out", source=minimax)
    assert report.passed, report.failures
    assert any("clipped by the calibration's scales" in check.note for check in report.checks)
    if form == "checkpoint":
        source, result = tensors(minimax), load_file(tmp_path / "out/model.safetensors")
        for name in quantized_names(source):
            w = source[name].float().numpy()
            scale = ref_int8(source[name])[1] * np.float32(0.75)
            np.testing.assert_array_equal(result[name.replace(".weight", ".weight_scale")].numpy(), scale)
            np.testing.assert_array_equal(result[name].numpy(), np.clip(np.rint(w / scale), -127, 127).astype(np.int8))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"source_digest": "0" * 64}, "calibrated on another source"),
        ({"recipe": {"name": "other"}}, "calibrated with another recipe"),
        ({"drop": "layers.2.expert.up.9.weight_scale"}, "no scales for layers.2.expert.up.9.weight"),
        ({"factor": 0.0}, "is not positive and finite"),
        ({"factor": float("nan")}, "is not positive and finite"),
    ],
)
def test_artifacts_that_do_not_fit(
    changes: dict[str, Any], match: str, artifact: Callable[..., Path], minimax: Path, tmp_path: Path, w8a8: Recipe
) -> None:
    with pytest.raises(QuantkitError) as caught:
        convert(minimax, tmp_path / "out", w8a8, calibration=artifact(**changes), jobs=1)
    assert match in str(caught.value)
    assert not (tmp_path / "out/quantkit_manifest.json").exists()


def test_prose_of_a_recipe_decides_nothing(
    artifact: Callable[..., Path], minimax: Path, tmp_path: Path, w8a8: Recipe
) -> None:
    """A corrected description, another name or reason: the calibration still fits."""
    rule = {"match": "attn.o", "scheme": "w8a8", "reason": "one"}
    there = {**w8a8.model_dump(mode="json"), "rules": [rule]}
    now = {**there, "name": "mine", "description": "Corrected.", "rules": [{**rule, "reason": "another"}]}
    recipe = Recipe.model_validate(now)
    assert prepare(minimax, recipe, calibration=artifact(recipe=there)).calibration_digest


def test_an_unfinished_artifact(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    (tmp_path / "calibration").mkdir()
    with pytest.raises(QuantkitError, match="no finished calibration"):
        convert(minimax, tmp_path / "out", w8a8, calibration=tmp_path / "calibration", jobs=1)


def test_in_parts(minimax: Path, tmp_path: Path, w8a8: Recipe, artifact: Callable[..., Path]) -> None:
    """Two machines with an artifact make what one makes; the end needs the same artifact."""
    calibration, out = artifact(), tmp_path / "parts"
    planned = prepare(minimax, w8a8, calibration=calibration)
    for number in (1, 2):
        run_part(planned, out, Part(number, 2), jobs=1)
    with pytest.raises(QuantkitError, match="is converted with a calibration"):
        prepare_recorded(out, minimax)
    merge_manifest(prepare_recorded(out, minimax, calibration=calibration), out)
    convert(minimax, tmp_path / "alone", w8a8, calibration=calibration, jobs=1)
    assert tree(out) == tree(tmp_path / "alone")
