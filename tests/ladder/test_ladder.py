"""The ladder against whole models with the same arithmetic, written from the formulas (`tests/reference.py`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from quantkit.archs.structure import layers_of
from quantkit.calibrate.passes import LayerRun
from quantkit.calibrate.run import calibrate
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.reader import Source
from quantkit.cli import main
from quantkit.convert.run import convert
from quantkit.errors import QuantkitError, UsageError
from quantkit.ladder import speed
from quantkit.ladder.arithmetic import Arithmetic
from quantkit.ladder.cache import RoundingCache, rounding_attention
from quantkit.ladder.run import LadderPlan, LadderReport, plan_ladder, run_ladder
from quantkit.ladder.rungs import load_rungs, with_calibrations
from quantkit.ladder.walk import RungPass, round_tokens_fp8
from quantkit.recipe import load_recipe, validated
from quantkit.spec.scheme import SCHEMES
from quantkit_instruments.cli import main as runtime_cli
from quantkit_runtime.device import resolve
from quantkit_runtime.graft import load_model
from tests.browser import Browser, check_report
from tests.families import FAMILIES, make_tiny
from tests.reference import fake_quantized, quantized_by_name, quantized_weight, transformers_model

GROUP = 65
"""Largest divisor of the test model's 260 intermediate channels that is at most 128."""

TEXT = {"samples": 6, "seq_len": 40, "min_sources": 1, "seed": 1}
RUNGS = ("w8", "w8a8", "w8a8-group128", "w8a8+keys", "w8a8+kv")


@pytest.fixture(scope="module")
def dense(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random dense model with biases and odd sizes, and a real tokenizer."""
    folder = make_tiny("qwen2", tmp_path_factory.mktemp("dense") / "model", vocab_size=4096, intermediate_size=260)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minimax / name, folder)
    return folder


@pytest.fixture(scope="module")
def ladder(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> LadderReport:
    return run_ladder(planned(minimax, "w8", "w8a8", "w8a8+keys", "w8a8+kv", seq_len=80), tmp_path_factory.mktemp("l"))


def planned(root: Path, *rungs: str, **text: Any) -> LadderPlan:
    return plan_ladder(root, load_rungs(None, rungs), {**TEXT, **text}, device="cpu")


# --------------------------------------------------------------------------------------------------- references


class Int8Cache(DynamicCache):
    """transformers' own cache that rounds what it is given, in numpy."""

    def __init__(self, values: bool) -> None:
        super().__init__()
        self.rounds_values = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        value = rounded(value_states) if self.rounds_values else value_states
        return super().update(rounded(key_states), value, *args, **kwargs)


def rounded(x: Tensor) -> Tensor:
    values = x.numpy()
    scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.clip(np.rint(values / scale), -127, 127).astype(np.float32) * scale)


def weights_only(root: Path) -> Any:
    model = transformers_model(root, torch.float32, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and (quantized_by_name(name) or ".experts." in name) and "norm" not in name:
            q, scale = quantized_weight(parameter)
            parameter.data = (q * scale).float()
    return model


def groups(name: str) -> int:
    return GROUP if name.endswith("down_proj") else 0


def logprobs(model: Any, ids: Tensor, cache: Callable[[], Any] = lambda: None) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        made = cache()
        logits = model(input_ids=ids[None], past_key_values=made, use_cache=made is not None).logits[0, :-1].double()
    return (logits - logits.logsumexp(-1, keepdim=True)).numpy()


Compared = tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any], float, float]


