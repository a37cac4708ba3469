"""Inputs that are almost right: each is refused with a message, none with a traceback, and `convert` and `calibrate`
refuse what `inspect` calls an error."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.console import INTERRUPTED, expected_failures
from quantkit.errors import QuantkitError, UsageError
from quantkit.inspect import inspect
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import MAX_RANKS, Mesh
from tests.acceptance.conftest import MODELS, SMALL, cli, smoke_load
from tests.acceptance.test_errors import flip, intact, refused, source, write

__all__ = ["intact", "source"]

COMMANDS = ("inspect", "calibrate", "convert")


def edit_config(source: Path, **values: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def run(command: str, source: Path, out: Path, *options: str) -> Any:
    if command == "inspect":
        return cli("inspect", source)
    small = SMALL if command == "calibrate" else ()
    return write(command, source, out, *small, *options)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "6"),
        ("num_hidden_layers", [6]),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 10**9),
        ("num_local_experts", 10**9),
        ("vocab_size", {"a": 1}),
        ("head_dim", "x"),
        ("num_key_value_heads", 0),
        ("hidden_size", True),
    ],
)
def test_size_that_is_no_size(command: str, key: str, value: Any, source: Path, tmp_path: Path) -> None:
    edit_config(source, **{key: value})
    refused(run(command, source, tmp_path / "out"), 3, key)


@pytest.mark.parametrize("command", ["calibrate", "convert"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 1, "layers 1-5 lie beyond"),
        ("num_hidden_layers", 9, "6-8"),
        ("vocab_size", 4095, "config.json says 4095"),
        ("hidden_size", 31, "config.json says 31"),
        ("num_attention_heads", 3, "config.json says 96"),
        ("num_local_experts", 15, "15 experts"),
        ("num_experts_per_tok", 17, "17 of 16 experts"),
        ("num_key_value_heads", 3, "share 3 key"),
        ("num_experts_per_tok", 0, "0 of 16 experts"),
    ],
)
def test_config_of_another_model(command: str, key: str, value: int, words: str, source: Path, tmp_path: Path) -> None:
    """What `inspect` calls an error is refused, and the cause is listed once."""
    edit_config(source, **{key: value})
    assert run("inspect", source, tmp_path).exit_code == 3
    result = run(command, source, tmp_path / "out")
    refused(result, 3, words)
    assert result.stderr.count("problems:") + result.stderr.count("problem:") <= 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("values", [{"num_experts_per_tok": 17}, {"num_key_value_heads": 3}])
def test_sizes_that_contradict_one_another_where_a_model_runs(
    values: dict[str, int], source: Path, tmp_path: Path
) -> None:
    edit_config(source, **values)
    for result in (smoke_load(source), cli("baseline", source, "-o", tmp_path / "out", "--dry-run")):
        refused(result, 3, "its sizes make no model")


@pytest.mark.parametrize("values", [{"hidden_act": "nope"}, {"rope_parameters": {"rope_type": "nope"}}, {"dtype": "x"}])
def test_config_that_transformers_cannot_use(values: dict[str, Any], source: Path, tmp_path: Path) -> None:
    edit_config(source, **values)
    refused(run("calibrate", source, tmp_path / "out"), 3, "transformers")


@pytest.mark.parametrize("command", ["calibrate", "convert"])
@pytest.mark.parametrize("what", ["no columns", "scalar", "bool"])
def test_weight_that_is_no_matrix(command: str, what: str, tmp_path: Path) -> None:
    source, name = tmp_path / "model", "model.layers.1.self_attn.q_proj.weight"
    source.mkdir()
    for path in (MODELS / "tiny-minimax-m2").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    bad = {"no columns": tensors[name][:, :0].contiguous(), "scalar": torch.tensor(1.0), "bool": tensors[name] > 0}
    save_file({**tensors, name: bad[what]}, source / "model.safetensors")
    refused(run(command, source, tmp_path / "out"), 3, name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": []}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b""),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": [1]}'),
    ],
)
def test_damaged_tokenizer(file: str, content: bytes, source: Path, tmp_path: Path) -> None:
    (source / file).write_bytes(content)
    for result in (run("calibrate", source, tmp_path / "out"), smoke_load(source)):
        refused(result, 3, "tokenizer")


@pytest.mark.parametrize("template", ["{% if", "{{ raise_exception('no') }}", "{{ messages[7].foo.bar }}"])
def test_chat_template_that_fails(template: str, source: Path, tmp_path: Path) -> None:
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    (source / "chat_template.jinja").unlink(missing_ok=True)
    refused(run("calibrate", source, tmp_path / "out"), 3, "chat template")


@pytest.mark.parametrize("content", [5, None, [{"type": "text", "text": "hello"}], "text"])
def test_dialogue_of_odd_messages(content: Any, source: Path, tmp_path: Path) -> None:
    """With a template its error is told; without one the text is taken where there is any."""
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    result = run("calibrate", source, tmp_path / "out", "--data", str(data), "--force-sources")
    refused(result, 3)


@pytest.mark.parametrize("options", [("--seed", "-1"), ("--samples", str(10**30)), ("--data", "builtin:code=inf")])
def test_calibration_options_out_of_range(options: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    refused(write("calibrate", source, tmp_path / "out", *SMALL, *options), 2)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1\n", b"a: 2020-13-45\n", b"[" * 5000, b"name: &a [*a]\n"])
def test_recipe_that_is_no_recipe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"mine\.yaml"):
        load_recipe(str(path))


def test_mesh_beyond_all_bounds() -> None:
    Mesh(tp=8, pp=MAX_RANKS // 8)
    for sizes in ({"tp": 10**9}, {"dp": 10**9}, {"ep": 10**9}, {"tp": 300, "pp": 300}):
        with pytest.raises(UsageError, match="ranks"):
            Mesh(**sizes)


def test_flipped_bytes_of_a_config(source: Path) -> None:
    """Whatever a damaged config says, `inspect` answers or refuses."""
    path, random_ = source / "config.json", random.Random(0)
    intact_bytes = path.read_bytes()
    refusals = 0
    for _ in range(60):
        raw = bytearray(intact_bytes)
        for _ in range(random_.choice((1, 2, 5))):
            raw[random_.randrange(len(raw))] = random_.choice(b'0123456789-.e"[]{}nt,\xff')
        path.write_bytes(raw)
        try:
            inspect(source)
        except QuantkitError:
            refusals += 1
    assert 0 < refusals < 60


@pytest.mark.parametrize("name", ["scales.safetensors", "activations.safetensors"])
def test_damaged_calibration(name: str, source: Path, tmp_path: Path) -> None:
    """One flipped bit of an artifact: a scale 2**32 times too large is as finite and positive as the right one."""
    calibration, out = tmp_path / "calibration", tmp_path / "out"
    assert run("calibrate", source, calibration).exit_code == 0
    flip(calibration / name, (calibration / name).stat().st_size - 5)
    refused(write("convert", source, out, "--calibration", str(calibration)), 3, name)
    assert not out.exists()
    (calibration / name).unlink()
    refused(write("convert", source, out, "--calibration", str(calibration)), 3, name)


def test_files_of_a_finished_conversion_are_gone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write("convert", source, out).exit_code == 0
    (out / "model.safetensors").unlink()
    refused(write("convert", source, out), 2, "model.safetensors")


def test_verify_of_an_unfinished_conversion(source: Path, tmp_path: Path) -> None:
    """Files that are all there are no conversion before the manifest is."""
    out = tmp_path / "out"
    assert write("convert", source, out).exit_code == 0
    for path in out.glob("*manifest.json"):
        path.unlink()
    result = cli("verify", out)
    assert result.exit_code == 4
    assert "no manifest" in result.output.replace("\n", " ")


def test_prompt_in_a_locale_without_utf8(source: Path) -> None:
    """Bytes that Python could not decode come as lone surrogates: UTF-8 among them is understood, the rest refused."""
    prompt = "\u4e2d\u6587".encode().decode("ascii", "surrogateescape")
    result = smoke_load(source, "--prompt", prompt, "--max-new-tokens", "1", "--json")
    assert result.exit_code == 0, result.output
    assert "\u4e2d\u6587" in json.loads(result.stdout)["generated"]["text"]
    refused(smoke_load(source, "--prompt", "\udcff", "--max-new-tokens", "1"), 2, "UTF-8")


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 3, "out/x: No space left on device"),
    ],
)
def test_interrupt_and_full_disk(
    raised: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, expected_failures():
        raise raised
    assert caught.value.code == code
    assert words in capsys.readouterr().err


def test_other_failures_keep_their_traceback() -> None:
    with pytest.raises(FileNotFoundError), expected_failures():
        raise FileNotFoundError(errno.ENOENT, "a bug")


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{}"),
        ("plan", "{}", "--card-memory", "64"),
        ("convert", "{}", "-o", "{out}"),
        ("convert", "{source}", "-o", "{}"),
        ("verify", "{}"),
        ("merge", "{}", "-o", "{out}"),
        ("calibrate", "{source}", "-o", "{out}", *SMALL, "--evaluation", "{}"),
        ("calibrate", "{source}", "-o", "{}", *SMALL),
        ("baseline", "{source}", "-o", "{out}", "--data", "{}"),
    ],
)
@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30)])
def test_a_path_too_long_for_any_file(name: str, words: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    place = str(tmp_path / name)
    done = cli(*(word.format(place, source=source, out=tmp_path / "out") for word in words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (2, 3), done.output
    assert "x" * 100 in done.output.replace("\n", "")
