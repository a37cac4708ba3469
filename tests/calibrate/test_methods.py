"""Methods that learn from text: their mathematics against independent references, and whole runs on small models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.archs import Key
from quantkit.archs.modeling import build_skeleton, load_config, parameter_key, parameter_value, set_tensor
from quantkit.arithmetic import channel_scales, dequantize, quantize, quantize_tokens
from quantkit.calibrate import search as search_module
from quantkit.calibrate.fake_quant import Codes
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.methods import method, view_of
from quantkit.calibrate.methods.clip import RATIOS, clipped_scales
from quantkit.calibrate.methods.gptq import gptq
from quantkit.calibrate.methods.smooth import Group, Norm, expand, output_error, search, smoothing
from quantkit.calibrate.round_weights import NoFactorError, relative_errors, second_moments
from quantkit.calibrate.rounding import rounds_as_found
from quantkit.calibrate.run import calibrate
from quantkit.checkpoint.effects import matrix
from quantkit.checkpoint.reader import Source
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import InputError, UsageError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import ARTIFACT_NAMES, MethodRow, read_summary
from quantkit.spec.manifest import read_manifest
from quantkit.spec.mesh import Mesh
from quantkit.spec.scheme import SCHEMES
from tests.calibrate.conftest import small_recipe

Float = NDArray[np.float64]


def recipe(*methods: dict[str, Any], **options: Any) -> Recipe:
    small = small_recipe(**options)
    return Recipe.model_validate({**small.model_dump(), "methods": methods})


SMOOTH, GPTQ = {"name": "smooth"}, {"name": "gptq", "min_rows": 8}


def correlated(rows: int, k: int, seed: int) -> Tensor:
    """Inputs whose channels hang together, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(k, k, generator=generator) * torch.logspace(0, -2, k)
    return torch.randn(rows, k, generator=generator) @ basis * (1 + 9 * (torch.arange(k) % 7 == 0))


# -------------------------------------------------------------------------------------------------- gptq


def reference_gptq(w: Float, h: Float, scale: Float, damping: float) -> NDArray[np.int64]:
    """Column by column in float64 by the definition: after each column the best continuous values of the rest."""
    order = np.argsort(-np.diag(h), kind="stable")
    damped = (h + damping * np.diag(h).mean() * np.eye(len(h)))[np.ix_(order, order)]
    rest, codes = w[:, order].copy(), np.zeros(w.shape, np.int64)
    for i in range(len(h)):
        codes[:, i] = np.clip(np.rint(rest[:, i] / scale[:, 0]), -127, 127)
        error = rest[:, i] - codes[:, i] * scale[:, 0]
        if i + 1 < len(h):  # what the rest must become so that (change) H (change)^T is least with column i fixed
            solved = np.linalg.solve(damped[i + 1 :, i + 1 :], damped[i + 1 :, i])
            rest[:, i + 1 :] += np.outer(error, solved)
    result = np.empty_like(codes)
    result[:, order] = codes
    return result


@pytest.mark.parametrize(("n", "k"), [(7, 33), (12, 130), (1, 5)])
def test_gptq_is_its_definition(n: int, k: int) -> None:
    x = correlated(4 * k, k, seed=k)
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    h, scale = second_moments(x), channel_scales(w)
    codes, damping = gptq(w, h, scale, 0.01)
    wanted = reference_gptq(w.double().numpy(), h.numpy(), scale.double().numpy(), 0.01)
    assert damping == 0.01
    assert (codes.numpy() == wanted).mean() > 0.99  # float32 against float64: a value on the edge may fall elsewhere
    assert np.abs(codes.numpy() - wanted).max() <= 1


def test_gptq_has_half_the_error_on_channels_that_hang_together() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1024, 12, generator=generator) @ torch.randn(12, 96, generator=generator)  # 12 causes, 96 channels
    x, w = x + 0.05 * torch.randn(1024, 96, generator=generator), torch.randn(48, 96, generator=generator)
    h, scale = second_moments(x), channel_scales(w)
    codes, _ = gptq(w, h, scale, 0.01)
    found = dequantize(codes, scale)
    plain, error = relative_errors(w, h, dequantize(quantize(w, scale), scale), found)
    assert error < 0.5 * plain
    exact = (dequantize(*quantize_tokens(x)) @ (w - found).T).norm() / (dequantize(*quantize_tokens(x)) @ w.T).norm()
    assert error == pytest.approx(float(exact), rel=1e-4)