def compare(plan: LadderPlan, report: LadderReport, root: Path) -> Iterator[Compared]:
    """Rung, KL by sample and change of perplexity of the ladder and of whole models."""
    w8a8 = fake_quantized(root)
    references: Mapping[str, tuple[Any, Callable[[], Any]]] = {
        "w8": (weights_only(root), lambda: None),
        "w8a8": (w8a8, lambda: None),
        "w8a8-group128": (fake_quantized(root, groups), lambda: None),
        "w8a8+keys": (w8a8, lambda: Int8Cache(values=False)),
        "w8a8+kv": (w8a8, lambda: Int8Cache(values=True)),
    }
    samples = plan.plan.samples.samples
    source = transformers_model(root, torch.float32, experts_implementation="eager")
    log_p = [logprobs(source, sample.ids) for sample in samples]
    targets = [sample.ids[1:].numpy() for sample in samples]
    tokens = sum(map(len, targets))
    for row in report.rungs:
        model, cache = references[row.rung.name]
        log_q = [logprobs(model, sample.ids, cache) for sample in samples]
        kl = np.array([(np.exp(p) * (p - q)).sum() / len(p) for p, q in zip(log_p, log_q, strict=True)])
        pairs = zip(log_p, log_q, targets, strict=True)
        change = sum(float((p - q)[np.arange(len(t)), t].sum()) for p, q, t in pairs) / tokens
        assert row.scores.overall.tokens == tokens
        yield row.rung.name, np.array(row.scores.samples), kl, row.scores.overall.change, np.exp(change) - 1


def test_scores_are_those_of_whole_models(dense: Path, tmp_path: Path) -> None:
    plan = planned(dense, *RUNGS)
    report = run_ladder(plan, tmp_path / "out")
    for name, kl, wanted_kl, change, wanted_change in compare(plan, report, dense):
        # Activations next to a rounding boundary may fall on either side: products are float32 here, in the order of
        # this processor, and float64 there. One such sample may be off by some percent; arithmetic moves all of them.
        off = abs(kl / wanted_kl - 1)
        assert (off > 1e-3).sum() <= 1, (name, off)
        assert off.max() < 0.1, (name, off)
        # A mean of differences of log-probabilities, which are about sqrt(2 KL) each and have either sign.
        assert change == pytest.approx(wanted_change, abs=off.max() * np.sqrt(2 * wanted_kl.mean()) + 1e-6), name


def test_experts_are_rounded_too(minimax: Path, tmp_path: Path) -> None:
    """Weights only: rounding decides no routing of the next layer in another way, so the whole model is met exactly."""
    plan = planned(minimax, "w8")
    ((_, kl, wanted_kl, change, wanted_change),) = compare(plan, run_ladder(plan, tmp_path / "out"), minimax)
    assert kl == pytest.approx(wanted_kl, rel=1e-3)  # of single samples, which are small numbers
    assert kl.mean() == pytest.approx(wanted_kl.mean(), rel=1e-4)
    assert change == pytest.approx(wanted_change, rel=1e-4)


def test_totals_are_those_of_their_parts(ladder: LadderReport) -> None:
    for row in ladder.rungs:
        scores = row.scores
        for parts in (scores.kinds, scores.positions):
            assert sum(part.tokens for part in parts.values()) == scores.overall.tokens
            mean = sum(part.kl * part.tokens for part in parts.values()) / scores.overall.tokens
            assert mean == pytest.approx(scores.overall.kl)


