"""Planned bytes of every rank against what `convert` really writes for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.plan.estimate import rank_weights
from quantkit.plan.source import read_source
from quantkit.recipe import load_recipe
from quantkit.spec.manifest import Manifest, read_manifest
from quantkit.spec.mesh import Mesh
from tests.families import make_tiny

MODELS = Path(__file__).parents[1] / "models"

MESHES = {
    "one": Mesh(),
    "tp2": Mesh(tp=2),
    "tp2-ep2": Mesh(tp=2, ep=2),
    "tp4-pp2-ep2": Mesh(tp=4, pp=2, ep=2),  # more ranks than kv heads, experts cut in two
    "pp4": Mesh(pp=4),  # 6 layers over 4 stages
    "tp2-dp2-ep4": Mesh(tp=2, dp=2, ep=4),
    "dp3-ep3": Mesh(dp=3, ep=3),  # 16 experts over 3
}


def convert(model: Path, out: Path, mesh: Mesh, *more: str) -> Manifest:
    sizes = [f"--{name}={getattr(mesh, name)}" for name in ("tp", "pp", "ep", "dp")]
    done = CliRunner().invoke(main, ["convert", str(model), "-o", str(out), "--format", "sharded", *sizes, *more])
    assert done.exit_code == 0, done.output
    return read_manifest(out / "manifest.json")


def written(manifest: Manifest) -> list[int]:
    """Bytes of tensor data that each rank reads."""
    by_file: dict[str, int] = {}
    for row in manifest.tensors:
        by_file[row.file] = by_file.get(row.file, 0) + (0 if row.alias else row.nbytes)
    return [sum(by_file[name] for name in rank.files) for rank in manifest.ranks]


def planned(model: Path, mesh: Mesh, recipe: str = "w8a8") -> list[int]:
    source = read_source(model, load_recipe(recipe))
    return [sum(columns.values()) for columns in rank_weights(source.model, mesh)]


@pytest.mark.parametrize("name", ["tiny-minimax-m2", "tiny-deepseek-v3"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_to_the_byte(name: str, mesh: str, tmp_path: Path) -> None:
    found = convert(MODELS / name, tmp_path / "out", MESHES[mesh])
    assert planned(MODELS / name, MESHES[mesh]) == written(found)


@pytest.mark.parametrize("name", ["tiny-minimax-m2", "tiny-deepseek-v3"])
def test_from_the_config_alone(name: str, tmp_path: Path) -> None:
    """Only the dtype of a router is a choice that a config does not tell: 0.2 % here."""
    mesh = Mesh(tp=2, pp=2)
    shutil.copy(MODELS / name / "config.json", tmp_path)
    found = convert(MODELS / name, tmp_path / "out", mesh)
    for guess, real in zip(planned(tmp_path / "config.json", mesh), written(found), strict=True):
        assert guess == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("recipe", ["bf16", "w8a8-group128"])
def test_other_recipes(recipe: str, tmp_path: Path) -> None:
    model = MODELS / "tiny-minimax-m2"
    found = convert(model, tmp_path / "out", Mesh(pp=2), "--recipe", recipe)
    assert planned(model, Mesh(pp=2), recipe) == written(found)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("gpt_oss", Mesh(tp=2)),  # biases on every rank, sinks, experts transposed
        ("phi3", Mesh(tp=2)),  # fused on disk
        ("qwen2", Mesh(tp=2, pp=3)),  # tied: a table on both ends
        ("qwen3_next", Mesh(tp=2)),  # linear attention is whole on every rank
        ("deepseek_v32", Mesh(tp=2, ep=2)),
        ("minimax_m3", Mesh(tp=2, pp=3)),  # a vision tower that no rank reads
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families(family: str, mesh: Mesh, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    make_tiny(family, model)
    assert planned(model, mesh) == written(convert(model, tmp_path / "out", mesh))


def test_what_belongs_to_no_rank_is_told_apart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    make_tiny("deepseek_v3", model, mtp=True)
    found = convert(model, tmp_path / "out", Mesh(tp=2))
    ranks = {name for rank in found.ranks for name in rank.files}
    extra = sum(row.nbytes for row in found.tensors if row.file not in ranks)
    source = read_source(model, load_recipe("w8a8"))
    assert sum(source.model.weights.whole.values()) == extra > 0


def test_the_printed_command_is_accepted(tmp_path: Path) -> None:
    model = str(MODELS / "tiny-minimax-m2")
    done = CliRunner().invoke(main, ["plan", model, "--card-memory", "0.01", "--json"])
    command = json.loads(done.stdout)["commands"][0].split()
    assert command[:3] == ["quantkit", "convert", model]
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
    assert CliRunner().invoke(main, [*arguments, "--dry-run"]).exit_code == 0
