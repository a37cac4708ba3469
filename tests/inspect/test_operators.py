"""The operator list: every role of every family has a row, and what it claims of the runtime is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.archs import ROLES, Kind
from quantkit.inspect import Inspection, inspect
from quantkit.operators import _TABLE, unlisted
from tests.families import FAMILY_NAMES, make_tiny
from tests.plan.facts import CONFIGS

MODELS = Path(__file__).parents[1] / "models"


def functions(found: Inspection) -> dict[str, str]:
    return {row.function: row.watch for row in found.operators}


def test_every_role_has_a_row() -> None:
    assert unlisted(ROLES) == ["buffer"]


def test_rows_of_int8_are_those_that_the_recipe_quantizes() -> None:
    """A row that claims the INT8 kernel covers only roles that are quantized by default, and the other way round."""
    for row in _TABLE:
        covered = [role for name, role in ROLES.items() if row.covers(name)]
        gemms = [role for role in covered if role.kind is Kind.LINEAR]
        if row.kernel:
            assert gemms
            assert all(role.quantize for role in gemms)
    claimed = {name for name in ROLES for row in _TABLE if row.kernel and row.covers(name)}
    assert {name for name, role in ROLES.items() if role.quantize} == claimed


def test_kernels_that_are_claimed_exist() -> None:
    from quantkit_runtime.kernels.registry import ROWS

    assert {row.kernel for row in _TABLE if row.kernel} <= {row.op for row in ROWS}
    assert all((row.state == "own INT8") == bool(row.kernel) for row in _TABLE)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_families_list_all_that_they_have(family: str, tmp_path: Path) -> None:
    found = inspect(make_tiny(family, tmp_path))
    covered = {role for row in found.operators for role in row.roles}
    alone = inspect(tmp_path / "config.json")
    assert functions(alone).keys() == functions(found).keys() - {"vision tower"}
    assert covered >= {"embed", "norm.final", "norm.input"}


def test_what_a_model_adds(tmp_path: Path) -> None:
    names = ("MiniMax-M2.7", "MiniMax-M3", "gpt-oss-120b", "DeepSeek-V3.2")
    found = {}
    for name in names:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        found[name] = functions(inspect(path))
    assert "an all-reduce under tp" in found["MiniMax-M2.7"]["query and key norms"]
    assert "all-reduce" not in found["MiniMax-M3"]["query and key norms"]
    assert "1 + w" in found["MiniMax-M3"]["norms"]
    assert "rows of gate and up alternate" in found["gpt-oss-120b"]["routed experts"]
    assert "18 of 36 layers see the last 128 tokens" in found["gpt-oss-120b"]["attention"]
    assert "attention sinks" in found["gpt-oss-120b"]
    assert "latents of 512 + 64" in found["DeepSeek-V3.2"]["attention"]
    assert "rope yarn x 40" in found["DeepSeek-V3.2"]["attention"]
    assert "draft layers" in found["DeepSeek-V3.2"]


def test_a_bare_config_file_tells_structure_and_parameters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["DeepSeek-V3.2"]))
    found = inspect(path)
    assert found.sound
    assert found.tensors == 0
    assert found.parameters / 1e9 == pytest.approx(685, rel=0.005)
    assert found.active_parameters / 1e9 == pytest.approx(38.4, rel=0.005)  # 37 B and the tables of both ends
    s = found.structure
    assert (s.rope, s.draft_layers, s.indexed_layers, s.window_layers) == ("yarn x 40 from 4,096", 1, 61, 0)
