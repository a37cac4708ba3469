"""generate, bench and doctor as users call them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quantkit.archs.modeling import load_tokenizer
from quantkit.errors import UsageError
from quantkit_instruments import bench, doctor
from quantkit_instruments.cli import main
from quantkit_instruments.tokenizer import encode, vocab_size
from quantkit_runtime import fuse
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.session import make_runner
from tests.families import VOCAB
from tests.runtime import outputs
from tests.runtime.conftest import TINY

SOURCE = outputs.MODELS / TINY[0]
Converted = Callable[..., Path]


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# --------------------------------------------------------------------------------------------- generate


def test_generate_prints_texts_and_one_json_document(converted: Converted, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Once upon a time\n\nThe king\n")
    options = ("--prompt", "The sea", "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 6)
    code, out, err = run("generate", converted(TINY[0]), *options, "--json")
    assert code == 0, err
    report = json.loads(out)
    texts = [row["text"] for row in report["generated"]]
    assert [text.startswith(start) for text, start in zip(texts, ("The sea", "Once upon", "The king"), strict=True)]
    assert report["kv_cache"] == "paged, keys int8, values float32, blocks of 16"
    assert {**report["counts"], "positions": 0} == {"prefills": 1, "decodes": 5, "preemptions": 0, "positions": 0}
    assert report["eager_because"] == "graphs need a card"
    attention, why = "torch (no other kernel on cpu)", "graphs need a card"
    ran = {"graphs": [], "eager_because": why, "replays": 0, "eager": 1}
    assert report["prefill_runs"] == {"attention": attention, **ran}
    memory = report["memory"]
    assert memory["peak"] == sum(memory[key] for key in ("weights", "KV pool", "workspace", "graphs"))
    alone = json.loads(run("generate", converted(TINY[0]), *options[:2], *options[4:], "--json")[1])
    assert alone["generated"][0] == report["generated"][0]
    code, out, _ = run("generate", converted(TINY[0]), *options)
    assert code == 0
    counted = "1 of prefill, 5 of decode, of which 0 and 0 were graphs"
    how = f"prefill: eager ({why}); attention: {attention}"
    for text in ("KV pool", "What the memory has room for", "6 new tokens", counted, how):
        assert text in " ".join(out.split())


def test_float_keys_give_the_tokens_of_transformers(converted: Converted) -> None:
    """And INT8 keys, on these texts, the same."""
    ids = load_tokenizer(SOURCE)("The king said", return_tensors="pt").input_ids
    from tests.reference import fake_quantized, greedy

    want = greedy(fake_quantized(SOURCE), ids, 8)
    for keys in ("auto", "int8"):
        options = ("--prompt", "The king said", "--max-new-tokens", 8, "--kv-keys", keys, "--json")
        assert json.loads(run("generate", converted(TINY[0]), *options)[1])["generated"][0]["tokens"] == want


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--temperature", "-1", "--top-p", "2"), 2, "sampling options are out of range"),
        (("--kv-keys", "fp8"), 2, "choices: auto, bf16, float32, int8"),
        (("--prompts", "no-such-file"), 3, "no-such-file"),
        (("--prompt", "The", "--prompt", ""), 2, "the prompt is empty"),
        (("--max-new-tokens", "9999"), 2, "positions; the model has"),
    ],
)
def test_bad_use_says_what_to_do(converted: Converted, options: tuple[str, ...], code: int, message: str) -> None:
    found, out, err = run("generate", converted(TINY[0]), *options)
    assert (found, message in err, "next: " in err or "choices: " in err) == (code, True, True)
    assert "Traceback" not in out + err


def test_nothing_is_no_prompt_also_where_the_tokenizer_makes_a_token_of_it(converted: Converted) -> None:
    def begins(_text: str, **_options: bool) -> dict[str, list[int]]:
        return {"input_ids": [1]}

    with pytest.raises(UsageError, match="the prompt is empty"):
        encode(begins, "", vocab_size(converted(TINY[0])))
    assert encode(begins, "a", vocab_size(converted(TINY[0]))) == [1]


@pytest.mark.parametrize("command", ["generate", "smoke-load"])
def test_tokens_that_the_model_does_not_have_are_refused(command: str, converted: Converted, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(converted(TINY[0]), tmp_path / "out"))
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    raw["added_tokens"].append({"id": 4096, "content": "xyz", **flags})
    path.write_text(json.dumps(raw))
    code, _, err = run(command, folder, "--prompt", "an xyz", "--no-verify", "--device", "cpu")
    assert (code, "the tokenizer gives the id 4,096, the model's vocabulary has 4,096" in err) == (3, True)


# --------------------------------------------------------------------------------------------- bench


def test_bench_measures_every_shape_beside_the_source(converted: Converted) -> None:
    options = ("--lengths", "6,20,99999", "--batches", "1,2,3", "--sweep-length", 6, "--steps", 3, "--repeats", 1)
    code, out, err = run("bench", converted(TINY[0]), *options, "--baseline", "bf16", SOURCE, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["baseline"]["dtype"] == "bfloat16"
    for rows in (report["candidate"], report["baseline"]):
        assert [row["length"] for row in rows["prefill"]] == [6, 20]
        assert [(row["length"], row["batch"]) for row in rows["decode"]] == [(6, 1), (20, 1), (6, 2), (6, 3)]
        assert rows["knee"]["batch"] >= rows["knee"]["step_back"]
        assert rows["left_out"] == []
    assert "times BF16" in err
    assert "no such positions: 99,999 tokens" in err


def test_bench_turns_fusions_on_one_by_one(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "PASSES", {name: fuse.PASSES[name] for name in ("qkv", "gate_up")})
    options = (
        "--lengths",
        14,
        "--batches",
        1,
        "--sweep-length",
        14,
        "--steps",
        2,
        "--repeats",
        1,
        "--ablate",
        "--json",
    )
    code, out, err = run("bench", converted(TINY[0]), *options)
    assert code == 0, err
    rows = json.loads(out)["ablation"]
    assert [row["added"] for row in rows] == ["none", "qkv", "gate_up"]
    assert all(row["ttft"] > 0 and row["p50"] > 0 for row in rows)
    assert "+ gate_up" in err
    assert [int(count) > 0 for count in re.findall(r"fusion qkv: (\d+) fused", err)] == [True, True, True]


def test_bench_names_its_own_options_when_positions_do_not_suffice(converted: Converted) -> None:
    code, _, err = run("bench", converted(TINY[0]), "--lengths", 6, "--sweep-length", 2048)
    assert (code, "positions; the model has 2,048" in err, "--sweep-length" in err) == (2, True, True)
    assert "--max-new-tokens" not in err


def test_bench_options_are_checked() -> None:
    for value in ("a,b", "0,1", ""):
        code, _, err = run("bench", "anywhere", "--lengths", value)
        assert code == 2
        assert "--lengths takes positive numbers" in err


def test_every_prompt_is_new_and_every_shape_is_warm(
    tiny: Callable[[str], Path], load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = KvFormat(torch.float32, torch.float32)
    engine = Engine(make_runner(load(tiny("llama")), kv, 9), batch=8)
    entered: list[tuple[int, ...]] = []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda ids, *rest: (entered.append(tuple(ids)), add(ids, *rest))[1])
    speeds = bench.Bench(engine, VOCAB, steps=4, repeats=2).run([20], [1, 2, 8], sweep=20)
    assert speeds.left_out == ((20, 8),)  # 8 x 2 blocks, and 8 are there
    assert len(entered) == len(set(entered)) == (2 + 2) + (2 + 1) * (1 + 2)
    assert all(row.p50 <= row.p99 for row in speeds.decode)


def test_the_knee_and_the_step_back() -> None:
    rates = {1: 10.0, 2: 19.0, 4: 36.0, 8: 39.0, 16: 37.0}
    rows = tuple(bench.Decode(512, batch, batch / rate, 1.0, rate) for batch, rate in rates.items())
    speeds = bench.Speeds((), (*rows, bench.Decode(128, 64, 1.0, 1.0, 99.0)), ())
    assert speeds.knee(512) == (8, 4)
    assert speeds.knee(2048) is None


# --------------------------------------------------------------------------------------------- doctor


def host(root: Path, vendor: str = "0x1d94", driver: str = "hydcu", node: str = "kfd", errors: str = "0") -> Path:
    """A host's files with one card."""
    card = root / "sys/bus/pci/devices/0000:33:00.0"
    (card / "ras").mkdir(parents=True)
    files = {"vendor": vendor, "class": "0x038000", "device": "0x6210", "ras/umc_err_count": f"ue: {errors}\nce: 3"}
    for name, text in files.items():
        (card / name).write_text(f"{text}\n")
    other = root / "sys/bus/pci/devices/0000:00:1f.0"
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x8086\n")
    if driver:
        (root / "sys/module" / driver).mkdir(parents=True)
        (root / "sys/module" / driver / "version").write_text("6.2.4\n")
    (root / "dev").mkdir()
    if node:
        (root / "dev" / node).write_text("")
    return root


