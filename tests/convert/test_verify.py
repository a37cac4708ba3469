"""`verify` finds what was changed, names file and tensor, and passes what is sound."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from quantkit.cli import main
from quantkit.convert.run import Form, convert
from quantkit.convert.sample import Sample, records_of
from quantkit.convert.verify import verify
from quantkit.recipe import load_recipe
from quantkit.spec.manifest import manifest_bytes, read_manifest
from quantkit.spec.mesh import Mesh


@pytest.fixture(scope="module")
def made(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in several files with an index, and shards of a mesh."""
    base = tmp_path_factory.mktemp("made")
    recipe = load_recipe("w8a8")
    convert(minimax, base / "checkpoint", recipe, jobs=1, max_shard_bytes=2_000_000)
    convert(minimax, base / "sharded", recipe, form="sharded", mesh=Mesh(tp=2, pp=2, ep=2), jobs=1)
    return {"checkpoint": base / "checkpoint", "sharded": base / "sharded"}


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def take(form: str) -> Path:
        shutil.copytree(made[form], tmp_path / form)
        return tmp_path / form

    return take


def flip(path: Path, position: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_sound_folders_pass(form: str, made: dict[str, Path], minimax: Path) -> None:
    for quick in (True, False):
        report = verify(made[form], source=minimax, quick=quick, jobs=2)
        assert report.passed, report.failures
        idle = [check.name for check in report.checks if not check.count and not check.note]
        assert not idle, "a check that looks at nothing says why"
    names = {check.name: check.count for check in report.checks}
    assert names["INT8 weights lie within half a step of the source"] >= 4_792_320
    assert names["every source tensor is written or dropped by a rule"] == 351


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_every_flipped_bit_is_found(form: str, copy: Callable[[str], Path]) -> None:
    """One bit in each class of bytes, and forty anywhere: header, payload, index, config, manifest, tokenizer."""
    folder, draw = copy(form), random.Random(5)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    spots = (
        [(path, 3) for path in files]
        + [(path, 60) for path in files]
        + [(path, path.stat().st_size - 1) for path in files]
    )
    spots += [(path, draw.randrange(path.stat().st_size)) for path in draw.choices(files, k=40)]
    for path, position in spots:
        whole = path.read_bytes()
        flip(path, position, draw.randrange(8))
        report = verify(folder)
        assert not report.passed, (path.name, position)
        assert any(path.name in failure for failure in report.failures), (path.name, position, report.failures)
        path.write_bytes(whole)
    assert verify(folder).passed


def test_the_tensor_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    manifest = read_manifest(folder / "manifest.json")
    for record in manifest.tensors[::17]:
        flip(folder / record.file, record.offset + record.nbytes // 2)
        failures = verify(folder).failures
        assert any(f"{record.file}: {record.name}: its bytes changed" in failure for failure in failures)
        flip(folder / record.file, record.offset + record.nbytes // 2)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_missing_truncated_extra_and_swapped_files(form: str, copy: Callable[[str], Path]) -> None:
    folder = copy(form)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    assert any(
        f"{first.name}: {len(whole) - 1} bytes, the manifest says {len(whole)}" in f
        for f in verify(folder, quick=True).failures
    )
    first.unlink()
    assert any(f"{first.name}: missing" in failure for failure in verify(folder, quick=True).failures)
    first.write_bytes(whole)
    (folder / "extra.txt").write_text("x")
    assert any("extra.txt: not in the manifest" in failure for failure in verify(folder, quick=True).failures)
    (folder / "extra.txt").unlink()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    failures = verify(folder).failures
    assert any(first.name in failure for failure in failures)
    assert any(second.name in failure for failure in failures)


def test_swapped_replicas_of_equal_size(copy: Callable[[str], Path]) -> None:
    """Two ranks' files have the same header and size; only their bytes differ."""
    folder = copy("sharded")
    one, two = folder / "stage0-tp0-00001.safetensors", folder / "stage0-tp1-00001.safetensors"
    assert one.stat().st_size == two.stat().st_size
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    failures = verify(folder).failures
    assert any(one.name in failure for failure in failures)
    assert any(two.name in failure for failure in failures)


def rewrite(folder: Path, file: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor as a faulty converter would have: no manifest remembers the bytes."""
    weights = load_file(folder / file)
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, folder / file)


def foreign(copy: Callable[[str], Path], minimax: Path, tmp_path: Path) -> Path:
    """Our checkpoint as another tool's: one file, no manifest."""
    convert(minimax, tmp_path / "foreign", load_recipe("w8a8"), jobs=1)
    (tmp_path / "foreign/quantkit_manifest.json").unlink()
    shutil.rmtree(tmp_path / "foreign/.quantkit-work")  # which another tool does not leave
    return tmp_path / "foreign"


EXPERT = "model.layers.3.block_sparse_moe.experts.11.w2.weight"


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        (EXPERT, lambda q: q + (q < 5).to(torch.int8), f"{EXPERT}: row 0"),
        (EXPERT, lambda q: q.flip(0), f"{EXPERT}: row 0"),
        (f"{EXPERT}_scale", lambda s: s * 1.0000002, f"{EXPERT}: the scale of row"),
        ("model.layers.3.block_sparse_moe.gate.weight", lambda w: w * 1.01, "gate.weight: differs from the source"),
        ("model.layers.3.input_layernorm.weight", lambda w: w + 0.01, "input_layernorm.weight: differs"),
        ("lm_head.weight", lambda w: torch.cat([w[:-1], -w[-1:]]), "lm_head.weight: differs from the source"),
    ],
)
def test_wrong_values_of_another_tool(
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    found: str,
    copy: Callable[[str], Path],
    minimax: Path,
    tmp_path: Path,
) -> None:
    folder = foreign(copy, minimax, tmp_path)
    report = verify(folder, source=minimax)
    assert report.passed, report.failures
    assert any(check.note.startswith("none: checksums") for check in report.checks)
    rewrite(folder, "model.safetensors", name, change)
    failures = verify(folder, source=minimax).failures
    assert len(failures) == 1
    assert found in failures[0]


def test_config_and_tensors_disagree(copy: Callable[[str], Path], minimax: Path, tmp_path: Path) -> None:
    folder = foreign(copy, minimax, tmp_path)
    path = folder / "config.json"
    original = path.read_text()

    def failures(change: Callable[[dict[str, object]], object]) -> str:
        config = json.loads(original)
        change(config["quantization_config"])
        path.write_text(json.dumps(config))
        return "\n".join(verify(folder).failures)

    assert "ignore lacks lm_head" in failures(lambda c: c["ignore"].remove("lm_head"))  # type: ignore[attr-defined]
    assert "ignore names model.layers.9.x, which is no" in failures(lambda c: c["ignore"].append("model.layers.9.x"))  # type: ignore[attr-defined]
    name = "model.layers.0.self_attn.q_proj"
    assert f"ignore names {name}, which is quantized" in failures(lambda c: c["ignore"].append(name))  # type: ignore[attr-defined]
    assert "ignore is no list of modules: 5" in failures(lambda c: c.update(ignore=5))
    assert "quantization_config is" in failures(lambda c: c.update(format="pack-quantized"))


def test_lost_tensors_of_another_tool(copy: Callable[[str], Path], minimax: Path, tmp_path: Path) -> None:
    folder = foreign(copy, minimax, tmp_path)
    weights = load_file(folder / "model.safetensors")
    lost = {name: weights.pop(name) for name in (EXPERT, f"{EXPERT}_scale")}
    save_file(weights, folder / "model.safetensors")
    assert any(f"{EXPERT}: 0 of" in failure for failure in verify(folder, source=minimax).failures)
    save_file(weights | {EXPERT: lost[EXPERT]}, folder / "model.safetensors")
    assert any(EXPERT in failure and "no known format" in failure for failure in verify(folder).failures)
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    save_file({name: weight for name, weight in weights.items() if name not in ends}, folder / "model.safetensors")
    assert any("neither an embedding table nor an output head" in failure for failure in verify(folder).failures)


def test_the_wrong_source(made: dict[str, Path], minimax: Path, tmp_path: Path) -> None:
    shutil.copytree(minimax, tmp_path / "other")
    flip(tmp_path / "other/model.safetensors", 5_000_001, bit=6)  # an exponent bit of a bf16 weight
    report = verify(made["sharded"], source=tmp_path / "other")
    assert any("model.safetensors: its bytes changed" in failure for failure in report.failures)
    assert len(report.failures) > 1, "the changed weight is found by value too"


def test_a_record_of_fewer_rows_than_the_source(copy: Callable[[str], Path], minimax: Path) -> None:
    """The manifest is sealed: it says so of itself."""
    folder = copy("checkpoint")
    path = folder / "quantkit_manifest.json"
    manifest = read_manifest(path)
    at, record = next((i, row) for i, row in enumerate(manifest.tensors) if row.role == "expert.down" and row.scale)
    turned = replace(record, shape=record.shape[::-1])
    rows = (*manifest.tensors[:at], turned, *manifest.tensors[at + 1 :])
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"tensors": rows})))
    failures = verify(folder, source=minimax).failures
    assert any(record.name in failure and "does not hold the whole" in failure for failure in failures), failures