def test_steps_and_sizes(ladder: LadderReport, minimax: Path) -> None:
    by_name = {row.rung.name: row for row in ladder.rungs}
    kl = {name: row.scores.overall.kl for name, row in by_name.items()}
    assert by_name["w8"].step_kl == kl["w8"]
    assert by_name["w8a8"].step_kl == pytest.approx(kl["w8a8"] - kl["w8"])
    pairs = np.array([by_name[name].scores.samples for name in ("w8a8", "w8")])
    assert by_name["w8a8"].step_error == pytest.approx((pairs[0] - pairs[1]).std(ddof=1) / np.sqrt(pairs.shape[1]))
    config = json.loads((minimax / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert ladder.kv_bytes == by_name["w8a8"].kv_bytes == heads * 2 * config["head_dim"] * 2
    assert by_name["w8a8+kv"].kv_bytes == heads * 2 * (config["head_dim"] + 4)
    assert by_name["w8"].weight_bytes == by_name["w8a8"].weight_bytes < 0.65 * ladder.weight_bytes


# ------------------------------------------------------------------------------------------------- other arithmetic


def test_bf16_is_transformers_own(dense: Path, tmp_path: Path) -> None:
    """Sums of BF16 products depend on their order, so only the size of the error is compared."""
    plan = planned(dense, "bf16")
    found = run_ladder(plan, tmp_path / "out").rungs[0].scores.overall
    float32, bf16 = (transformers_model(dense, dtype) for dtype in (torch.float32, torch.bfloat16))
    kl = 0.0
    for sample in plan.plan.samples.samples:
        p, q = logprobs(float32, sample.ids), logprobs(bf16, sample.ids)
        kl += float((np.exp(p) * (p - q)).sum()) / found.tokens
    assert 0.5 * kl < found.kl < 2 * kl


def test_fp8_activations() -> None:
    x = torch.randn(5, 260, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 260)
    x[2] = 0
    grouped = x.numpy().reshape(5, 4, 65)
    scale = np.maximum(np.abs(grouped).max(-1, keepdims=True) / np.float32(448), np.finfo(np.float32).tiny)
    wanted = (grouped / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(round_tokens_fp8(x, SCHEMES["w8a8"]).numpy(), wanted.reshape(5, 260))


def test_a_latent_goes_with_the_values() -> None:
    latent, rotary = torch.randn(1, 1, 7, 24), torch.randn(1, 1, 7, 8)
    kept = RoundingCache(keys=True, values=False, latent=24).update(latent, rotary, 0)
    assert torch.equal(kept[0], latent)
    assert torch.equal(kept[1], rotary)
    both = RoundingCache(keys=True, values=True, latent=24).update(latent, rotary, 0)
    torch.testing.assert_close(both[0], rounded(latent))
    assert torch.equal(both[1], rotary)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_softmax_attention_asks_the_cache(family: str, tiny: Callable[[str], Path]) -> None:
    source = Source(tiny(family))
    stream = LayerStream(source, dtype=torch.float32, device=torch.device("cpu"))
    kinds = [layer.attention for layer in layers_of(source.arch, source.dims, source.config)]
    for layer, kind in zip(stream.layers, kinds, strict=True):
        with rounding_attention(layer, RoundingCache(keys=True, values=True)) as modules:
            assert modules == (0 if kind == "linear" else 1)


# ----------------------------------------------------------------------------------------------------- calibrations


def in_float32(root: Path, out: Path) -> Path:
    """The same model with tensors of float32."""
    shutil.copytree(root, out)
    tensors = {name: tensor.float() for name, tensor in load_file(root / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_a_calibrated_recipe_is_the_converted_model(dense: Path, tmp_path: Path) -> None:
    """Smoothing, GPTQ's codes and decided exceptions, against the checkpoint that convert makes of them."""
    values = load_recipe("w8a8-best").model_dump()
    values["calibration"] |= {"samples": 8, "seq_len": 40, "held_out": 4, "min_sources": 1}
    recipe = validated(values, "test")
    dense = in_float32(dense, tmp_path / "model")  # what is kept is transformed too, and BF16 would round it once more
    calibrate(dense, tmp_path / "calibration", recipe)
    rungs = with_calibrations(load_rungs(None, ("w8a8",)), [tmp_path / "calibration"])
    assert rungs[1].after == "w8a8"
    plan = plan_ladder(dense, rungs, TEXT, device="cpu")
    found = run_ladder(plan, tmp_path / "out")
    assert str(tmp_path) not in (tmp_path / "out" / "ladder.json").read_text()
    convert(dense, tmp_path / "converted", recipe, calibration=tmp_path / "calibration")
    source = transformers_model(dense, torch.float32)
    ours = load_model(tmp_path / "converted", resolve("cpu"), torch.float32, verify=False).model.eval()
    kl = tokens = 0.0
    for sample in plan.plan.samples.samples:
        p, q = logprobs(source, sample.ids), logprobs(ours, sample.ids)
        kl, tokens = kl + float((np.exp(p) * (p - q)).sum()), tokens + len(p)
    assert found.rungs[1].scores.overall.kl == pytest.approx(kl / tokens, rel=0.01)  # activations at a boundary


def test_rungs_that_cannot_be_run_are_all_named(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rungs: [{name: a, change: b, recipe: w8a8-smooth}, {name: b, change: c, calibration: nowhere}]")
    with pytest.raises(UsageError) as caught:
        plan_ladder(dense, load_rungs(path), TEXT, device="cpu")
    assert [item.split(":")[0] for item in caught.value.items] == ["a", "b"]


# -------------------------------------------------------------------------------------------------------- resuming


def test_killed_and_continued(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(dense, "w8", "w8a8")
    run_ladder(plan, tmp_path / "whole", jobs=3)
    visits = []
    original = RungPass.visit

    def visit(self: RungPass, run: LayerRun) -> Any:
        visits.append((self.name, run.index))
        if len(visits) == 8:
            raise KeyboardInterrupt
        return original(self, run)

    monkeypatch.setattr(RungPass, "visit", visit)
    with pytest.raises(KeyboardInterrupt):
        run_ladder(plan, tmp_path / "killed", jobs=1)
    run_ladder(plan, tmp_path / "killed", jobs=1)
    assert ("source", 0) not in visits[8:]
    for name in ("ladder.json", "ladder.html"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    before = len(visits)
    run_ladder(plan, tmp_path / "killed")
    assert len(visits) == before
    with pytest.raises(UsageError, match="other options"):
        run_ladder(planned(dense, "w8"), tmp_path / "killed")


# ---------------------------------------------------------------------------------------------------------- command


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["ladder", *map(str, arguments)])


def test_command_and_page(dense: Path, tmp_path: Path, browser: Browser) -> None:
    small = ("--samples", "6", "--seq-len", "100", "--rung", "w8", "--rung", "fp8", "--rung", "w8a8")
    plan = run(dense, "-o", tmp_path / "out", *small, "--dry-run", "--json")
    assert json.loads(plan.stdout)["passed_over"] == ["fp8"]
    assert not (tmp_path / "out").exists()
    done = run(dense, "-o", tmp_path / "out", *small)
    assert done.exit_code == 0, done.output
    assert "not for this source: fp8" in done.output
    check_report(browser, tmp_path / "out" / "ladder.html", "What each step costs", "每一步的代价")


def test_speed_is_that_of_the_runtime(minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own command, run in this process on a short prompt; weights alone have no kernel."""
    calls: list[list[str]] = []

    def run_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "quantkit_instruments.cli"]
        calls.append(command[3:])
        done = CliRunner().invoke(runtime_cli, command[3:])
        return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

    monkeypatch.setattr(subprocess, "run", run_here)
    for name, value in (("PROMPT_TOKENS", 16), ("STEPS", 2), ("SEQUENCES", 2)):
        monkeypatch.setattr(speed, name, value)
    arithmetic = Arithmetic(load_recipe("w8a8"), load_recipe("w8a8"))
    weights, keys = load_rungs(None, ("w8", "w8a8+keys", "w8a8"))[0::2]
    assert not speed.runs(weights)
    assert speed.runs(keys)
    found = speed.measure(minimax, keys, arithmetic, tmp_path, device="cpu")
    assert 0 < found.token_s < 60
    assert found.prefill_per_s > 0
    assert found.decode_per_s > 0
    assert calls[0][calls[0].index("--kv-keys") + 1] == "int8"
    with pytest.raises(QuantkitError, match="ended with exit code 2"):
        speed.measure(minimax, keys, arithmetic, tmp_path, device="tpu")


def test_an_fp8_source_has_its_own_rung(dense: Path) -> None:
    rung = load_rungs(None, ("fp8",))[0]
    source = Source(dense)
    assert not rung.applies(source)
    key, entry = next(iter(source.entries.items()))
    source.entries[key] = replace(entry, format=replace(entry.format, name="fp8-block"))
    assert rung.applies(source)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rungs: []", "rungs"),
        ("rungs: [{name: a, change: b, colour: c}]", "rungs.0.colour"),
        ("rungs: [{name: a, change: b, after: z}]", "`after` names 'z'"),
        ("rungs: [{name: a, change: b}, {name: a, change: b}]", "two rungs"),
        ("rungs: [{name: ../a, change: b}]", "rungs.0.name"),
        ("{", "not YAML"),
    ],
)
def test_lists_are_checked(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_rungs(path)
    assert said in str(caught.value)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        load_rungs(None, ("w4",))
    assert "w8a8" in caught.value.choices