def test_gptq_rounds_to_nearest_where_channels_are_independent() -> None:
    w = torch.randn(9, 70, generator=torch.Generator().manual_seed(3))
    scale = channel_scales(w)
    codes, _ = gptq(w, torch.eye(70, dtype=torch.float64), scale, 0.01)
    assert torch.equal(codes, quantize(w, scale))


def test_second_moments_without_a_factor() -> None:
    """More damping first; then the GEMM is left to its caller."""
    w, h = torch.randn(4, 6), torch.eye(6, dtype=torch.float64)
    h[0, 1] = h[1, 0] = 1.05  # one eigenvalue is -0.05
    assert gptq(w, h, channel_scales(w), 0.01)[1] == pytest.approx(0.1)
    h[0, 1] = h[1, 0] = 40.0
    with pytest.raises(NoFactorError):
        gptq(w, h, channel_scales(w), 0.01)


def test_clipping_takes_the_candidate_with_the_least_error() -> None:
    x, w = correlated(512, 40, seed=4), torch.randn(20, 40, generator=torch.Generator().manual_seed(5))
    x[:, 3] = 0
    w[:10, 3] = 6.0  # a large weight on a channel that carries nothing
    h, full = second_moments(x), channel_scales(w)
    scale = clipped_scales(w, h)
    rounded = dequantize(*quantize_tokens(x))
    for row in range(len(w)):
        errors = {}
        for ratio in (1.0, *RATIOS):
            s = full[row : row + 1] * ratio
            errors[ratio] = float((rounded @ (dequantize(quantize(w[row : row + 1], s), s) - w[row]).T).norm())
        best = min(errors, key=errors.__getitem__)
        assert errors[round(float(scale[row] / full[row]), 6)] == pytest.approx(errors[best], rel=1e-3)
    assert int((scale[:10] < full[:10]).sum()) >= 8


# ------------------------------------------------------------------------------------------------- smooth


def test_smoothing_is_its_formula() -> None:
    x, w = torch.tensor([1.0, 16.0, 2.0]), torch.tensor([4.0, 1.0, 0.5])
    wanted = np.array([1.0, 16.0, 2.0]) ** 0.75 / np.array([4.0, 1.0, 0.5]) ** 0.25
    wanted /= np.exp(np.log(wanted).mean())
    np.testing.assert_allclose(smoothing(x, w, 0.75).numpy(), wanted, rtol=2**-8)
    dead = smoothing(torch.tensor([0.0, 2.0, 8.0]), torch.ones(3), 0.5)
    assert bool(torch.isfinite(dead).all())
    assert float(dead[0]) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_factors_of_a_norm_leave_it_a_bf16_number(offset: float) -> None:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(512, generator=generator).bfloat16()
    weight[:2] = torch.tensor([0.0, -1.0])  # one of them multiplies by nothing
    wanted = torch.randn(512, generator=generator).exp2()
    scale = Norm(weight.double(), offset).divisors(wanted)
    kept = (weight.double() + offset) / scale.double() - offset
    assert torch.allclose(kept, kept.bfloat16().double(), rtol=1e-6, atol=1e-6)
    assert float(scale[int(offset)]) == 1
    away = (scale / wanted).log2().abs()
    assert float(away.median()) < 2**-8
    assert bool((scale > 0).all())


def test_search_judges_with_the_scheme_of_the_activations() -> None:
    """A channel that stands out costs a whole token its resolution, but only its own group of 128."""
    generator = torch.Generator().manual_seed(9)
    x, w = torch.randn(128, 512, generator=generator), torch.randn(16, 512, generator=generator)
    x[:, 5] *= 60
    group = Group(Key(0, "norm.input"), [(x, w)])
    by_token, by_group = search(group), search(group, SCHEMES["w8a8-group128"])
    assert by_group.before < 0.6 * by_token.before
    assert by_group.scale is not None
    assert by_token.scale is not None
    y = x @ w.T
    mine, other = (output_error(x, w, y, each.scale, SCHEMES["w8a8-group128"]) for each in (by_group, by_token))
    assert mine < other
    assert by_group.after == pytest.approx(mine**0.5 / float(y.norm()), rel=1e-5)