def test_exit_codes_and_json(copy: Callable[[str], Path], minimax: Path) -> None:
    folder = copy("checkpoint")
    sound = CliRunner().invoke(main, ["verify", str(folder), "--source", str(minimax), "--json"])
    assert sound.exit_code == 0
    assert json.loads(sound.stdout)["passed"]
    flip(folder / "config.json", 9)
    broken = CliRunner().invoke(main, ["verify", str(folder)])
    assert broken.exit_code == 4
    assert "config.json: its bytes changed" in broken.output
    assert CliRunner().invoke(main, ["verify", str(folder / "nowhere")]).exit_code == 3


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_a_sample_shows_every_role_and_layer(form: str, made: dict[str, Path]) -> None:
    records = [r for r in read_manifest(next(made[form].glob("*manifest.json"))).tensors if r.part == "weight"]
    chosen = Sample(count=1, seed=3).choose(records)
    assert {r.role for r in chosen} == {r.role for r in records}
    assert {r.layer for r in chosen} == {r.layer for r in records}
    assert len(chosen) < len(records)
    assert Sample(count=1, seed=3).choose(records) == chosen
    half = Sample(share=0.5, seed=3).choose(records)
    assert len(half) == max(len(chosen), -(-len(records) // 2))
    assert half != Sample(share=0.5, seed=4).choose(records)
    assert Sample(share=1.0).choose(records) == records


def test_a_wrong_tensor_of_the_sample_is_found(copy: Callable[[str], Path], minimax: Path) -> None:
    """Without a manifest only the comparison with the source can tell; one outside the sample is not looked at."""
    folder = copy("checkpoint")
    (folder / "quantkit_manifest.json").unlink()
    shutil.rmtree(folder / ".quantkit-work")
    sample = Sample(count=30, seed=1)
    records = [r for r in records_of(folder) if r.part in ("weight", "bias")]
    chosen = {r.name for r in sample.choose(records)}
    report = verify(folder, source=minimax, sample=sample)
    assert report.passed, report.failures
    assert (report.compared, report.tensors) == (30, len(records))
    inside = next(r for r in records if r.scale and r.name in chosen)
    outside = next(r for r in records if r.scale and r.name not in chosen)
    for record, found in ((outside, False), (inside, True)):
        flip(folder / record.file, record.offset + 5, bit=6)
        report = verify(folder, source=minimax, sample=sample)
        assert report.passed is not found
        assert all(record.name in failure for failure in report.failures)
    assert len(verify(folder, source=minimax).failures) == 2


def test_the_command_says_how_much_was_compared(made: dict[str, Path], minimax: Path) -> None:
    words = ["verify", str(made["checkpoint"]), "--source", str(minimax), "--sample", "5%"]
    first, second = (CliRunner().invoke(main, [*words, "--json"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert 0 < found["compared"] < found["tensors"]
    assert first.stdout == second.stdout
    said = CliRunner().invoke(main, words).output
    assert f"{found['compared']} of {found['tensors']} tensors compared with the source" in said
    for wrong in ("0", "-3", "200%", "half", ""):
        refused = CliRunner().invoke(main, [*words[:-1], wrong])
        assert refused.exit_code == 2, wrong
    alone = CliRunner().invoke(main, ["verify", str(made["checkpoint"]), "--sample", "5"])
    assert alone.exit_code == 2
    assert "--source" in alone.output


def test_rows_are_whole_lines_where_there_is_no_terminal(made: dict[str, Path]) -> None:
    said = CliRunner(env={"COLUMNS": None}).invoke(main, ["verify", str(made["checkpoint"])]).output
    assert "config.json describes the tensors" in said


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_convert_returns_the_manifest_that_it_wrote(form: Form, minimax: Path, tmp_path: Path) -> None:
    mesh = Mesh(tp=2, ep=2) if form == "sharded" else None
    recipe = load_recipe("w8a8")
    first = convert(minimax, tmp_path / "out", recipe, form=form, mesh=mesh, jobs=1)
    path = next((tmp_path / "out").glob("*manifest.json"))
    assert first == read_manifest(path)
    assert first.digest
    assert convert(minimax, tmp_path / "out", recipe, form=form, mesh=mesh, jobs=1) == first
