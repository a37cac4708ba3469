"""Every command that reads headers alone, on published models in full width: see `tests/models/replica.py`.

`inspect` and `plan` see every layer; dry runs see the first nine (all kinds of layers, and stages of unequal length),
since each reads the headers again. `tests/bench/replicas.py` does those with every layer too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quantkit.cli import main
from quantkit.recipe import load_recipe
from tests.inspect.sparse import minimax_m2
from tests.models.replica import BUILT, FAMILY_OF, make_replica, rows_of
from tests.plan.facts import CONFIGS
from tests.plan.published import PLANS, RECIPES, Planned, overview_row, page, planned
from tests.plan.test_published_models import BILLIONS, GIB

LAYERS = BUILT


def run(*arguments: object) -> Any:
    """The JSON document of a command that must succeed."""
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_recipe_serves_a_replica() -> None:
    assert set(RECIPES) == set(FAMILY_OF)
    for name in RECIPES.values():
        assert all(rule.reason for rule in load_recipe(name).rules)


def test_names_and_shapes_are_those_written_by_hand() -> None:
    """Of all 62 layers: what is built and what is repeated."""
    _, rows = minimax_m2()
    assert sorted(rows_of("MiniMax-M2.7", CONFIGS["MiniMax-M2.7"])) == sorted(rows)


@pytest.mark.parametrize("model", RECIPES)
def test_published_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for each model, since making it is the larger part of the work."""
    check_inspect(model, make_replica(model, tmp_path / model))
    plans = planned(model, tmp_path)
    check_pages(plans)
    thin = make_replica(model, tmp_path / "thin" / model, layers=LAYERS)
    check_convert(plans, thin, tmp_path / "out")
    check_calibrate(model, thin, tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()


def check_inspect(model: str, root: Path) -> None:
    """Every tensor has a role, and totals are those that were published; of Qwen3.5 that is without the draft layer."""
    found = run("inspect", root, "--recipe", RECIPES[model])
    assert found["unclassified"] == []
    assert not [problem for problem in found["problems"] if problem["level"] != "note"]
    columns = {row["name"]: row for row in found["columns"]}
    drafts = columns["draft layers"]["parameters"] if model == "Qwen3.5-397B-A17B" else 0
    assert (found["parameters"] - drafts) / 1e9 == pytest.approx(BILLIONS[model], rel=0.005)
    if model in GIB:
        assert found["nbytes"] / 2**30 == pytest.approx(GIB[model], rel=0.005)
    biases = 36 * 128 * 3 * 2880 if model == "gpt-oss-120b" else 0
    assert columns["experts"]["quantized"] == columns["experts"]["parameters"] - biases > 0.9 * found["parameters"]
    assert columns["router"]["quantized"] == 0


def check_pages(plans: Planned) -> None:
    """`make plans` writes them anew."""
    assert page(plans) == (PLANS / f"{plans.model}.md").read_text(encoding="utf-8")
    assert overview_row(plans) in (PLANS / "README.md").read_text(encoding="utf-8")


def check_convert(plans: Planned, root: Path, out: Path) -> None:
    """Both forms, the shards with the first mesh of every plan."""
    chosen = ("--recipe", RECIPES[plans.model], "--dry-run")
    inspected = run("inspect", root, *chosen[:2])
    checkpoint = run("convert", root, "-o", out, *chosen)
    assert checkpoint["parameters"] == inspected["parameters"]
    assert checkpoint["dropped"] == []
    meshes = [report.proposals[0] for report in plans.reports if report.proposals]
    assert meshes
    for mesh in meshes:
        sizes = [f"--{name}={getattr(mesh, name)}" for name in ("tp", "pp", "ep", "dp")]
        shards = run("convert", root, "-o", out, "--format", "sharded", *sizes, *chosen)
        assert len(shards["ranks"]) == mesh.tp * mesh.pp * mesh.dp
        assert shards["parameters"] == inspected["parameters"]
        assert shards["quantized"] == checkpoint["quantized"]


def check_calibrate(model: str, root: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer is tried: it may take tens of gigabytes, and the values here are zeros anyway."""
    monkeypatch.setattr("quantkit.calibrate.estimate.free_bytes", lambda _: 2**20)
    found = run(
        *("calibrate", root, "-o", out, "--recipe", RECIPES[model], "--dry-run"),
        *("--samples", 12, "--seq-len", 64, "--device", "cpu"),
    )
    assert found["layers"] == LAYERS
    assert found["estimated_seconds"] is None
    text = CONFIGS[model].get("text_config", CONFIGS[model])
    experts = next(text[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in text)
    dense = text.get("first_k_dense_replace", 0) or sum(1 for on in text.get("moe_layer_freq", ()) if not on)
    assert found["gemms"] >= (LAYERS - dense) * experts


def test_no_page_is_left_over() -> None:
    assert {path.stem for path in PLANS.glob("*.md")} == {*RECIPES, "README"}
    rows = [line for line in (PLANS / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    assert len(rows) == len(RECIPES)
