"""What `quantkit convert` writes, loaded: equal to what the tests' own writer makes of the same source."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.convert.run import convert
from quantkit.errors import UsageError
from quantkit.outdir import WORK_NAME
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit_runtime import loader
from quantkit_runtime.errors import BrokenShard
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.layers import Int8Linear
from tests.families import FAMILY_NAMES, VOCAB, make_tiny
from tests.reference import transformers_model
from tests.runtime import outputs
from tests.runtime.conftest import TINY

Load = Callable[..., LoadedModel]
Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """(model, form, recipe) -> folder; do not change it."""

    @cache
    def make(model: str, form: str, recipe: str = "w8a8") -> Path:
        out = tmp_path_factory.mktemp("converted") / "out"
        convert(outputs.MODELS / model, out, load_recipe(recipe), form=form, jobs=1)  # type: ignore[arg-type]
        return out

    return make


def state(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(loaded.model.state_dict())


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_int8_weights_and_scales_are_equal(
    written: Convert, converted: Callable[..., Path], load: Load, model: str, form: str
) -> None:
    got, want = state(load(written(model, form))), state(load(converted(model, form)))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_the_bf16_recipe_gives_transformers_logits_bit_for_bit(
    written: Convert, load: Load, model: str, form: str
) -> None:
    ids = torch.randint(3, 4096, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = load(written(model, form, "bf16")).model(input_ids=ids).logits
        want = transformers_model(outputs.MODELS / model, torch.float32)(input_ids=ids).logits
    assert torch.equal(got, want)


def test_groups_come_from_the_manifest(written: Convert, load: Load) -> None:
    loaded = load(written("tiny-deepseek-v3", "sharded", "w8a8-group128"))
    sizes = {row.key.role: row.group_size for row in loaded.planned if row.int8}
    # 384, 96 and 96 inputs: the largest divisors up to 128
    assert {role: size for role, size in sizes.items() if size} == {
        "mlp.down": 128,
        "shared.down": 96,
        "expert.down": 96,
    }


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_both_forms_of_every_family_are_the_same_model(tmp_path: Path, load: Load, family: str) -> None:
    source = make_tiny(family, tmp_path / "source")
    loaded = {}
    for form in ("checkpoint", "sharded"):
        convert(source, tmp_path / form, load_recipe("w8a8"), form=form, jobs=1)  # type: ignore[arg-type]
        loaded[form] = load(tmp_path / form)
    first, second = loaded["checkpoint"], loaded["sharded"]
    assert first.account.expected == second.account.expected
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert torch.equal(first.model(input_ids=ids).logits, second.model(input_ids=ids).logits)


def test_tied_ends_share_one_table(tmp_path: Path, load: Load) -> None:
    source = make_tiny("gemma2", tmp_path / "source")
    for form in ("checkpoint", "sharded"):
        convert(source, tmp_path / form, load_recipe("w8a8"), form=form, jobs=1)  # type: ignore[arg-type]
        model: Any = load(tmp_path / form).model
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        assert not isinstance(model.lm_head, Int8Linear)


def test_shards_of_two_ranks_are_refused(tmp_path: Path, load: Load) -> None:
    convert(outputs.MODELS / TINY[0], tmp_path / "out", load_recipe("w8a8"), form="sharded", mesh=Mesh(tp=2), jobs=1)
    with pytest.raises(UsageError, match="tp=2 pp=1 ep=1 dp=1"):
        load(tmp_path / "out")


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
def test_an_unfinished_conversion_is_refused(tmp_path: Path, load: Load, form: str) -> None:
    assert loader.WORK_FOLDER == WORK_NAME
    out = tmp_path / "out"
    convert(outputs.MODELS / TINY[0], out, load_recipe("w8a8"), form=form, jobs=1)  # type: ignore[arg-type]
    for name in ("manifest.json", "quantkit_manifest.json"):
        (out / name).unlink(missing_ok=True)
    with pytest.raises(BrokenShard, match="unfinished conversion"):
        load(out)
