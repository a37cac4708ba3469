"""The HIP source: machine code for AMD cards by hipcc, and its arithmetic on the CPU at both wave sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quantkit.errors import UsageError
from quantkit_runtime.kernels import build, reference
from quantkit_runtime.kernels.gemv import Gemv
from quantkit_runtime.kernels.tuning import Streaming
from tests.runtime.kernels import cases

SHAPES = [Streaming(2, 64, 1), Streaming(4, 256, 2), Streaming(8, 64, 1)]


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gemv]:
    """The source as a CPU compiler builds it, by wave size."""
    folder = tmp_path_factory.mktemp("shim")
    return {wave: Gemv(build.library("cpu", wave, folder), compute_units=3) for wave in ("64", "32")}


@pytest.mark.parametrize("arch", ["gfx906", "gfx908", "gfx90a"])
def test_machine_code_has_dot4_and_no_spills(hipcc: str, arch: str) -> None:
    text = build.assembly(arch)
    kernels = re.findall(r"^\s+\.name:\s+(\S+gemv\S+)$", text, re.MULTILINE)
    assert len(kernels) == 23
    assert len(re.findall(r"v_dot4c?_i32_i8", text)) >= 4 * len(kernels)
    assert re.findall(r"\.[sv]gpr_spill_count: +(\d+)", text) == ["0"] * 2 * len(kernels)
    assert len(re.findall(r"global_load_dwordx4", text)) >= 3 * len(kernels)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("n", "k", "group"), [(5, 16, 0), (21, 2064, 0), (9, 2064, 16), (7, 512, 128)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("wave", ["64", "32"])
def test_gemv(shims: dict[str, Gemv], wave: str, tokens: int, n: int, k: int, group: int, shape: Streaming) -> None:
    x, w = cases.int8(0, tokens, k), cases.int8(1, n, k)
    x_scale, w_scale = cases.positive(2, tokens, k // group if group else 1), cases.positive(3, n, 1)
    bias = cases.normal(4, n).bfloat16() if tokens == 3 else None
    want = reference.w8a8_gemm(x, x_scale, w, w_scale, bias, torch.float32)
    out = torch.full((tokens, n), torch.nan)
    got = shims[wave](x, x_scale, w, w_scale, bias, out, shape=shape)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("wave", ["64", "32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemv_quantizes_a_float_row_bit_for_bit(
    shims: dict[str, Gemv], wave: str, dtype: torch.dtype, shape: Streaming
) -> None:
    for k, experts in ((16, 0), (2064, 0), (96, 5)):
        x, w = cases.normal(0, 1, k, dtype=dtype), cases.int8(1, *([experts] if experts else []), 9, k)
        w_scale = cases.positive(3, *w.shape[:-1], 1)
        index = torch.tensor([[4, 0, 5]]) if experts else None
        q, scale = reference.quantize(x)
        if index is None:
            want = reference.w8a8_gemm(q, scale, w, w_scale, None, torch.float32)
        else:
            alignment = reference.align(index, experts, 4)
            want = reference.grouped_gemm(q, scale, w, w_scale, None, alignment, 3, torch.float32)[:2]
        out = torch.full((3 if experts else 1, 9), torch.nan)
        got = shims[wave](x, None, w, w_scale, None, out, None if index is None else index[0], 3, shape=shape)
        assert torch.equal(got[: len(want)], want)


def test_gemv_lets_nan_through(shims: dict[str, Gemv]) -> None:
    x = torch.ones(1, 64)
    x[0, 40] = torch.nan
    out = shims["64"](x, None, cases.int8(1, 4, 64), torch.ones(4, 1), None, torch.zeros(1, 4), shape=SHAPES[0])
    assert bool(out.isnan().all())


@pytest.mark.parametrize("wave", ["64", "32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemv_rounds_to_its_output_as_torch_does(shims: dict[str, Gemv], wave: str, dtype: torch.dtype) -> None:
    x, w = cases.int8(0, 2, 64), cases.int8(1, 33, 64)
    x_scale, w_scale = torch.full((2, 1), 2.0**-5), torch.full((33, 1), 2.0**-5)
    want = reference.w8a8_gemm(x, x_scale, w, w_scale, None, dtype)
    got = shims[wave](x, x_scale, w, w_scale, None, torch.full_like(want, torch.nan), shape=Streaming(4, 64, 1))
    assert torch.equal(got, want)


@pytest.mark.parametrize("wave", ["64", "32"])
@pytest.mark.parametrize("share", [1, 3])
def test_gemv_by_expert_leaves_other_ranks_slots_alone(shims: dict[str, Gemv], wave: str, share: int) -> None:
    tokens, per_token, experts, n, k = 4, 3, 5, 9, 96
    index, _ = cases.routing(0, tokens, per_token, experts, elsewhere=True)
    rows = tokens * per_token // share
    x, w = cases.int8(0, rows, k), cases.int8(1, experts, n, k)
    x_scale, w_scale, bias = cases.positive(2, rows, 1), cases.positive(3, experts, n, 1), cases.normal(4, experts, n)
    alignment = reference.align(index, experts, 4)
    want = reference.grouped_gemm(x, x_scale, w, w_scale, bias, alignment, share, torch.float32)
    flat = index.reshape(-1)
    got = shims[wave](x, x_scale, w, w_scale, bias, torch.full_like(want, 7.0), flat, share, shape=Streaming(4, 128, 1))
    here = (flat >= 0) & (flat < experts)
    torch.testing.assert_close(got[here], want[here], rtol=1e-6, atol=1e-6)
    assert bool((got[~here] == 7.0).all())


def test_what_the_gemv_cannot_do_is_refused(shims: dict[str, Gemv]) -> None:
    x, w, ones = cases.int8(0, 9, 32), cases.int8(1, 4, 32), torch.ones(4, 1)
    shifted = cases.int8(1, 4 * 32 + 1)[1:].view(4, 32)
    with pytest.raises(UsageError, match="tokens 9"):
        shims["64"](x, torch.ones(9, 1), w, ones, None, torch.empty(9, 4), shape=Streaming(4, 64, 1))
    with pytest.raises(UsageError, match="groups 4"):
        shims["64"](x[:1], torch.ones(1, 4), w, ones, None, torch.empty(1, 4), shape=Streaming(4, 64, 1))
    with pytest.raises(UsageError, match="aligned"):
        shims["64"](x[:1], torch.ones(1, 1), shifted, ones, None, torch.empty(1, 4), shape=Streaming(4, 64, 1))


# -------------------------------------------------------------------------------------------------- building


def _stub(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once_per_source_and_card(tmp_path: Path) -> None:
    first = build.library("cpu", "64", tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.library("cpu", "64", tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PATH", "HIPCC", "ROCM_PATH", "ROCM_HOME", "HIP_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(build._HOMES, "hip", ("ROCM_PATH",))
    with pytest.raises(build.BuildError, match="no hipcc"):
        build.library("hip", "gfx928", tmp_path)


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIPCC", _stub(tmp_path, "echo 'gemv.hip:1:2: error: unknown target gfx928' >&2; exit 1"))
    with pytest.raises(build.BuildError, match="unknown target gfx928"):
        build.library("hip", "gfx928", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
