"""The whole command on the two real models: the artifact, faults, crashes, refusals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.archs import Key
from quantkit.calibrate import experts, final, passes
from quantkit.calibrate.run import calibrate, make_plan, run_plan
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.reader import Source
from quantkit.cli import main
from quantkit.errors import InputError, UsageError
from quantkit.spec.calibration import ARTIFACT_NAMES, CalibrationSummary, read_summary
from quantkit.spec.tensorfile import read_header
from tests.calibrate.conftest import small_recipe
from tests.families import make_tiny


@pytest.fixture(scope="session")
def artifact(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "out"
    calibrate(minimax, out, small_recipe())
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ARTIFACT_NAMES}


def edited(root: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy of a checkpoint with one tensor changed in place."""
    shutil.copytree(root, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def stop_after(original: Callable[[Path, Any], None], layers: int, saved: list[str] | None = None) -> Any:
    """`save_layer` that is interrupted once, after so many layers; names of all files go to `saved`."""
    names = [] if saved is None else saved

    def save(path: Path, record: Any) -> None:
        original(path, record)
        names.append(path.name)
        if len(names) == layers:
            raise KeyboardInterrupt

    return save


def test_coverage_minimax(artifact: Path) -> None:
    summary = read_summary(artifact)
    assert summary.coverage == 1.0
    assert summary.expected_gemms == 6 * (4 + 16 * 3)
    assert {row.role for row in summary.gemms if not row.quantized} == set()
    assert sum(summary.expert_tokens[3]) == 2 * summary.tokens
    assert all(row.tokens == summary.tokens for row in summary.gemms if row.expert is None)


def test_coverage_deepseek(deepseek: Path, tmp_path: Path) -> None:
    summary = calibrate(deepseek, tmp_path / "out", small_recipe())
    assert summary.coverage == 1.0
    assert summary.expected_gemms == 6 * 5 + 3 + 5 * (3 + 16 * 3)
    assert {row.role for row in summary.gemms if not row.quantized} == {"mla.q_a", "mla.kv_a"}
    scales = load_file(tmp_path / "out" / "scales.safetensors")
    assert scales.keys() == {f"{row.name}.weight_scale" for row in summary.gemms if row.quantized}


def test_scales_are_absmax_over_127(artifact: Path, minimax: Path) -> None:
    source = Source(minimax)
    scales = load_file(artifact / "scales.safetensors")
    for name, key in (
        ("layers.2.attn.k", Key(2, "attn.k")),
        ("layers.0.expert.up.7", Key(0, "expert.up", 7)),
        ("layers.5.expert.down.15", Key(5, "expert.down", 15)),
    ):
        weight = source.get(key).float().numpy()
        wanted = (np.abs(weight).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
        np.testing.assert_array_equal(scales[f"{name}.weight_scale"].numpy(), wanted)


def test_activations_hold_what_the_summary_says(artifact: Path) -> None:
    summary = read_summary(artifact)
    tensors = load_file(artifact / "activations.safetensors")
    row = next(row for row in summary.gemms if row.name == "layers.4.expert.down.3")
    inputs = "layers.4.expert.down_in.experts"
    assert row.tokens == int(tensors[f"{inputs}.tokens"][3])
    assert row.absmax == float(tensors[f"{inputs}.absmax"][3].max())
    ratio = tensors[f"{inputs}.token_error"][3] / tensors[f"{inputs}.square"][3]
    assert row.token_error == pytest.approx(float(ratio.sqrt()))
    assert int(tensors[f"{inputs}.histogram"][3].sum()) == row.tokens
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_report_stands_alone(artifact: Path) -> None:
    page = (artifact / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "src=" not in page
    assert 'href="http' not in page
    assert "Expert coverage" in page
    assert "Clipping between kinds of text" in page


def test_same_bytes_twice_and_spooled(artifact: Path, minimax: Path, tmp_path: Path) -> None:
    calibrate(minimax, tmp_path / "again", small_recipe())
    calibrate(minimax, tmp_path / "spooled", small_recipe(), memory_budget=0)
    assert contents(tmp_path / "again") == contents(artifact)
    assert contents(tmp_path / "spooled") == contents(artifact)
    assert not [path for path in (tmp_path / "spooled" / ".quantkit-work").iterdir() if path.suffix == ".safetensors"]


@pytest.mark.parametrize("model", ["minimax", "deepseek"])
def test_same_bytes_for_any_number_of_jobs_and_threads(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Threads that torch was given, and batches at a time; large enough that torch would split its operations."""
    root = request.getfixturevalue(model)
    found = []
    for jobs, threads in ((1, 1), (2, 3), (3, 2)):
        torch.set_num_threads(threads)
        try:
            calibrate(root, tmp_path / f"{jobs}", small_recipe(samples=36, seq_len=200), jobs=jobs)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
        found.append(contents(tmp_path / f"{jobs}"))
    assert found[0] == found[1] == found[2]


def test_operations_have_one_thread_also_in_the_pool(
    minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, int]] = set()
    original = experts.experts_forward

    def forward(*args: Any) -> torch.Tensor:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return original(*args)

    monkeypatch.setattr(experts, "experts_forward", forward)
    torch.set_num_threads(3)
    try:
        calibrate(minimax, tmp_path / "out", small_recipe(), jobs=2)
    finally:
        torch.set_num_threads(1)
    assert seen == {("batch_0", 1), ("batch_1", 1)}


def test_first_sample_in_order_is_named_whoever_finds_it(minimax: Path, tmp_path: Path) -> None:
    """All batches fail; the error is the same for any number at a time."""
    root = edited(
        minimax, tmp_path / "model", "model.layers.0.post_attention_layernorm.weight", lambda tensor: tensor.fill_(3e38)
    )
    messages = set()
    for jobs in (1, 3):
        with pytest.raises(InputError, match="is not finite on sample") as caught:
            calibrate(root, tmp_path / f"out{jobs}", small_recipe(), jobs=jobs)
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize("budget", [1 << 30, 0])
def test_state_that_layers_hand_on_is_kept_in_memory_and_on_disk(
    budget: int, minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-5, also when it is continued after a stop."""
    root = make_tiny("glm_moe_dsa", tmp_path / "model", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minimax / name, root)
    recipe = small_recipe(samples=9, seq_len=40)
    summary = calibrate(root, tmp_path / "out", recipe, memory_budget=budget)
    assert summary.coverage == 1.0
    monkeypatch.setattr(final, "save_layer", stop_after(final.save_layer, 2))
    with pytest.raises(KeyboardInterrupt):
        calibrate(root, tmp_path / "stopped", recipe, memory_budget=budget)
    calibrate(root, tmp_path / "stopped", recipe, memory_budget=(1 << 30) - budget)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "out")


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from quantkit.calibrate.run import calibrate
from tests.calibrate.conftest import small_recipe
calibrate(Path(sys.argv[1]), Path(sys.argv[2]), small_recipe(), memory_budget=int(sys.argv[3]))
"""


def killed(root: Path, out: Path, budget: int, when: str, delay: float) -> bool:
    """Run in a process of its own, SIGKILL it `delay` seconds after `when` appears; whether it was alive then."""
    command = [sys.executable, "-c", SCRIPT, str(root), str(out), str(budget)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (out / when).exists():
            time.sleep(0.002)
        time.sleep(delay)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    return alive


@pytest.mark.parametrize(
    ("budget", "when", "delay"),
    [
        (1 << 30, ".quantkit-work/layer-00002.safetensors", 0.03),
        (0, ".quantkit-work/layer-00001.safetensors", 0.05),
        (0, "scales.safetensors", 0.01),
    ],
)
def test_killed_and_continued(
    budget: int, when: str, delay: float, artifact: Path, minimax: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert killed(minimax, out, budget, when, delay), "the process ended before it was killed"
    assert not (out / "calibration.json").exists()
    assert (out / when).exists()
    calibrate(minimax, out, small_recipe(), memory_budget=budget)
    assert contents(out) == contents(artifact)


def test_finished_layers_are_not_done_again(
    artifact: Path, minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []
    monkeypatch.setattr(final, "save_layer", stop_after(final.save_layer, 2, saved))
    with pytest.raises(KeyboardInterrupt):
        calibrate(minimax, tmp_path / "out", small_recipe())
    calibrate(minimax, tmp_path / "out", small_recipe())
    assert saved == [f"layer-{layer:05d}.safetensors" for layer in range(6)]
    assert contents(tmp_path / "out") == contents(artifact)


def test_finished_run_again_does_nothing(artifact: Path, minimax: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in artifact.iterdir() if path.is_file()}
    assert run_plan(make_plan(minimax, small_recipe()), artifact).already
    assert before == {path: path.stat().st_mtime_ns for path in artifact.iterdir() if path.is_file()}


def test_other_options_are_refused_with_the_difference(artifact: Path, minimax: Path) -> None:
    with pytest.raises(UsageError, match="other options") as caught:
        calibrate(minimax, artifact, small_recipe(seed=1))
    assert "recipe.calibration.seed: 0 there, 1 now" in caught.value.items


def test_accelerators_compute_small_layers_in_float32_and_keep_hidden_states(
    minimax: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = make_plan(minimax, small_recipe(), device="cuda", memory_budget=0)
    assert plan.options["compute"] == "float32 on cuda"
    assert not plan.spools
    assert make_plan(minimax, small_recipe(), device="cpu", memory_budget=0).spools
    monkeypatch.setattr("quantkit.calibrate.plan.FLOAT32_LAYER", 1000)
    assert make_plan(minimax, small_recipe(), device="cuda").options["compute"] == "bfloat16 on cuda"
    assert make_plan(minimax, small_recipe(), device="cpu").options["compute"] == "float32 on cpu"


def test_output_places_are_refused(minimax: Path, tmp_path: Path) -> None:
    root = tmp_path / "model"
    shutil.copytree(minimax, root)
    for out in (root, root / "inside", tmp_path):
        with pytest.raises(UsageError, match="the source"):
            calibrate(root, out, small_recipe())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        calibrate(root, tmp_path / "full", small_recipe())
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"


def test_skipped_expert_is_an_error(minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts._occupied

    def without_five(routing: experts.Routing) -> Iterator[tuple[int, int, int]]:
        return (row for row in original(routing) if row[0] != 5)

    monkeypatch.setattr(experts, "_occupied", without_five)
    with pytest.raises(InputError, match="3 of 52 GEMMs of layer 0 were not observed") as caught:
        calibrate(minimax, tmp_path / "out", small_recipe())
    assert set(caught.value.items) == {f"layers.0.expert.{part}.5" for part in ("gate", "up", "down")}
    assert not (tmp_path / "out" / "calibration.json").exists()


def test_experts_that_nobody_observes_are_an_error(
    minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        passes, "LayerStream", lambda *args, **options: LayerStream(*args, **{**options, "experts": ""})
    )
    with pytest.raises(InputError, match="GEMMs of layer 0 were not observed") as caught:
        calibrate(minimax, tmp_path / "out", small_recipe())
    assert any(name.startswith("layers.0.expert.down") for name in caught.value.items)


def test_weight_that_is_not_finite_is_named(minimax: Path, tmp_path: Path) -> None:
    for number, name in enumerate(
        ("model.layers.1.block_sparse_moe.experts.4.w2.weight", "model.layers.2.input_layernorm.weight")
    ):
        root = edited(minimax, tmp_path / f"model{number}", name, lambda tensor: tensor.view(-1)[7:8].fill_(torch.nan))
        with pytest.raises(InputError, match="NaN or infinity") as caught:
            calibrate(root, tmp_path / f"out{number}", small_recipe())
        assert name in str(caught.value) or "layers.2.norm.input" in str(caught.value)


def test_activation_that_is_not_finite_names_sample_and_module(minimax: Path, tmp_path: Path) -> None:
    """The norm's weight is finite, its product with the hidden states is not."""
    root = edited(
        minimax,
        tmp_path / "model",
        "model.layers.0.post_attention_layernorm.weight",
        lambda tensor: tensor.fill_(3e38),
    )
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.experts.* is not finite on sample \d+ \("):
        calibrate(root, tmp_path / "out", small_recipe())


def test_experts_with_few_tokens_fall_back_and_are_named(minimax: Path, tmp_path: Path) -> None:
    """Expert 9 of layer 1 is never chosen: its statistics are its layer's, its weights are quantized all the same."""
    root = edited(
        minimax,
        tmp_path / "model",
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
        lambda tensor: tensor[9].fill_(-1e4),
    )
    summary = calibrate(root, tmp_path / "out", small_recipe())
    rows = {row.name: row for row in summary.gemms if row.fallback}
    assert rows.keys() >= {f"layers.1.expert.{part}.9" for part in ("gate", "up", "down")}
    row = rows["layers.1.expert.down.9"]
    others = [each for each in summary.gemms if each.layer == 1 and each.role == "expert.down" and each.expert != 9]
    assert (row.tokens, row.fallback) == (0, "all experts of layer 1")
    assert row.absmax == max(each.absmax for each in others)
    assert row.token_error > 0
    assert summary.coverage == 1.0
    assert any("layer 1 expert 9 (0)" in warning for warning in summary.warnings)
    assert "layers.1.expert.down.9.weight_scale" in load_file(tmp_path / "out" / "scales.safetensors")


def test_nothing_quantized_gives_statistics_without_scales(minimax: Path, tmp_path: Path) -> None:
    summary = calibrate(minimax, tmp_path / "out", small_recipe("bf16"))
    assert summary.coverage == 1.0
    assert load_file(tmp_path / "out" / "scales.safetensors") == {}


ARGUMENTS = ["--samples", "18", "--seq-len", "48"]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])


def test_command_prints_json_alone(minimax: Path, tmp_path: Path) -> None:
    result = invoke(minimax, "-o", tmp_path / "out", *ARGUMENTS, "--json")
    assert result.exit_code == 0, result.output
    assert CalibrationSummary.model_validate(json.loads(result.stdout)) == read_summary(tmp_path / "out")
    again = invoke(minimax, "-o", tmp_path / "out", *ARGUMENTS)
    assert "nothing was done" in again.stdout
    assert "coverage 100.0%" in again.stdout


def test_memory_of_a_search_is_told(minimax: Path) -> None:
    """The rows that it samples, the second moments and what is made of the weights, by the sizes of the model."""
    values = small_recipe(held_out=0)
    rounds = type(values).model_validate({**values.model_dump(), "methods": [{"name": "gptq"}]})
    plain, searches = make_plan(minimax, values), make_plan(minimax, rounds)
    dims, jobs, rows = plain.source.dims, plain.default_jobs, plain.samples.tokens
    heads, routed = dims.heads * dims.v_head_dim, dims.experts_per_token * dims.moe_intermediate
    sampled = 2 * 4 * rows * (2 * dims.hidden + heads + routed)
    moments = jobs * 24 * max(dims.hidden, heads, dims.moe_intermediate) ** 2
    inputs = [(dims.hidden, (dims.heads + 2 * dims.kv_heads) * dims.v_head_dim), (heads, dims.hidden)]
    inputs += dims.experts * [(dims.hidden, 2 * dims.moe_intermediate), (dims.moe_intermediate, dims.hidden)]
    weights = 46 * sum(sorted((k * n for k, n in inputs), reverse=True)[:jobs])
    assert searches.memory_bytes - plain.memory_bytes == sampled + moments + weights


@pytest.mark.parametrize("name", ["w8a8", "w8a8-gptq"])
def test_size_of_the_artifact_is_told(name: str, minimax: Path, tmp_path: Path) -> None:
    """But for report, summary, headers and statistics of a router's input; codes are as large as the weights."""
    plan = make_plan(minimax, small_recipe(name, held_out=0))
    run_plan(plan, tmp_path / "out")
    files = (tmp_path / "out").glob("*.safetensors")
    size = sum(file.stat().st_size - read_header(file).payload_start for file in files)
    assert plan.artifact_bytes == pytest.approx(size, rel=0.1)


def test_dry_run_writes_nothing(minimax: Path, tmp_path: Path) -> None:
    result = invoke(minimax, "-o", tmp_path / "out", *ARGUMENTS, "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert (plan["gemms"], plan["samples"], plan["spool_bytes"]) == (312, 18, 0)
    assert plan["memory_bytes"] > 0
    assert 0 < plan["estimated_seconds"] < 3600
    assert not (tmp_path / "out").exists()


def test_dry_run_tries_no_layer_that_is_larger_than_the_free_memory(
    minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.calibrate.estimate.free_bytes", lambda device: 2**20)
    monkeypatch.setattr("quantkit.calibrate.estimate.LayerStream", None)
    result = invoke(minimax, "-o", tmp_path / "out", *ARGUMENTS, "--dry-run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert re.search(r"time +unknown: a layer takes [\d.]+ MiB in float32 on cpu, and 1.00 MiB are free", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--data", "builtin:code"], 2, "--force-sources"),
        (["--data", "builtin:nothing"], 2, "no shipped text"),
        (["--data", "builtin:code=many"], 2, "not a positive weight"),
        (["--recipe", "nowhere"], 2, "no recipe"),
        (["--seq-len", "4096"], 2, "2048 positions"),
        (["--device", "cuda"], 2, "no CUDA or HIP device"),
    ],
)
def test_bad_use(arguments: list[str], code: int, message: str, minimax: Path, tmp_path: Path) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a device")
    result = invoke(minimax, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_bad_input(minimax: Path, tmp_path: Path) -> None:
    assert invoke(tmp_path / "nothing", "-o", tmp_path / "out").exit_code == 3
    root = tmp_path / "model"
    shutil.copytree(minimax, root)
    (root / "tokenizer.json").unlink()
    result = invoke(root, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "tokenizer" in result.stderr
    rule = "name: x\ndescription: y\nrules: [{match: '*.nothing', scheme: keep, reason: test}]\n"
    (tmp_path / "recipe.yaml").write_text(rule)
    result = invoke(minimax, "-o", tmp_path / "out", "--recipe", tmp_path / "recipe.yaml")
    assert result.exit_code == 2
    assert "*.nothing" in result.stderr


@pytest.mark.parametrize("number", [4096, 2**31])
def test_tokens_that_the_model_does_not_have_are_refused(number: int, minimax: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(minimax, tmp_path / "model"))
    raw = json.loads((root / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    raw["added_tokens"].append({"id": number, "content": " the", **flags})
    (root / "tokenizer.json").write_text(json.dumps(raw))
    for command in (("calibrate", *ARGUMENTS), ("baseline", "--texts", "2", "--tokens", "200")):
        arguments = [command[0], root, "-o", tmp_path / "out", *command[1:], "--dry-run"]
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == 3, result.output
        assert "the tokenizer gives the id 4,096" in result.stderr  # the library numbers added tokens itself


def test_examples_of_the_help_work(minimax: Path, tmp_path: Path) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    found = re.findall(r"^ +quantkit calibrate (MODEL.*?)(?:   .*)?$", result.stdout, re.MULTILINE)
    assert len(found) == 3
    rows = [{"messages": [{"role": "user", "content": f"{'say more ' * 9}{number}"}]} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"MODEL": minimax, "CALIBRATION": tmp_path / "out", "chats.jsonl=2": f"{tmp_path / 'chats.jsonl'}=2"}
    for example in found:
        words = [places.get(word, word) for word in example.split() if word != "--dry-run"]
        result = invoke(*words, *ARGUMENTS, "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["samples"] == 18
