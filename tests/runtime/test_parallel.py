"""Shards of a mesh against the same model in one process: logits, greedy tokens, the count of INT8 GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.spec.mesh import Mesh
from tests.families import FAMILY_NAMES
from tests.runtime import tasks
from tests.runtime.world import World

MESHES = {"tp2": Mesh(tp=2), "pp2": Mesh(pp=2), "ep2": Mesh(tp=2, ep=2), "tp2-pp2": Mesh(tp=2, pp=2)}
DENSE = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_vl", "phi3", "qwen3_5", "glm4"}
Prepared = dict[str, tuple[Path, dict[str, str], dict[str, Any]]]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four processes."""
    found = World(4)
    yield found
    found.close()


@pytest.fixture(scope="session")
def families(world: World, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Family -> its folder with shards for each mesh, what was refused, and what one process computes."""
    root = tmp_path_factory.mktemp("families")
    meshes = {"one": Mesh(), **MESHES}
    refused = world.spread(tasks.prepare, [(name, root / name, meshes) for name in FAMILY_NAMES])
    alone = world.spread(tasks.run_model, [(root / name / "one", tasks.prompt()) for name in FAMILY_NAMES])
    return {name: (root / name, *row) for name, *row in zip(FAMILY_NAMES, refused, alone, strict=True)}  # type: ignore[misc]


def require_equal(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every rank has the logits and tokens of the single process; together they ran its INT8 GEMMs and no fallback."""
    for rank in found:
        difference = np.linalg.norm(rank["logits"] - alone["logits"]) / np.linalg.norm(alone["logits"])
        assert difference < 1e-5
        assert rank["tokens"] == alone["tokens"]
        assert rank["expected"]
        assert not rank["fallbacks"]
        assert set(rank["missing"]) <= rank["routed"]
    assert frozenset().union(*(rank["expected"] for rank in found)) == alone["expected"]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_on_every_mesh(families: Prepared, world: World, family: str, mesh: str) -> None:
    folder, refused, alone = families[family]
    assert set(refused) == ({"ep2"} if family in DENSE else set())
    if mesh in refused:
        assert "the model has 0 routed experts; legal ep: 1 to 1" in refused[mesh]
        return
    found = world.mesh(tasks.run_model, MESHES[mesh].world, folder / mesh, tasks.prompt())
    require_equal(found, alone)
    if MESHES[mesh].pp == 2:  # layers of another stage are not built, and their files are not read
        stages = [rank["layers"] for rank in found[:: len(found) - 1]]
        assert stages == [[0, 1], [2]]
        assert not found[0]["files"] & found[-1]["files"]
