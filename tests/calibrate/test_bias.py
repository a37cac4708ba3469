"""Bias correction: its arithmetic against float64, its rule against errors that only look systematic, whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.archs.modeling import load_tokenizer
from quantkit.calibrate import search as search_module
from quantkit.calibrate.data import draw
from quantkit.calibrate.methods.bias import Errors, correct, errors_of
from quantkit.calibrate.run import calibrate, make_plan
from quantkit.cli import main
from quantkit.convert.merge import merge
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import ARTIFACT_NAMES, BIASES_NAME, MethodRow, read_summary
from quantkit.spec.manifest import read_manifest
from quantkit.spec.mesh import Mesh
from quantkit.spec.scheme import SCHEMES, group_size_for
from tests.calibrate.conftest import small_recipe
from tests.calibrate.test_ranks import shared
from tests.calibrate.test_trials import whole_model_kl

pytestmark = pytest.mark.usefixtures("no_plots")

Float = NDArray[np.float64]

BIAS = {"name": "bias", "min_rows": 16}
GPTQ = {"name": "gptq", "min_rows": 16}
FAMILIES = ("qwen2", "gpt_oss", "glm4_moe")
"""Of q, k and v in a tied model; of all GEMMs, experts stacked and interleaved; of q, k and v beside routed experts."""


def recipe(*methods: dict[str, Any], rules: Any = (), **tables: Any) -> Recipe:
    return Recipe.model_validate({**small_recipe().model_dump(), "methods": methods, "rules": rules, **tables})


# ------------------------------------------------------------------------------------------ the arithmetic


def numpy_rounded(x: NDArray[np.float32], group: int) -> Float:
    """Symmetric INT8 of runs of `group` values: the largest magnitude is 127, halves go to the even number."""
    runs = x.reshape(len(x), -1, group)
    scale = np.abs(runs).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(runs / scale).astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize(
    ("n", "k", "outputs", "scheme"), [(37, 33, 7, "w8a8"), (1301, 5, 1, "w8a8"), (90, 256, 11, "w8a8-group128")]
)
def test_errors_are_those_of_float64(n: int, k: int, outputs: int, scheme: str) -> None:
    generator = np.random.default_rng(n)
    x = generator.normal(1, 3, (n, k)).astype(np.float32)
    w, rounded = (generator.normal(size=(outputs, k)).astype(np.float32) for _ in range(2))
    bias, written = generator.normal(size=(2, outputs))
    found = errors_of(*map(torch.from_numpy, (x, w, rounded, bias, written)), SCHEMES[scheme])
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    group = group_size_for(k, SCHEMES[scheme].group_size) if SCHEMES[scheme].group_size else k
    error = exact - (numpy_rounded(x, group) @ rounded.T.astype(np.float64) + written)
    blocks = np.array_split(error, 8)
    np.testing.assert_allclose(found.sums_BN, [block.sum(0) for block in blocks], rtol=1e-4, atol=1e-3)
    assert found.counts.tolist() == [len(block) for block in blocks]
    assert found.square == pytest.approx(np.square(error).sum(), rel=1e-5)
    assert found.reference == pytest.approx(np.square(exact).sum(), rel=1e-5)


def of_error(error: Float, reference: float = 1.0) -> Errors:
    """What `errors_of` says of errors `[n, N]`."""
    blocks = np.array_split(error, 8)
    sums = torch.from_numpy(np.stack([block.sum(0) for block in blocks]))
    counts = torch.tensor([float(len(block)) for block in blocks], dtype=torch.float64)
    return Errors(counts, sums, float(np.square(error).sum()), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_planted_error_is_taken_off_to_the_rounding_of_the_dtype(dtype: torch.dtype) -> None:
    """A weight off by a constant under an input that is one: the error of a channel is the same at every token."""
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(203, 17, generator=generator), torch.randn(9, 17, generator=generator)
    x[:, 4] = 127.0 / 32  # a power of two times 127, so that it is not rounded: it is the largest of every token
    planted = 0.3 * torch.randn(9, generator=generator)
    rounded = w.clone()
    rounded[:, 4] -= planted
    written = torch.randn(9, generator=generator).to(dtype)
    errors = errors_of(x, w, rounded, written.double(), written.double(), SCHEMES["w8a8"])
    found = correct(errors, written.double(), dtype)
    assert found.bias is not None
    assert found.bias.dtype == dtype
    mean = (x.double() @ w.double().T).mean(0) - torch.from_numpy(
        (numpy_rounded(x.numpy(), 17) @ rounded.double().numpy().T).mean(0)
    )
    wanted = written.double() + mean
    left = (found.bias.double() - wanted).abs()
    assert bool((left <= torch.finfo(dtype).eps / 2 * wanted.abs() * 1.01 + 1e-5).all())
    assert bool(((mean - planted.double() * 127 / 32).abs() < 0.05).all()), "rounding the activations adds little"
    assert found.after < 0.1 * found.before


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_left_alone(seed: int) -> None:
    """On its own rows the mean of anything lowers the error; on others that of noise does not."""
    error = np.random.default_rng(seed).normal(size=(160, 24))
    assert np.square(error - error.mean(0)).sum() < np.square(error).sum()
    found = correct(of_error(error), torch.ones(24, dtype=torch.float64), torch.float32)
    assert found.bias is None
    assert found.after == found.before


def test_what_is_systematic_in_one_kind_of_text_only_is_left_alone() -> None:
    error = 0.1 * np.random.default_rng(0).normal(size=(160, 5))
    error[:20] += 1.0  # the first of eight blocks
    assert correct(of_error(error), torch.zeros(5, dtype=torch.float64), torch.float32).bias is None
    error[20:] += 1.0
    assert correct(of_error(error), torch.zeros(5, dtype=torch.float64), torch.float32).bias is not None


def test_corrections_below_the_dtype_change_nothing() -> None:
    """A bias of 100 has steps of a half in bf16."""
    error = np.full((64, 3), 0.2)
    large = torch.full((3,), 100.0, dtype=torch.float64)
    assert correct(of_error(error), large, torch.bfloat16).bias is None
    found = correct(of_error(error), large, torch.float32).bias
    assert found is not None
    assert found.tolist() == pytest.approx([100.2] * 3)


def test_figures_are_those_of_blocks_judged_by_the_others() -> None:
    error = np.random.default_rng(3).normal(0.4, 1, (83, 6))
    written = torch.from_numpy(np.random.default_rng(4).normal(size=6)).bfloat16().double()
    found = correct(of_error(error, 50.0), written, torch.bfloat16)
    blocks, square = np.array_split(error, 8), 0.0
    for index, block in enumerate(blocks):
        others = np.concatenate([other for at, other in enumerate(blocks) if at != index]).mean(0)
        change = (written + torch.from_numpy(others)).bfloat16().double() - written
        square += np.square(block - change.numpy()).sum()
    assert found.before == pytest.approx(np.sqrt(np.square(error).sum() / 50))
    assert found.after == pytest.approx(np.sqrt(square / 50))
    assert found.bias is not None
    assert torch.equal(found.bias, (written + torch.from_numpy(error.mean(0))).bfloat16())


# -------------------------------------------------------------------------------------------- whole models


def rows_of(folder: Path) -> list[MethodRow]:
    return [row for row in read_summary(folder).methods if row.method == "bias"]


def corrected(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / BIASES_NAME)


@pytest.fixture(scope="module")
def calibrated(
    family: Callable[[str], Path], no_plots: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Family -> its calibration with GPTQ and corrected biases; do not change it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(f"{name}-cal") / "out"
            calibrate(family(name), made[name], recipe(GPTQ, BIAS))
        return made[name]

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_from_text_to_shards(
    name: str, family: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    """What was found is what is written, in both forms; ranks hold their part of it, a sum over ranks has it once."""
    root, wanted, calibration = family(name), recipe(GPTQ, BIAS), calibrated(name)
    found = corrected(calibration)
    convert(root, tmp_path / "ck", wanted, calibration=calibration, jobs=1)
    source, written = load_file(root / "model.safetensors"), load_file(tmp_path / "ck" / "model.safetensors")
    manifest = read_manifest(tmp_path / "ck" / "quantkit_manifest.json")
    assert [step.step for step in manifest.transforms] == ["correct_bias"]
    seen = 0
    for record in manifest.tensors:
        if record.part != "bias":
            continue
        expert = f".{record.experts[0]}" if record.experts else ""
        bias = found.get(f"w8a8/layers.{record.layer}.{record.role}{expert}.bias")
        if bias is not None:
            seen += 1
            assert torch.equal(written[record.name], bias), record.name
            assert bias.dtype == source[record.sources[0]].dtype
        elif record.name in source:
            assert torch.equal(written[record.name], source[record.name]), record.name
    assert seen == len(found) > 6
    assert verify(tmp_path / "ck", source=root, calibration=calibration).failures == ()

    direct = convert(root, tmp_path / "tp", wanted, calibration=calibration, form="sharded", mesh=Mesh(tp=2), jobs=2)
    again = convert(tmp_path / "ck", tmp_path / "again", wanted, form="sharded", mesh=Mesh(tp=2), jobs=1)
    assert [record.xxh3 for record in direct.tensors] == [record.xxh3 for record in again.tensors]
    assert verify(tmp_path / "tp", source=root, calibration=calibration).failures == ()
    merge(tmp_path / "tp", tmp_path / "merged", jobs=1)
    merged, whole = (tmp_path / folder / "model.safetensors" for folder in ("merged", "ck"))
    assert merged.read_bytes() == whole.read_bytes()
    for record in direct.tensors:
        if record.part == "bias" and record.role in ("attn.o", "expert.down"):
            values = load_file(tmp_path / "tp" / record.file)[record.name]
            assert bool(values.any()) == ("tp0" in record.file)


@pytest.mark.parametrize(("name", "close"), [("qwen2", 1e-3), ("gpt_oss", 0.1)])
def test_held_out_text_is_judged_with_what_is_written(
    name: str, close: float, family: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    """By whole models in memory; where a router follows, a tie may send a token elsewhere."""
    root, wanted = family(name), recipe(GPTQ, BIAS)
    convert(root, tmp_path / "out", wanted, calibration=calibrated(name), jobs=1)
    held_out = read_summary(calibrated(name)).held_out
    assert held_out is not None
    assert held_out.kl["all"] == pytest.approx(whole_model_kl(root, tmp_path / "out", wanted), rel=close)


def test_biases_are_the_mean_errors_of_the_written_gemms(
    family: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    """By hooks on transformers' whole model, the weights of the checkpoint and numpy."""
    from transformers import AutoModelForCausalLM

    root, wanted = family("qwen2"), recipe(GPTQ, BIAS)
    convert(root, tmp_path / "out", wanted, calibration=calibrated("qwen2"), jobs=1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    entered: list[Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _module, args: entered.append(args[0][0]))
    with torch.no_grad():
        for sample in draw(load_tokenizer(root), wanted.calibration)[0].samples:
            model(input_ids=sample.ids[None], use_cache=False)
    x = torch.cat(entered).numpy()
    changed = 0
    for part in "qkv":
        prefix = f"model.layers.1.self_attn.{part}_proj"
        module = model.get_submodule(prefix)
        codes, scale = (written[f"{prefix}.{end}"].double().numpy() for end in ("weight", "weight_scale"))
        exact = x.astype(np.float64) @ module.weight.detach().double().numpy().T
        mean = (exact - numpy_rounded(x, x.shape[1]) @ (codes * scale).T).mean(0)
        bias = module.bias.detach().double().numpy() + mean
        found = written[f"{prefix}.bias"].double().numpy()
        if f"w8a8/layers.1.attn.{part}.bias" in corrected(calibrated("qwen2")):
            changed += int((found != module.bias.detach().double().numpy()).sum())
            np.testing.assert_allclose(found, bias, rtol=2**-8, atol=1e-5)
    assert changed > 8


def test_gemms_without_a_bias_are_counted_and_named(calibrated: Callable[[str], Path]) -> None:
    summary = read_summary(calibrated("glm4_moe"))
    quantized = [gemm for gemm in summary.gemms if gemm.quantized]
    rows = rows_of(calibrated("glm4_moe"))
    without = [row for row in rows if row.note == "nothing to do: no bias to correct"]
    assert sum(row.gemms for row in rows) == len(quantized)
    assert {row.name for row in without if row.layer == 1} == {
        f"layers.1.{role}"
        for role in ("attn.o", *(f"{kind}.{part}" for kind in ("shared", "expert") for part in PARTS))
    }
    assert next(row.gemms for row in without if row.name == "layers.1.expert.up") == 5
    assert all(row.after <= row.before for row in rows)


PARTS = ("gate", "up", "down")


def test_experts_that_saw_few_tokens_keep_their_biases(family: Callable[[str], Path], tmp_path: Path) -> None:
    wanted = recipe({"name": "bias", "min_rows": 700})
    summary = calibrate(family("gpt_oss"), tmp_path / "cal", wanted)
    starved = [row for row in rows_of(tmp_path / "cal") if row.note.startswith("left as it is: too few rows")]
    tokens = {gemm.name: gemm.tokens for gemm in summary.gemms}
    assert {row.name for row in starved} == {name for name, count in tokens.items() if count < 700} != set()
    assert not {f"w8a8/{row.name}.bias" for row in starved} & corrected(tmp_path / "cal").keys()
    assert any(f"{len(starved)} GEMM" in warning and "keep the bias" in warning for warning in summary.warnings)


def test_dtypes_of_biases_stay(family: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(family("qwen2"), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith("proj.bias")]
    tensors |= {name: tensors[name].to(torch.float16 if "k_proj" in name else torch.float32) for name in names}
    save_file(tensors, path, {"format": "pt"})
    calibrate(tmp_path / "model", tmp_path / "cal", recipe(BIAS))
    found = corrected(tmp_path / "cal")
    assert {name.split(".")[-2]: bias.dtype for name, bias in found.items()} == {
        "q": torch.float32,
        "k": torch.float16,
        "v": torch.float32,
    }
    convert(tmp_path / "model", tmp_path / "out", recipe(BIAS), calibration=tmp_path / "cal", jobs=1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: written[name].dtype for name in names} == {name: tensors[name].dtype for name in names}


def test_biases_behind_a_rotation_and_scales(family: Callable[[str], Path], tmp_path: Path) -> None:
    """Transforms change biases too; what is written makes up for rounding those as well."""
    wanted = recipe({"name": "rotate"}, {"name": "smooth"}, GPTQ, BIAS)
    calibrate(family("gpt_oss"), tmp_path / "cal", wanted)
    assert {name.split(".")[2] for name in corrected(tmp_path / "cal")} == {"attn", "expert"}
    convert(family("gpt_oss"), tmp_path / "out", wanted, calibration=tmp_path / "cal", jobs=1)
    assert verify(tmp_path / "out", source=family("gpt_oss"), calibration=tmp_path / "cal").failures == ()
    held_out = read_summary(tmp_path / "cal").held_out
    assert held_out is not None
    measured = whole_model_kl(family("gpt_oss"), tmp_path / "out", wanted)
    assert np.mean([*measured.values()]) == pytest.approx(np.mean([*held_out.kl["all"].values()]), rel=0.1)


def test_each_scheme_has_its_own_correction(family: Callable[[str], Path], tmp_path: Path) -> None:
    """Shards hold the biases of the schemes that were decided on, and those of kept GEMMs as they are."""
    rules = [{"match": "attn.v", "layers": [0], "scheme": "keep", "reason": "a test"}]
    rules += [{"match": f"attn.{part}", "layers": [0], "scheme": "keep", "reason": "a test"} for part in "qk"]
    wanted = recipe(BIAS, rules=rules, auto_group={"kl": 0.00025}, auto_keep={"kl": 0.0004, "max_share": 0.4})
    root = family("qwen2")
    summary = calibrate(root, tmp_path / "cal", wanted)
    found = corrected(tmp_path / "cal")
    assert {name.partition("/")[0] for name in found} == {"w8a8", "w8a8-group128"}
    assert not [name for name in found if "layers.0." in name]
    assert summary.decisions is not None
    forms: tuple[Literal["checkpoint", "sharded"], ...] = ("checkpoint", "sharded")
    for form in forms:
        manifest = convert(root, tmp_path / form, wanted, calibration=tmp_path / "cal", form=form, jobs=1)
        assert verify(tmp_path / form, source=root, calibration=tmp_path / "cal").failures == ()
        schemes = {(row.layer, row.role): row.scheme for row in manifest.tensors if row.part == "weight"}
        (file,) = [row.name for row in manifest.files if row.name.endswith(".safetensors")][:1]
        written, source = load_file(tmp_path / form / file), load_file(root / "model.safetensors")
        for layer in range(3):
            stored = [source[f"model.layers.{layer}.self_attn.{part}_proj.bias"] for part in "qkv"]
            fused = form == "sharded"
            scheme = schemes[layer, "attn.qkv" if fused else "attn.q"]
            names = [f"{scheme}/layers.{layer}.attn.{part}.bias" for part in "qkv"]
            parts = [found.get(name, plain) for name, plain in zip(names, stored, strict=True)]
            ours = (
                [written[f"layers.{layer}.attn.qkv.bias"]]
                if fused
                else [written[f"model.layers.{layer}.self_attn.{part}_proj.bias"] for part in "qkv"]
            )
            assert torch.equal(torch.cat(ours), torch.cat(parts)), (form, layer, scheme)


def test_a_changed_bias_is_found(
    family: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    root, wanted, calibration = family("qwen2"), recipe(GPTQ, BIAS), calibrated("qwen2")
    manifest = convert(root, tmp_path / "out", wanted, calibration=calibration, jobs=1)
    record = next(row for row in manifest.tensors if row.part == "bias" and row.layer == 1)
    with (tmp_path / "out" / record.file).open("r+b") as file:
        file.seek(record.offset)
        byte = file.read(1)
        file.seek(record.offset)
        file.write(bytes([byte[0] ^ 1]))
    failures = verify(tmp_path / "out", source=root, calibration=calibration).failures
    assert any("differs from the transformed source" in row and record.name in row for row in failures)
    (missing,) = [row for row in verify(tmp_path / "out", source=root).failures if "calibration" in row]
    assert "gptq, bias of the recipe learn from text" in missing


def test_corrected_candidates_pass_the_comparison(
    family: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    from quantkit_instruments.compare import Options, run
    from tests.baseline.helpers import make_baseline

    root = family("glm4_moe")
    convert(root, tmp_path / "out", recipe(GPTQ, BIAS), calibration=calibrated("glm4_moe"), jobs=1)
    result = run(Options(make_baseline(root, tmp_path / "baseline"), tmp_path / "out", device="cpu"))
    assert result.findings == ()
    assert "biases" in result.notes


# -------------------------------------------------------------------------------- the same bytes, and refusals


def contents(folder: Path) -> dict[str, bytes]:
    names = [*ARTIFACT_NAMES, *read_summary(folder).files]
    assert BIASES_NAME in names
    return {name: (folder / name).read_bytes() for name in names}


def test_same_bytes_after_a_stop_and_with_other_jobs(
    family: Callable[[str], Path],
    calibrated: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, count = search_module.save_found, 0

    def stop(path: Path, found: Any) -> None:
        nonlocal count
        original(path, found)
        count += 1
        if count == 5:  # in the second layer of `bias`
            raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "save_found", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(family("gpt_oss"), tmp_path / "out", recipe(GPTQ, BIAS))
    calibrate(family("gpt_oss"), tmp_path / "out", recipe(GPTQ, BIAS), jobs=3)
    assert contents(tmp_path / "out") == contents(calibrated("gpt_oss"))
    assert count == 6


def test_two_processes_leave_the_bytes_of_one(family: Callable[[str], Path], tmp_path: Path) -> None:
    values = recipe(GPTQ, BIAS).model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    done = shared(str(family("glm4_moe")), "-o", str(tmp_path / "two"), "--recipe", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 0, done.stderr
    assert "GEMMs have no bias to correct" in done.stdout
    one = CliRunner().invoke(
        main, ["calibrate", str(family("glm4_moe")), "-o", str(tmp_path / "one"), "--recipe", f"{tmp_path}/recipe.yaml"]
    )
    assert one.exit_code == 0, one.output
    first, second = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert {name for name in first if first[name] != second[name]} <= {"report.html", "calibration.json"} - {
        "calibration.json"
    }


def test_a_dry_run_counts_biases_and_a_model_without_them_is_refused(
    family: Callable[[str], Path], minimax: Path, tmp_path: Path
) -> None:
    sizes = make_plan(family("glm4_moe"), recipe(BIAS)).describe()
    assert (sizes["biases"], sizes["gemms_without_bias"]) == (9, sizes["gemms"] - 9)
    with pytest.raises(UsageError, match="has a bias, so the method bias has nothing to correct"):
        make_plan(minimax, recipe(BIAS))
    with pytest.raises(UsageError, match="nothing to correct"):  # it has biases, of GEMMs that are kept
        make_plan(family("qwen2"), recipe(BIAS, rules=[{"match": "attn.*", "scheme": "keep", "reason": "a test"}]))
    with pytest.raises(UsageError, match="bias of the recipe learns from text"):
        convert(family("qwen2"), tmp_path / "out", recipe(BIAS))
