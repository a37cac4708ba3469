"""Triton's kernels compiled for AMD cards that are not there: matrix instructions in int8, and no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("gfx942", "gfx90a", "gfx908")

Facts = dict[str, dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def compiled(needs_triton: None, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),  # a cached result would test nothing
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime"))),
    }
    command = [sys.executable, "-m", "tests.runtime.kernels.ahead_of_time", *TARGETS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Facts = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_products_use_the_int8_matrix_instructions(compiled: Facts, target: str) -> None:
    products = {name: facts for name, facts in compiled[target].items() if name == "paged_decode" or "gemm" in name}
    assert len(products) == 6
    for name, facts in products.items():
        assert facts["mfma_i32"] >= 4, name
        assert facts["wide_loads"] >= 2, name


@pytest.mark.parametrize("target", TARGETS)
def test_prefill_attention_uses_the_matrix_instructions(compiled: Facts, target: str) -> None:
    """Two products, each for the keys that all queries see and for those that some do."""
    products = {name: facts for name, facts in compiled[target].items() if name.startswith("paged_prefill")}
    assert len(products) == 3
    for name, facts in products.items():
        assert facts["mfma_f32"] >= 8, name
        assert facts["wide_loads"] >= 2, name


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_to_memory(compiled: Facts, target: str) -> None:
    memory = {name: (facts["spills"], facts["scratch_bytes"]) for name, facts in compiled[target].items()}
    assert set(memory.values()) == {(0, 0)}, memory
