"""From a native format to INT8 in one step: what is written is the rounding of what an independent decoder reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from quantkit.cli import main
from tests.checkpoint.native import CONFIGS, TINY
from tests.checkpoint.test_source_formats import expert_weights, pack, stack, write


@pytest.mark.parametrize("fmt", ["fp8-block", "int-packed", "mxfp4-blocks"])
def test_convert_rounds_the_decoded_weights(tmp_path: Path, fmt: str) -> None:
    tensors = load_file(TINY / "model.safetensors")
    packed, decoded = stack(tensors) if fmt == "mxfp4-blocks" else pack(tensors, expert_weights(tensors), fmt)
    model, out = write(tmp_path / "model", packed, CONFIGS[fmt], files=2), tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(out), "--jobs", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert ("the output is larger than the source" in done.output) is (fmt != "fp8-block")
    found = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, values in decoded.items():
        scale = np.maximum(np.abs(values).max(1, keepdims=True).astype(np.float32) / np.float32(127), 1e-36)
        np.testing.assert_array_equal(found[name.replace(".weight", ".weight_scale")].numpy(), scale)
        wanted = np.clip(np.rint(values / scale), -127, 127).astype(np.int8)
        np.testing.assert_array_equal(found[name].numpy(), wanted)
