"""A baseline is what transformers' whole model answers, the same bytes however it was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import quantkit.baseline.run as run_module
from quantkit.baseline.plan import Options, make_plan
from quantkit.baseline.run import run_plan
from quantkit.baseline.texts import TextOptions
from quantkit.cli import main
from quantkit.errors import InputError, UsageError
from quantkit.spec.baseline import LOGPROBS_NAME, Baseline, Sequence, layer_name, read_baseline
from quantkit.spec.tensorfile import read_tensors
from tests.baseline.helpers import KINDS, SMALL, with_tokenizer
from tests.reference import transformers_model


@pytest.fixture(scope="module")
def whole(minimax: Path) -> torch.nn.Module:
    return transformers_model(minimax, torch.float32)


def logprobs(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sequence.ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".quantkit-work" not in path.parts
    }


def test_distributions_are_those_of_the_whole_model(baseline: Path, whole: torch.nn.Module) -> None:
    found, rows = read_baseline(baseline), read_tensors(baseline / LOGPROBS_NAME)
    spans = found.rows()
    assert {sequence.use for sequence in found.sequences} == {"text", "long", "needle", "prompt", "probe"}
    for sequence in found.sequences:
        start, stop = spans[sequence.name]
        want = logprobs(whole, sequence)[list(sequence.scored)]
        ids, top = rows["top_ids"][start:stop].long(), rows["top_logprobs"][start:stop]
        torch.testing.assert_close(top.double(), want.gather(-1, ids), atol=1e-4, rtol=0)
        torch.testing.assert_close(top.double(), want.topk(16).values, atol=1e-4, rtol=0)
        following = torch.tensor([sequence.ids[place + 1] for place in sequence.scored])
        want_next = want.gather(-1, following[:, None]).squeeze(-1)
        torch.testing.assert_close(rows["next_logprob"][start:stop].double(), want_next, atol=1e-4, rtol=0)
        mass = top.double().exp().sum(-1) + rows["rest_logprob"][start:stop].double().exp()
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-5, rtol=0)


def test_continuations_are_greedy(baseline: Path, whole: torch.nn.Module) -> None:
    prompts = read_baseline(baseline).of_use("prompt")
    assert len(prompts) == 3
    for prompt in prompts:
        with torch.no_grad():
            want = whole.generate(  # type: ignore[operator]
                torch.tensor([prompt.ids[: prompt.prompt_tokens]]), max_new_tokens=4, do_sample=False, pad_token_id=0
            )
        assert tuple(want[0].tolist()) == prompt.ids


def test_layers_are_those_of_the_whole_model(baseline: Path, whole: torch.nn.Module) -> None:
    found = read_baseline(baseline)
    (probe,) = found.of_use("probe")
    with torch.no_grad():
        hidden = whole(input_ids=torch.tensor([probe.ids]), output_hidden_states=True, use_cache=False).hidden_states
    chosen = []
    for layer in whole.model.layers:  # type: ignore[union-attr]
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: chosen.append(args[1]))
    texts = found.of_use("text")
    for text in texts:
        with torch.no_grad():
            whole(input_ids=torch.tensor([text.ids]), use_cache=False)
    for layer in range(found.layers):
        tensors = read_tensors(baseline / layer_name(layer))
        torch.testing.assert_close(tensors["input"], hidden[layer][0], atol=1e-5, rtol=1e-5)
        if layer + 1 < found.layers:  # transformers hands out the last one after the final norm
            torch.testing.assert_close(tensors["output"], hidden[layer + 1][0], atol=1e-5, rtol=1e-5)
        want = torch.cat(chosen[layer :: found.layers]).sort(-1).values
        assert (tensors["routing"].long() == want).double().mean() > 0.999


def test_perplexities_are_those_of_the_texts(baseline: Path, whole: torch.nn.Module) -> None:
    found = read_baseline(baseline)
    (math_text,) = [text for text in found.of_use("text") if text.kind == "math"]
    losses = -logprobs(whole, math_text)[:-1].gather(-1, torch.tensor(math_text.ids[1:])[:, None])
    (row,) = [row for row in found.perplexity if row.kind == "math"]
    assert row.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)
    assert row.tokens == len(math_text.ids) - 1


def test_streamed_spooled_and_with_more_jobs_the_bytes_are_the_same(
    baseline: Path, minimax: Path, tmp_path: Path
) -> None:
    plan = make_plan(minimax, SMALL, stream=True, memory_budget=0)
    assert plan.spools
    assert not plan.resident
    run_plan(plan, tmp_path / "out", jobs=3)
    assert files(tmp_path / "out") == files(baseline)


def test_a_killed_run_goes_on(baseline: Path, minimax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of the layers, then after some new tokens."""
    plan, real, calls = make_plan(minimax, SMALL), run_module.write_sealed, []

    def dying(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        calls.append(path.name)
        if path.name in ("layer-00003.safetensors", "pass-00002.safetensors") and calls.count(path.name) == 1:
            raise KeyboardInterrupt
        real(path, tensors)

    monkeypatch.setattr(run_module, "write_sealed", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, tmp_path / "out")
    run_plan(plan, tmp_path / "out")
    assert files(tmp_path / "out") == files(baseline)
    assert calls.count("layer-00002.safetensors") == 1
    assert calls.count("pass-00001.safetensors") == 1
    assert run_plan(plan, tmp_path / "out").already


def test_other_options_are_refused(baseline: Path, minimax: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(baseline, tmp_path / "copy")
    other = Options(SMALL.texts, new_tokens=3, top_k=16)
    with pytest.raises(UsageError, match="other options") as caught:
        run_plan(make_plan(minimax, other), copy)
    assert any("new_tokens" in item for item in caught.value.items)


def test_full_keeps_every_token(minimax: Path, tmp_path: Path) -> None:
    texts = TextOptions(KINDS, texts=1, tokens=20, prompts=0, long_tokens=1, probe_tokens=12)
    options = Options(texts, 0, 4, full=True)
    found = run_plan(make_plan(minimax, options), tmp_path / "out").baseline
    rows = read_tensors(tmp_path / "out" / LOGPROBS_NAME)
    assert found.full
    assert rows["top_ids"].shape[1] == 4096
    assert bool(torch.isneginf(rows["rest_logprob"]).all())


@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa", "qwen3_next", "gemma3", "minimax_m3"])
def test_every_kind_of_layer_is_recorded(family: str, tiny: object, minimax: Path, tmp_path: Path) -> None:
    """Sinks and stacked experts, layers that share an indexer, linear attention, (1 + w) norms, sparse blocks."""
    model = with_tokenizer(tiny(family), minimax, tmp_path / "model")  # type: ignore[operator]
    options = Options(TextOptions(KINDS, texts=1, tokens=24, long_tokens=80, probe_tokens=24), 2, 8)
    found = run_plan(make_plan(model, options), tmp_path / "out").baseline
    assert found.limits == {"gpt_oss": (16,), "glm_moe_dsa": (16,), "gemma3": (16,), "minimax_m3": (12,)}.get(
        family, ()
    )
    last = read_tensors(tmp_path / "out" / layer_name(found.layers - 1))
    names = [name for name in last if name.startswith("probe.") and name.endswith(".out")]
    assert any(".experts.out" in name for name in names) == ("experts.output" in last)
    assert any("o_proj" in name or "out_proj" in name for name in names)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in last.values() if tensor.is_floating_point())


def test_a_damaged_baseline_is_refused(baseline: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(baseline, tmp_path / "copy")
    path = copy / layer_name(2)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_baseline(copy)
    assert caught.value.items == (layer_name(2),)
    path.unlink()
    with pytest.raises(InputError, match="missing"):
        read_baseline(copy)


def test_the_command_prints_sizes_and_the_next_step(minimax: Path, tmp_path: Path) -> None:
    words = ["baseline", str(minimax), "-o", str(tmp_path / "out"), "--texts", "1", "--tokens", "16"]
    words += ["--long-tokens", "1", "--new-tokens", "2", "--probe-tokens", "12", "--data", "builtin:code"]
    dry = CliRunner().invoke(main, [*words, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)["passes"] == 2
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "2 passes" in done.output
    assert "next: quantkit-runtime compare" in done.output
    again = CliRunner().invoke(main, words)
    assert "nothing was done" in again.output


def test_default_texts_are_none_that_a_default_calibration_draws(minimax: Path) -> None:
    from quantkit.archs.modeling import load_tokenizer
    from quantkit.calibrate.data import draw_samples
    from quantkit.recipe import Calibration

    tokenizer = load_tokenizer(minimax)
    samples = draw_samples(tokenizer, Calibration()).samples
    drawn = {tuple(sample.ids[:64].tolist()) for sample in samples}
    assert len(samples) == 512
    plan = make_plan(minimax, Options())
    texts = [text for text in plan.sequences if text.use == "text"]
    assert len(texts) == 24
    assert not [text.name for text in texts if text.ids[:64] in drawn]


def test_a_turn_without_a_role_is_no_prompt(minimax: Path, tmp_path: Path) -> None:
    """The tiny tokenizer's template asks for none."""
    turn, path = {"content": "The sea is grey and salt. " * 9}, tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in ([turn], [turn, turn])))
    done = CliRunner().invoke(
        main, ["baseline", str(minimax), "-o", str(tmp_path / "out"), "--data", str(path), "--dry-run"]
    )
    assert done.exit_code in (0, 3), done.exception
    assert done.exit_code == 0 or "template" in done.stderr


def test_a_foreign_json_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text('{"format_version": 1, "surprise": 2}')
    with pytest.raises(InputError, match="not a baseline") as caught:
        read_baseline(tmp_path)
    assert any(item.startswith("surprise") for item in caught.value.items)
    assert set(Baseline.model_fields) - {"format_version", "warnings"} <= {
        item.split(":")[0] for item in caught.value.items
    }
