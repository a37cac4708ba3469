"""Experts that see few tokens: named, fed for statistics only, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantkit.archs import Key
from quantkit.calibrate import final, statistics
from quantkit.calibrate.run import calibrate
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError
from quantkit.spec.calibration import read_summary
from tests.calibrate.conftest import small_recipe
from tests.calibrate.test_run import edited

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def starved(minimax: Path, no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Expert 5 of layer 1 is never chosen."""
    name = "model.layers.1.block_sparse_moe.e_score_correction_bias"

    def starve(tensor: torch.Tensor) -> None:
        tensor[5] = -1e4

    return edited(minimax, tmp_path_factory.mktemp("starved") / "model", name, starve)


def test_all_tokens_are_for_statistics_only(starved: Path, tmp_path: Path) -> None:
    calibrate(starved, tmp_path / "warn", small_recipe(held_out=0))
    calibrate(starved, tmp_path / "fed", small_recipe(held_out=0, starving_experts="all_tokens"))
    warned, fed = read_summary(tmp_path / "warn"), read_summary(tmp_path / "fed")
    rows = {row.name: row for row in fed.gemms}
    down = rows["layers.1.expert.down.5"]
    assert down.tokens == 0
    assert "sent through it for statistics only" in down.fallback
    assert down.absmax > 0
    assert fed.expert_tokens == warned.expert_tokens
    assert [row for row in fed.gemms if row.name not in _of_expert()] == [
        row for row in warned.gemms if row.name not in _of_expert()
    ]
    assert any("sent through them" in warning for warning in fed.warnings)
    assert fed.clipping == warned.clipping


def _of_expert() -> set[str]:
    return {f"layers.1.expert.{part}.5" for part in ("gate", "up", "down")}


def test_statistics_are_those_of_the_rows_sent(starved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters the down projection, computed again in float64 from what entered the layer's experts."""
    kept: dict[str, torch.Tensor] = {}
    original = final.LayerObserver.feed_starving

    def spy(self: final.LayerObserver, layer: torch.nn.Module, min_tokens: int) -> None:
        if "layers.1." in next(iter(self.inputs)):
            kept.update({name: torch.cat(rows) for name, rows in self.entered.items()})
        original(self, layer, min_tokens)

    monkeypatch.setattr(final.LayerObserver, "feed_starving", spy)
    calibrate(starved, tmp_path / "out", small_recipe(held_out=0, starving_experts="all_tokens"))
    (x,) = kept.values()
    source = Source(starved)
    gate, up = (
        x.double().numpy() @ source.get(Key(1, f"expert.{part}", 5)).double().numpy().T for part in ("gate", "up")
    )
    entering = gate / (1 + np.exp(-gate)) * up
    found = load_file(tmp_path / "out" / "activations.safetensors")
    name = "layers.1.expert.down_in.experts"
    np.testing.assert_allclose(found[f"{name}.absmax"][5].numpy(), np.abs(entering).max(0), rtol=1e-4)
    assert int(found[f"{name}.tokens"][5]) == len(x)
    assert int(found[f"{name}.histogram"][5].sum()) == len(x)
    assert len(x) >= 256  # so part of the rows is measured
    assert float(found[f"{name}.square"][5]) == pytest.approx(float((entering**2).sum()), rel=0.03)


def test_starving_experts_can_be_refused(starved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="saw fewer than 1 tokens") as caught:
        calibrate(starved, tmp_path / "out", small_recipe(held_out=0, starving_experts="error"))
    assert set(caught.value.items) == {f"{name}: 0 tokens" for name in _of_expert()}
    assert not (tmp_path / "out" / "calibration.json").exists()


def test_experts_of_which_no_row_was_measured_have_the_errors_of_their_layer(
    minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a large batch, of which part is measured: here one row of each input, for all others."""
    whole = calibrate(minimax, tmp_path / "whole", small_recipe(held_out=0))

    def largest(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return absmax.argmax(keepdims=True), np.float32([len(absmax)])

    monkeypatch.setattr(statistics, "measured_rows", largest)
    summary = calibrate(minimax, tmp_path / "part", small_recipe(held_out=0))
    tensors = load_file(tmp_path / "part" / "activations.safetensors")
    square, error = (tensors[f"layers.1.expert.down_in.experts.{field}"].numpy() for field in ("square", "token_error"))
    rows = [row for row in summary.gemms if row.layer == 1 and row.role == "expert.down" and row.tokens]
    unmeasured = [row for row in rows if square[row.expert] == 0]
    assert 0 < len(unmeasured) < len(rows)
    for row in rows:
        of = slice(None) if row in unmeasured else row.expert
        assert row.token_error == pytest.approx(np.sqrt(error[of].sum() / square[of].sum()))
        assert row.fallback == ("errors: all experts of layer 1" if row in unmeasured else "")
    exact = {row.name: (row.tokens, row.absmax, row.outlier_channels) for row in whole.gemms}
    assert {row.name: (row.tokens, row.absmax, row.outlier_channels) for row in summary.gemms} == exact
    assert summary.warnings == whole.warnings
