"""smoke_load as users call it, and the count of INT8 GEMMs, which must be able to fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from quantkit.errors import VerificationError
from quantkit_instruments import smoke
from quantkit_instruments.cli import main
from quantkit_instruments.trace import GemmTrace, gemm_rows, judge, trace
from quantkit_runtime import graft
from quantkit_runtime.account import Account, unfused
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.layers import Int8Experts, Int8Linear
from tests.runtime import outputs
from tests.runtime.conftest import TINY

ROOT = Path(__file__).resolve().parents[3]
Converted = Callable[..., Path]


def int8_weights(source: Path) -> set[str]:
    """Every quantized weight of a source, one by one, from its names on disk alone."""
    rows = outputs.quantize(outputs.architecture(source), outputs.read_source(source), outputs.w8a8)
    return {key.shard_name.removesuffix(".weight") for key, tensor, _ in rows.values() if tensor.dtype == torch.int8}


def run_cli(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["smoke-load", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def script(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The script in a process that cannot see an installed quantkit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(ROOT / "runtime" / "smoke_load.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


# --------------------------------------------------------------------------------------------- the command


def test_the_script_prints_one_json_document(converted: Converted, tmp_path: Path) -> None:
    done = script(converted(TINY[0], "sharded"), "--prompt", "The king", "--max-new-tokens", 5, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["form"] == "sharded"
    assert report["int8"]["run"] == report["int8"]["expected"] == len(int8_weights(outputs.MODELS / TINY[0]))
    assert report["forward"]["finite"] is True
    assert report["forward"]["logits_shape"][-1] == 4096
    assert report["generated"]["text"].startswith("The king")
    assert 1 <= len(report["generated"]["tokens"]) <= 5
    assert report["checksums"]["files"] == 2
    assert report["device"]["family"] == "cpu"
    assert report["dtype"] == "float32"


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_the_tables_for_people(converted: Converted, model: str, form: str) -> None:
    code, out, _ = run_cli(converted(model, form), "--prompt", "The king", "--max-new-tokens", 3, "--device", "cpu")
    assert code == 0
    count = len(int8_weights(outputs.MODELS / model))
    assert "prefill: eager (no graphs were asked for); attention: torch (no other kernel on cpu)" in " ".join(
        out.split()
    )
    for text in ("Memory, planned", "Memory, measured", "weights: experts", "KV cache", "all finite", "f32-chunks"):
        assert text in out
    assert f"INT8 GEMM weights run / expected: {count} / {count} (100.0 %)" in out
    assert "correct" in out
    assert "passed" in out


def test_an_unquantized_model_says_so(converted: Converted) -> None:
    code, out, _ = run_cli(converted(TINY[0], "checkpoint", "keep"), "--max-new-tokens", 2)
    assert code == 0
    assert "the files hold none" in out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--device", "tpu"], 2, "choices: auto, cpu, cuda, hip"),
        (["--dtype", "float8"], 2, "choices: auto, bfloat16, float32"),
        (["--max-new-tokens", "0"], 2, "max-new-tokens"),
    ],
)
def test_bad_use_exits_with_2(converted: Converted, options: list[str], code: int, message: str) -> None:
    found, out, err = run_cli(converted(TINY[0]), *options)
    assert found == code
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch sees a card")
@pytest.mark.parametrize("device", ["cuda", "hip"])
def test_a_card_that_is_not_there_exits_with_2(converted: Converted, device: str) -> None:
    code, _, err = run_cli(converted(TINY[0]), "--device", device)
    assert code == 2
    assert "choices: auto, cpu" in err


def test_damaged_files_exit_with_3(converted: Converted, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(converted(TINY[0]), tmp_path / "out"))
    path = next(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)
    code, out, err = run_cli(folder)
    assert code == 3
    assert "error: " in err
    assert "next: " in err
    assert "Traceback" not in out + err


def test_a_wrong_path_exits_with_3(tmp_path: Path) -> None:
    code, _, err = run_cli(tmp_path / "nothing")
    assert code == 3
    assert "does not exist" in err


def test_out_of_memory_in_the_forward_shows_the_plan(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Int8Linear, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("HIP out of memory")

    monkeypatch.setattr(Int8Linear, "forward", fail)
    code, _, err = run_cli(converted(TINY[0]))
    assert code == 3
    assert "an allocation failed" in err
    assert "KV cache" in err


def test_help_has_an_example() -> None:
    assert "Example:" in CliRunner().invoke(main, ["smoke-load", "--help"]).output


# ------------------------------------------------------------------------------------------------ counting


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_expected_gemms_are_every_quantized_weight(
    converted: Converted, load: Callable[..., LoadedModel], model: str, form: str
) -> None:
    assert load(converted(model, form)).account.expected == int8_weights(outputs.MODELS / model)


@pytest.mark.parametrize("model", TINY)
def test_float_gemms_are_found_wherever_they_are_called(
    converted: Converted, load: Callable[..., LoadedModel], model: str
) -> None:
    """Routers call torch's linear function, not a module; the trace sees their weights all the same."""
    loaded = load(converted(model))
    arch, ids = loaded.files.arch, loaded.files.experts
    with torch.no_grad(), trace(loaded):
        loaded.model(input_ids=torch.tensor([[1, 5, 9]]))
    seen = {name for row, names in loaded.account.weights.items() if row[1] == "float32" for name in names}
    kept = {"router", "lm_head", "mla.q_a", "mla.kv_a"}
    want = {n for row in loaded.planned if row.key.role in kept for n in unfused(arch, ids, row.key)}
    assert seen == want


