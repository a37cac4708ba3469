"""The READMEs' table of troubles: each message is provoked here, and the commands that show it are real ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nan, zeros

from quantkit.cli import main as toolkit
from quantkit_instruments.cli import main as runtime
from tests.acceptance.conftest import MODELS, cli, smoke_load, split_checkpoint, succeeded
from tests.acceptance.readme import TEXTS, code, table_after
from tests.acceptance.test_errors import flip

MODEL = MODELS / "tiny-minimax-m2"
SHARD = "model-00001-of-00002.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


class Bench:
    """A folder with a copy of the source in two shards, to be damaged, and what was made of the sound one."""

    def __init__(self, root: Path, converted: Callable[[str, str, str], Path]) -> None:
        self.root, self.out, self.converted = root, root / "out", converted
        self.source = split_checkpoint(MODEL, root / "model")

    def edit(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(self.source / SHARD).items()}
        change(tensors)
        save_file(tensors, self.source / SHARD, metadata={"format": "pt"})

    def index(self, **weight_map: str) -> None:
        """Add names to the index and make its total right again."""
        path = self.source / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= weight_map
        found = [load_file(file) for file in self.source.glob("*.safetensors")]
        index["metadata"]["total_size"] = sum(tensor.nbytes for part in found for tensor in part.values())
        path.write_text(json.dumps(index))

    def damaged(self) -> Path:
        folder = Path(shutil.copytree(self.converted(MODEL.name, "checkpoint", "w8a8"), self.root / "damaged"))
        manifest = json.loads(next(folder.glob("*manifest.json")).read_text())
        record = next(row for row in manifest["tensors"] if row["dtype"] == "I8")
        flip(folder / record["file"], record["offset"] + record["nbytes"] // 2)
        return folder

    def recipe(self, text: str) -> str:
        path = self.root / "mine.yaml"
        path.write_text(f"name: mine\ndescription: a test\nscheme: w8a8\n{text}")
        return str(path)

    def convert(self, *options: str) -> Result:
        return cli("convert", self.source, "-o", self.out, *options)


def missing_shard(bench: Bench) -> Result:
    (bench.source / SHARD).unlink()
    return cli("inspect", bench.source)


def cut_off(bench: Bench) -> Result:
    os.truncate(bench.source / SHARD, (bench.source / SHARD).stat().st_size - 1000)
    return cli("inspect", bench.source)


def stale_index(bench: Bench) -> Result:
    bench.edit(lambda tensors: tensors.update({"model.layers.0.extra.weight": zeros(8, 8)}))
    return cli("inspect", bench.source)


def unknown_tensor(bench: Bench) -> Result:
    bench.edit(lambda tensors: tensors.update({"model.layers.0.extra.weight": zeros(8, 8)}))
    bench.index(**{"model.layers.0.extra.weight": SHARD})
    return cli("inspect", bench.source)


def not_a_number(bench: Bench) -> Result:
    bench.edit(lambda tensors: tensors[Q_PROJ][0].fill_(nan))
    return bench.convert()


def other_options(bench: Bench) -> Result:
    succeeded(bench.convert())
    return bench.convert("--recipe", "bf16")


def one_kind(bench: Bench) -> Result:
    path = bench.root / "one.jsonl"
    path.write_text(json.dumps({"text": "a text of one kind " * 40}) + "\n")
    return cli("calibrate", bench.source, "-o", bench.out, "--data", path, "--samples", "4", "--dry-run")


def shards_alone(bench: Bench) -> Result:
    succeeded(bench.convert("--format", "sharded", "--tp", "2"))
    return smoke_load(bench.out)


def no_card(bench: Bench) -> Result:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card, so nothing is wrong")
    return smoke_load(bench.converted(MODEL.name, "checkpoint", "w8a8"), "--device", "cuda")


def in_floating_point(bench: Bench) -> Result:
    """Someone's patch calls a plain matrix product in the place of an INT8 layer."""
    from quantkit_runtime.layers import Int8Linear

    def plain(self: Int8Linear, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.weight_scale).T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8Linear, "forward", plain)
        return smoke_load(bench.converted(MODEL.name, "checkpoint", "w8a8"), "--max-new-tokens", "1")


TROUBLES: dict[str, tuple[int, Callable[[Bench], Result]]] = {
    "names files that are not there": (3, missing_shard),
    "truncated": (3, cut_off),
    "index and files disagree": (3, stale_index),
    "have no role": (3, unknown_tensor),
    "holds NaN or infinity": (3, not_a_number),
    "does not divide attn.q": (2, lambda bench: bench.convert("--format", "sharded", "--tp", "3")),
    "no engine loads scheme": (2, lambda bench: bench.convert("--recipe", "w8a8-group128", "--dry-run")),
    "matches no tensor and no role": (
        2,
        lambda bench: cli(
            *("inspect", bench.source, "--recipe"),
            bench.recipe("rules: [{match: expert.dwn, scheme: keep, reason: a test}]\n"),
        ),
    ),
    "no calibration is given": (2, lambda bench: bench.convert("--recipe", "w8a8-gptq", "--dry-run")),
    "the recipe wants at least 3": (2, one_kind),
    "with other options": (2, other_options),
    "its bytes changed": (4, lambda bench: cli("verify", bench.damaged())),
    "the checksum of tensor": (3, lambda bench: smoke_load(bench.damaged())),
    "a mesh of 2 rank(s); 1 process(es) run": (2, shards_alone),
    "is built for CPU": (2, no_card),
    "did not run in INT8": (4, in_floating_point),
}
"""Message -> exit code, and what provokes it."""


@pytest.mark.parametrize("message", TROUBLES)
def test_the_message_is_real(message: str, tmp_path: Path, converted: Callable[[str, str, str], Path]) -> None:
    code_, provoke = TROUBLES[message]
    result = provoke(Bench(tmp_path, converted))
    said = " ".join((result.stdout + result.stderr).split())
    assert result.exit_code == code_, said
    assert message in said
    assert "next: " in said


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_table_has_these_messages_and_real_commands(text: str) -> None:
    rows = table_after(text, "troubles")
    assert [code(row[0]) for row in rows] == [[message] for message in TROUBLES]
    for row in rows:
        (line,) = code(row[2])
        program, name, *arguments = shlex.split(line)
        group = {"quantkit": toolkit, "quantkit-runtime": runtime}[program]
        done = CliRunner().invoke(group, [name, *arguments, "--help"])
        assert done.exit_code == 0, line
        options = {word for word in arguments if word.startswith("-")}
        assert options <= set(re.findall(r"-{1,2}[\w-]+", done.output)), line