def test_search_moves_outliers_and_leaves_even_channels() -> None:
    generator = torch.Generator().manual_seed(6)
    x, w = torch.randn(256, 64, generator=generator), torch.randn(32, 64, generator=generator)
    even = search(Group(Key(0, "norm.input"), [(x, w)]))
    assert even.after <= even.before
    outlier = x.clone()
    outlier[:, 5] *= 60
    found = search(Group(Key(0, "norm.input"), [(outlier, w)]))
    assert found.scale is not None
    assert int(found.scale.argmax()) == 5
    assert found.after < 0.3 * found.before
    exact = outlier @ w.T
    error = output_error(outlier, w, exact, found.scale) ** 0.5 / float(exact.norm())
    assert found.after == pytest.approx(error, rel=1e-5)


def test_heads_that_share_values_share_factors() -> None:
    group = Group(Key(0, "attn.v"), [], times=3, head=2)
    assert expand(group, torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(64, 24, generator=generator), torch.randn(8, 24, generator=generator)
    x[:, 8:16] *= 30  # the second query head of the only kv head
    found = search(Group(Key(0, "attn.v"), [(x, w)], times=3, head=8))
    assert found.scale is None or found.scale.shape == (8,)


# ------------------------------------------------------------------------------------- layers of any form


FORMS = ("qwen2", "phi3", "deepseek_v3", "gpt_oss", "qwen3_5_moe")
"""Biases and tied embeddings; fused; latent attention; transposed and interleaved experts; stacked experts."""


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_a_layer_are_those_of_the_source(name: str, family: Callable[[str], Path]) -> None:
    source = Source(family(name))
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    prefix = "model.layers.1"
    layer = model.get_submodule(prefix)
    for parameter in dict(layer.named_parameters()):
        full = f"{prefix}.{parameter}"
        parameter_key(source.arch, full)
        set_tensor(layer, parameter, parameter_value(source.arch, source.dims, full, source.get).float())
    weights = LayerWeights(source.arch, source.dims, prefix, layer)
    assert len(list(weights)) >= 4
    for key in weights:
        assert torch.equal(weights.view(key), matrix(source, key).float()), key.shard_name


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_rounded_and_verified(name: str, family: Callable[[str], Path], tmp_path: Path) -> None:
    """Smoothed, rounded with error feedback, converted in both forms and compared code by code."""
    root, wanted = family(name), recipe(SMOOTH, GPTQ)
    summary = calibrate(root, tmp_path / "cal", wanted)
    rounded = [row for row in summary.methods if row.method == "gptq"]
    assert {row.name for row in rounded} == {gemm.name for gemm in summary.gemms if gemm.quantized}
    assert any(row.after < row.before for row in rounded)
    assert all(row.after <= row.before for row in summary.methods)
    convert(root, tmp_path / "ck", wanted, calibration=tmp_path / "cal", jobs=1)
    report = verify(tmp_path / "ck", source=root, calibration=tmp_path / "cal")
    assert report.failures == ()
    (check,) = [check for check in report.checks if check.name == "INT8 weights are the codes of the calibration"]
    assert check.count == sum(gemm.shape[0] * gemm.shape[1] for gemm in summary.gemms if gemm.quantized)
    _dequantized_is_near(root, tmp_path, wanted)


def _dequantized_is_near(root: Path, tmp_path: Path, wanted: Recipe) -> None:
    """Codes assembled as transformers' module holds them, against the transformed source."""
    view = view_of(Source(root), wanted.methods, artifact=tmp_path / "cal")
    rounded = rounds_as_found(view, tmp_path / "cal", wanted.methods)(1).weights
    model = build_skeleton(load_config(root), dtype=torch.float32)
    layer, seen = model.get_submodule("model.layers.1"), 0
    for name, like in layer.named_parameters():
        key = parameter_key(view.arch, f"model.layers.1.{name}")
        if key.part != "weight" or not any(
            key.role == gemm.role or gemm.role in view.arch.role(key.role).parts for gemm in _gemms(tmp_path)
        ):
            continue
        value = parameter_value(view.arch, view.dims, f"model.layers.1.{name}", view.get).float()
        pairs = [(name, value)]
        if like.ndim == 3:
            flat = value.transpose(1, 2) if view.arch.experts_transposed else value
            pairs = [(f"{name}.{expert}", each) for expert, each in enumerate(flat)]
        for label, w_NK in pairs:
            seen += 1
            found = rounded(label, w_NK)
            assert isinstance(found, Codes)
            assert float((dequantize(*found) - w_NK).norm() / w_NK.norm()) < 0.03, label
    assert seen >= 4


def _gemms(tmp_path: Path) -> list[Any]:
    return [gemm for gemm in read_summary(tmp_path / "cal").gemms if gemm.quantized and gemm.layer == 1]


# --------------------------------------------------------------------------------------------- whole runs


def files(folder: Path) -> dict[str, bytes]:
    names = [*ARTIFACT_NAMES, *read_summary(folder).files]
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def artifact(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("methods") / "cal"
    calibrate(minimax, out, recipe(SMOOTH, GPTQ))
    return out


def test_artifact_holds_vectors_codes_and_what_they_brought(artifact: Path, minimax: Path) -> None:
    summary = read_summary(artifact)
    assert {"transforms.safetensors", "codes-00000.safetensors", "codes-00005.safetensors"} <= summary.files.keys()
    rows: dict[str, list[MethodRow]] = {}
    for row in summary.methods:
        rows.setdefault(row.method, []).append(row)
    assert {row.name for row in rows["smooth"] if row.layer == 2} >= {"layers.2.norm.input", "layers.2.attn.v"}
    vectors = load_file(artifact / "transforms.safetensors")
    scaled = {f"smooth.{row.name}.weight" for row in rows["smooth"] if row.after < row.before}
    assert vectors.keys() == scaled
    scale = vectors["smooth.layers.2.norm.input.weight"].double()
    norm = Source(minimax).get(Key(2, "norm.input")).double() / scale
    torch.testing.assert_close(norm.bfloat16().double(), norm, rtol=1e-6, atol=0)
    assert int((scale.log2() != scale.log2().round()).sum()) > len(scale) // 2


def test_same_bytes_after_a_stop_and_with_other_jobs(
    artifact: Path, minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = search_module.save_found, 0

    def stop(path: Path, found: Any) -> None:
        nonlocal count
        original(path, found)
        count += 1
        if count == 8:  # in the second layer of the second method
            raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "save_found", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(minimax, tmp_path / "stopped", recipe(SMOOTH, GPTQ))
    calibrate(minimax, tmp_path / "stopped", recipe(SMOOTH, GPTQ), jobs=3)
    assert files(tmp_path / "stopped") == files(artifact)
    assert count == 12


def test_a_changed_code_is_found(artifact: Path, minimax: Path, tmp_path: Path) -> None:
    wanted = recipe(SMOOTH, GPTQ)
    convert(minimax, tmp_path / "ck", wanted, calibration=artifact, jobs=1)
    record = next(
        row
        for row in read_manifest(tmp_path / "ck" / "quantkit_manifest.json").tensors
        if "layers.3" in row.name and row.scale
    )
    with (tmp_path / "ck" / record.file).open("r+b") as file:
        file.seek(record.offset + 5)
        byte = file.read(1)
        file.seek(record.offset + 5)
        file.write(bytes([(byte[0] + 1) % 120]))
    failures = verify(tmp_path / "ck", source=minimax, calibration=artifact).failures
    assert any("is not what the calibration has found" in failure and record.name in failure for failure in failures)


def test_what_is_needed_and_what_is_refused(artifact: Path, minimax: Path, deepseek: Path, tmp_path: Path) -> None:
    wanted = recipe(SMOOTH, GPTQ)
    with pytest.raises(UsageError, match="smooth, gptq of the recipe learn from text"):
        convert(minimax, tmp_path / "a", wanted, jobs=1)
    with pytest.raises(UsageError, match="another source"):
        convert(deepseek, tmp_path / "b", wanted, calibration=artifact, jobs=1)
    with pytest.raises(UsageError, match="another recipe"):
        convert(minimax, tmp_path / "c", recipe(SMOOTH), calibration=artifact, jobs=1)
    shutil.copytree(artifact, tmp_path / "cal")
    codes = load_file(tmp_path / "cal" / "codes-00002.safetensors")
    save_file(
        codes | {"layers.2.attn.q.weight": codes["layers.2.attn.q.weight"][:, 1:].contiguous()},
        tmp_path / "cal" / "codes-00002.safetensors",
    )
    with pytest.raises(InputError, match="codes-00002"):
        convert(minimax, tmp_path / "d", wanted, calibration=tmp_path / "cal", jobs=1)
    (tmp_path / "cal" / "codes-00002.safetensors").unlink()
    with pytest.raises(InputError, match="codes-00002"):
        convert(minimax, tmp_path / "e", wanted, calibration=tmp_path / "cal", jobs=1)
    assert not any((tmp_path / name).exists() for name in "abcde")


def test_shards_hold_the_same_codes(artifact: Path, minimax: Path, tmp_path: Path) -> None:
    """Sharded directly and from the checkpoint: the same tensors; both are verified against the calibration."""
    wanted = recipe(SMOOTH, GPTQ)
    convert(minimax, tmp_path / "ck", wanted, calibration=artifact, jobs=1)
    direct = convert(
        minimax, tmp_path / "direct", wanted, calibration=artifact, form="sharded", mesh=Mesh(tp=2), jobs=1
    )
    again = convert(tmp_path / "ck", tmp_path / "again", wanted, form="sharded", mesh=Mesh(tp=2), jobs=1)
    assert [record.xxh3 for record in direct.tensors] == [record.xxh3 for record in again.tensors]
    assert verify(tmp_path / "direct", source=minimax, calibration=artifact).failures == ()
    assert verify(tmp_path / "again", source=tmp_path / "ck").failures == ()


def test_experts_without_rows_are_rounded_to_nearest_and_named(minimax: Path, tmp_path: Path) -> None:
    summary = calibrate(minimax, tmp_path / "cal", recipe({"name": "gptq", "min_rows": 100_000}))
    rows = [row for row in summary.methods if "expert" in row.name]
    assert all(row.note.startswith("plain: ") and row.note.endswith("fewer than 100000") for row in rows)
    assert any("are rounded to nearest" in warning for warning in summary.warnings)
    wanted = recipe({"name": "gptq", "min_rows": 100_000})
    convert(minimax, tmp_path / "a", wanted, calibration=tmp_path / "cal", jobs=1)
    convert(minimax, tmp_path / "b", small_recipe(), jobs=1)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    same = {name for name, value in second.items() if "experts" in name and torch.equal(first[name], value)}
    assert same == {name for name in second if "experts" in name}


def test_clip_alone_rounds_to_nearest_with_its_scales(minimax: Path, tmp_path: Path) -> None:
    wanted = recipe({"name": "clip", "min_rows": 8})
    summary = calibrate(minimax, tmp_path / "cal", wanted)
    assert any("rows clipped" in row.note and row.after < row.before for row in summary.methods)
    convert(minimax, tmp_path / "ck", wanted, calibration=tmp_path / "cal", jobs=1)
    assert verify(tmp_path / "ck", source=minimax, calibration=tmp_path / "cal").failures == ()
    assert verify(tmp_path / "ck", source=minimax).failures == ()  # near the source is all that can be said then


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([GPTQ, SMOOTH], "one at most that rounds"),
        ([SMOOTH, {"name": "clip"}, GPTQ], "one at most that rounds"),
        ([{"name": "bias"}, GPTQ], "one that corrects biases"),
        ([SMOOTH, SMOOTH], "stands there twice"),
        ([{"name": "gptq", "damping": 0}], "greater than 0"),
    ],
)
def test_recipes_that_make_no_sense(methods: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(*methods)


def test_smooth_takes_what_is_exact_and_refuses_what_is_not(family: Callable[[str], Path]) -> None:
    """gpt-oss shifts and clamps up before the product: its experts are left out, or refused when asked for."""
    source = Source(family("gpt_oss"))
    options = method("smooth").options
    steps = method("smooth").build(source, options(), None).steps
    assert [json.loads(step.model_dump_json())["producer"] for step in steps] == [
        "norm.input",
        "norm.pre_mlp",
        "attn.v",
    ]
    with pytest.raises(UsageError, match="not linear in it"):
        view_of(source, [options.model_validate({"name": "smooth", "producers": ["expert.up"]})], planning=True)
    with pytest.raises(UsageError, match="learns from text"):
        view_of(source, [options()])
