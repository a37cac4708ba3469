"""What several tests of this folder need."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor


def tree(folder: Path) -> dict[str, str]:
    """Relative name -> sha256 of every file of a result; the work folder does not belong to it."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".quantkit-work" not in path.parts)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, through safetensors' own reader."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def ref_int8(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """INT8 values and float32 scales `[.., N, 1]` by the definition, in numpy."""
    w = weight.float().numpy()
    scale = np.abs(w).max(axis=-1, keepdims=True) / np.float32(127)
    scale = np.maximum(scale, np.finfo(np.float32).tiny * np.float32(127))
    return np.clip(np.rint(w / scale), -127, 127).astype(np.int8), scale.astype(np.float32)


def assert_int8(weight: Tensor, q: Tensor, scale: Tensor) -> None:
    """`q` and `scale` are those of `weight`, and within half a step of it in float64."""
    ref_q, ref_scale = ref_int8(weight)
    np.testing.assert_array_equal(q.numpy(), ref_q)
    np.testing.assert_array_equal(scale.numpy(), ref_scale)
    steps = weight.double().numpy() / scale.double().numpy() - q.double().numpy()
    assert np.abs(steps).max() <= 0.5 + 127 * 2.0**-24