def codes(findings: list[doctor.Finding]) -> dict[str, int]:
    return {finding.check: finding.code for finding in findings if finding.code}


def test_doctor_works_without_a_card(converted: Converted) -> None:
    code, out, err = run("doctor", converted(TINY[0]))
    assert code == 0, out + err
    assert "nothing here stops a run" in out
    report = json.loads(run("doctor", "--json")[1])
    assert report["exit_code"] == 0
    assert {row["check"] for row in report["findings"]} >= {"torch", "masks", "Triton", "compiler"}


@pytest.mark.skipif(bool(torch.version.hip or torch.version.cuda), reason="this torch is built for cards")
def test_doctor_names_every_trouble_with_its_remedy(tmp_path: Path) -> None:
    env = {"HIP_VISIBLE_DEVICES": "7", "PATH": ""}
    findings = doctor.examine(root=host(tmp_path / "a"), env=env)
    assert codes(findings) == {"torch": 10, "cards": 12}
    assert doctor.exit_code(findings) == 10
    by_check = {finding.check: finding for finding in findings if finding.remedy}
    assert "do not install another torch" in by_check["torch"].remedy
    assert by_check["cards"].remedy == "unset or correct HIP_VISIBLE_DEVICES"
    assert any(finding.found == "0000:33:00.0: Hygon 0x6210" for finding in findings)
    assert any(finding.found == "hydcu 6.2.4" for finding in findings)
    assert "passed over" in by_check["compiler"].remedy
    for kind, text, options in (
        ("driver", "no driver", {"driver": ""}),
        ("driver", "there is no", {"node": ""}),
        ("ecc", "ue: 2", {"errors": "2"}),
    ):
        found = doctor.examine(root=host(tmp_path / text.replace(" ", "-"), **options), env={})
        assert [text in finding.found for finding in found if finding.check == kind and finding.code] == [True]


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [("echo 0", 0, "no uncorrected errors"), ("echo 3", 15, "ue: 3"), ("exec sleep 60", 0, "not readable")],
)
def test_doctor_asks_the_drivers_tool_and_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, text: str
) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "ANSWER", 0.5)
    root = host(tmp_path / "host", vendor="0x10de", driver="nvidia", node="nvidiactl")
    (row,) = (finding for finding in doctor.examine(root=root, env={}) if finding.check.lower() == "ecc")
    assert (row.code, text in row.found) == (code, True)


def test_doctor_holds_the_manifest_against_the_machine(converted: Converted, tmp_path: Path) -> None:
    found = doctor.examine(converted(TINY[0]))
    assert [finding.check for finding in found][-1] == "manifest"
    assert doctor.exit_code(found) == 0
    broken = tmp_path / "out"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    found = doctor.examine(broken)
    assert doctor.exit_code(found) == 16
    assert doctor.exit_code(doctor.examine(tmp_path)) == 0  # a folder without manifest is a note
    for wrong, what in ((tmp_path / "none", "does not exist"), (broken / "manifest.json", "is a file")):
        code, _, err = run("doctor", wrong)
        assert (code, what in err) == (3, True)


def test_every_problem_has_a_code_of_its_own_and_the_help_lists_it() -> None:
    assert len(set(doctor.CODES.values())) == len(doctor.CODES)
    text: Any = run("doctor", "--help")[1]
    for code in doctor.CODES.values():
        assert str(code) in text
