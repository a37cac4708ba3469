"""SmolLM2 without calibration: transformers and compressed-tensors load our checkpoint as it is, and it stays good.

The full figures come from tests/bench/part1.py; here each kind of text gets one window, so the bound is the project's
plus three standard deviations over windows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit_instruments.perplexity import change, window_losses
from quantkit_runtime import device as devices
from quantkit_runtime.graft import load_model
from tests.acceptance.conftest import MODELS, cli, succeeded
from tests.bench.part1 import BOUNDS, held_out, in_transformers

SMOLLM2 = MODELS / "smollm2-135m"
WINDOWS = 1
SPREAD = 1.5
"""Percent: standard deviation over windows of the change by W8A8 (0.95 to 1.4 by kind)."""


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert (SMOLLM2 / "config.json").is_file(), "run `make smollm2` first"
    out = tmp_path_factory.mktemp("smollm2") / "int8"
    succeeded(cli("convert", SMOLLM2, "-o", out, "--recipe", "w8a8-rotate"))
    return out


def test_perplexity_and_integers(int8: Path) -> None:
    source, quantized = in_transformers(SMOLLM2), in_transformers(int8)
    linears = {name: part for name, part in quantized.named_modules() if isinstance(part, torch.nn.Linear)}
    stored = {name for name, part in linears.items() if part.weight.dtype == torch.int8}
    assert stored == {name for name in linears if name != "lm_head"}
    for kind, tokens in held_out(SMOLLM2, WINDOWS).items():
        percent, _ = change(window_losses(source, tokens), window_losses(quantized, tokens))
        assert percent < BOUNDS[kind] + 3 * SPREAD / WINDOWS**0.5, kind


def test_our_runtime_agrees_with_transformers(int8: Path) -> None:
    """Hidden states of both, with compressed-tensors' activation scale (absmax / 127.5) replaced by absmax / 127.

    The first layer is equal up to float32. Later a value next to a rounding boundary falls on its other side,
    and the difference grows, so at the end only the distances from the source can be compared.
    """
    tokens = held_out(SMOLLM2, 1)["english"][:, :64]
    source, theirs = in_transformers(SMOLLM2), in_transformers(int8)
    ours = load_model(int8, devices.resolve("cpu"), torch.float32).model
    with torch.no_grad():
        theirs(input_ids=tokens[:, :2])  # decompresses the weights
        for part in theirs.modules():
            if hasattr(part, "quantization_scheme"):
                part.quantization_enabled = False
                part.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
        got, want, exact = (part(input_ids=tokens, output_hidden_states=True) for part in (ours, theirs, source))
    assert distance(got.hidden_states[1], want.hidden_states[1]) < 1e-5
    assert distance(got.logits, exact.logits) < 1.5 * distance(want.logits, exact.logits)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x / scale), -127, 127) * scale