def replace_linear(loaded: LoadedModel, name: str) -> None:
    """What a silent fallback is: the same numbers, computed in floating point."""
    module = loaded.model.get_submodule(name)
    assert isinstance(module, Int8Linear)
    linear = nn.Linear(module.in_features, module.out_features, bias=False)
    linear.weight.data = module.weight.float() * module.weight_scale
    parent, _, leaf = name.rpartition(".")
    setattr(loaded.model.get_submodule(parent), leaf, linear)


def test_a_linear_layer_in_floating_point_fails_the_run(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    real = graft.load_model

    def sabotaged(*args: Any, **kwargs: Any) -> LoadedModel:
        loaded = real(*args, **kwargs)
        replace_linear(loaded, "model.layers.2.self_attn.o_proj")
        return loaded

    monkeypatch.setattr(smoke, "load_model", sabotaged)
    code, _, err = run_cli(converted(TINY[0]), "--max-new-tokens", 2)
    assert code == 4
    assert "1 of 312 GEMMs that the files hold in INT8 did not run in INT8" in err
    assert "layers.2.attn.o" in err


def test_a_float_parameter_that_is_stored_in_int8_is_a_fallback(
    converted: Converted, load: Callable[..., LoadedModel]
) -> None:
    """As above, but the trace is made afterwards, so it knows the parameter and its GEMM by name."""
    loaded = load(converted(TINY[0]))
    replace_linear(loaded, "model.layers.2.self_attn.o_proj")
    with torch.no_grad(), trace(loaded):
        loaded.model(input_ids=torch.tensor([[1, 5, 9]]))
    assert judge(loaded.account).fallbacks == ("layers.2.attn.o",)


def test_experts_in_floating_point_fail_the_run(converted: Converted, load: Callable[..., LoadedModel]) -> None:
    loaded = load(converted(TINY[1]))
    module = loaded.model.get_submodule("model.layers.3.mlp.experts")
    stored = module.get_submodule("down_proj")
    assert isinstance(stored, Int8Experts)
    del module._modules["down_proj"]
    module.down_proj = nn.Parameter(stored.weight.float() * stored.weight_scale)
    with torch.no_grad(), trace(loaded):
        loaded.model(input_ids=torch.arange(3, 60)[None])
    smoke.self_test(loaded)
    verdict = judge(loaded.account)
    assert verdict.fallbacks
    assert {name.rsplit(".", 1)[0] for name in verdict.fallbacks} == {"layers.3.expert.down"}
    assert len(verdict.fallbacks) + len(verdict.missing) == 16
    assert not verdict.passed


def test_experts_without_tokens_are_told_apart(converted: Converted, load: Callable[..., LoadedModel]) -> None:
    loaded = load(converted(TINY[0]))
    with torch.no_grad(), trace(loaded):
        loaded.model(input_ids=torch.tensor([[1]]))
    before = judge(loaded.account)
    # one token reaches 2 of 16 experts in each of 6 layers
    assert len(before.missing) == 6 * 14 * 3
    assert set(before.missing) <= loaded.account.routed
    smoke.self_test(loaded)
    after = judge(loaded.account)
    assert (after.forward, after.self_tested, after.missing) == (before.forward, 6 * 14 * 3, ())
    assert after.passed


def test_a_dense_layer_that_never_ran_is_missing(converted: Converted, load: Callable[..., LoadedModel]) -> None:
    loaded = load(converted(TINY[0]))
    smoke.self_test(loaded)
    verdict = judge(loaded.account)
    assert set(verdict.missing) == loaded.account.expected - loaded.account.routed
    assert not verdict.passed


def test_a_wrong_kernel_fails_the_self_test(converted: Converted, load: Callable[..., LoadedModel]) -> None:
    loaded = load(converted(TINY[0]))
    module = loaded.model.get_submodule("model.layers.1.mlp.experts.down_proj")
    right = module._run
    module.__dict__["_run"] = lambda *arguments: right(*arguments) * 1.01
    with pytest.raises(VerificationError, match=r"layers.1.mlp.experts.down_proj, expert 0"):
        smoke.self_test(loaded)


def test_offsets_of_a_grouped_gemm_are_not_its_dtype() -> None:
    account = Account()
    a_MK, b_EKN = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 16, dtype=torch.bfloat16)
    with GemmTrace(account, nn.Module(), {}):
        torch.ops.aten._grouped_mm(a_MK, b_EKN, torch.tensor([2, 4], dtype=torch.int32))
    assert {row.dtype for row in gemm_rows(account)} == {"bfloat16"}


def test_more_tokens_than_positions_are_refused_before_loading(converted: Converted, tmp_path: Path) -> None:
    """No weights are there: the tokenizer and config.json alone decide."""
    model = converted(TINY[0], "checkpoint")
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    code, _, err = run_cli(tmp_path, "--prompt", "The king", "--max-new-tokens", 40, "--device", "cpu")
    assert code == 2, err
    assert "the model has 8" in err
    assert "--max-new-tokens" in err
