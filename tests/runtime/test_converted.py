"""What `quantkit convert` writes, loaded: equal to what the tests' own writer makes of the same source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.convert.run import Form, convert
from quantkit.errors import UsageError
from quantkit.outdir import WORK_NAME
from quantkit.recipe import load_recipe
from quantkit.spec.mesh import Mesh
from quantkit_instruments.trace import judge, trace
from quantkit_runtime import loader
from quantkit_runtime.engine import Engine
from quantkit_runtime.errors import BrokenShard
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.layers import Int8Linear
from quantkit_runtime.session import make_runner
from tests.families import FAMILIES, FAMILY_NAMES, VOCAB, make_tiny
from tests.reference import fake_quantized, transformers_model
from tests.runtime import outputs
from tests.runtime.conftest import TINY

Load = Callable[..., LoadedModel]
Convert = Callable[..., Path]
FORMS: tuple[Form, ...] = ("checkpoint", "sharded")
FLOAT = KvFormat(torch.float32, torch.float32)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """(model, form, recipe) -> folder; do not change it."""

    @cache
    def make(model: str, form: Form, recipe: str = "w8a8") -> Path:
        out = tmp_path_factory.mktemp("converted") / "out"
        convert(outputs.MODELS / model, out, load_recipe(recipe), form=form, jobs=1)
        return out

    return make


def state(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return dict(loaded.model.state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", TINY)
def test_int8_weights_and_scales_are_equal(
    written: Convert, converted: Callable[..., Path], load: Load, model: str, form: str
) -> None:
    got, want = state(load(written(model, form))), state(load(converted(model, form)))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("form", FORMS)
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


def quantized_by_role(folder: Path) -> Callable[[str], bool]:
    arch = outputs.architecture(folder)

    def quantized(name: str) -> bool:
        key = arch.parse(name)
        return key is not None and arch.role(key.role).quantize

    return quantized


def known_to_transformers(folder: Path, family: str) -> Path:
    """The same checkpoint under the model type that transformers converts names for, where it has another one."""
    if not FAMILIES[family].retype:
        return folder
    copy = folder.with_name("retyped")
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": FAMILIES[family].model_type}))
    return copy


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_runs_in_int8(tmp_path: Path, load: Load, family: str) -> None:
    """Both forms of each family's tiny model: logits as the reference, every INT8 weight run, the cache as planned."""
    source = make_tiny(family, tmp_path / "source")
    reference = fake_quantized(known_to_transformers(source, family), quantized=quantized_by_role(source))
    ids = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(7))
    logits, expected = [], []
    for form in FORMS:
        convert(source, tmp_path / form, load_recipe("w8a8"), form=form, jobs=1)
        loaded = load(tmp_path / form, cache_tokens=ids.shape[1])
        with torch.no_grad(), trace(loaded):
            logits.append(loaded.model(input_ids=ids).logits)
        runner = make_runner(loaded, FLOAT, 1 + FLOAT.blocks(ids.shape[1]))
        Engine(runner).generate(ids.tolist(), 1)
        assert runner.nbytes == loaded.memory.kv_cache
        verdict = judge(loaded.account)
        assert verdict.expected > 0
        assert not verdict.fallbacks
        assert set(verdict.missing) <= loaded.account.routed
        expected.append(loaded.account.expected)
    assert expected[0] == expected[1]
    assert torch.equal(logits[0], logits[1])
    with torch.no_grad():
        want = reference(input_ids=ids).logits
    assert float((logits[0] - want).norm() / want.norm()) < 1e-5


def test_tied_ends_share_one_table(tmp_path: Path, load: Load) -> None:
    source = make_tiny("gemma2", tmp_path / "source")
    for form in FORMS:
        convert(source, tmp_path / form, load_recipe("w8a8"), form=form, jobs=1)
        model: Any = load(tmp_path / form).model
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        assert not isinstance(model.lm_head, Int8Linear)


def test_shards_of_two_ranks_are_refused(tmp_path: Path, load: Load) -> None:
    convert(outputs.MODELS / TINY[0], tmp_path / "out", load_recipe("w8a8"), form="sharded", mesh=Mesh(tp=2), jobs=1)
    with pytest.raises(UsageError, match="tp=2 pp=1 ep=1 dp=1"):
        load(tmp_path / "out")


@pytest.mark.parametrize("form", FORMS)
def test_an_unfinished_conversion_is_refused(tmp_path: Path, load: Load, form: Form) -> None:
    assert loader.WORK_FOLDER == WORK_NAME
    out = tmp_path / "out"
    convert(outputs.MODELS / TINY[0], out, load_recipe("w8a8"), form=form, jobs=1)
    for name in ("manifest.json", "quantkit_manifest.json"):
        (out / name).unlink(missing_ok=True)
    with pytest.raises(BrokenShard, match="unfinished conversion"):
        load(out)
