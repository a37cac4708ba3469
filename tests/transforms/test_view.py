"""The view as a source: slices, dtypes, untied heads, the registry of methods and its recipe keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.archs import Key, Kind
from quantkit.archs.assemble import assemble
from quantkit.calibrate.methods import METHODS, method, view_of
from quantkit.calibrate.methods.base import stored_vectors
from quantkit.checkpoint.effects import matrix
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.transformed import TransformedSource
from quantkit.errors import InputError, UsageError
from quantkit.recipe import Recipe, load_recipe, parse_recipe
from quantkit.rotation import Rotation
from quantkit.spec.transform import VECTORS_NAME, FoldNorm, RotateResidual, ScalePair, Transforms

Tiny = Callable[..., Path]

ROTATED = ["llama", "qwen2", "phi3", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "qwen3_next"]


def _rotated(source: Source) -> TransformedSource:
    return TransformedSource(source, Transforms(steps=(FoldNorm(), RotateResidual(seed=2))))


@pytest.mark.parametrize("family", ROTATED)
def test_rows_equal_the_whole_bit_for_bit(tiny: Tiny, family: str) -> None:
    view = view_of(Source(tiny(family)), [method("rotate").options(name="rotate", heads=family != "qwen3_next")])
    for key, entry in view.entries.items():
        whole = view.fetch(key)
        assert tuple(whole.shape) == entry.shape
        for start in range(0, entry.shape[0], step := max(1, entry.shape[0] // 3)):
            stop = min(start + step, entry.shape[0])
            assert torch.equal(view.fetch(key, (start, stop)), whole[start:stop]), entry.name


@pytest.mark.parametrize("family", ROTATED)
def test_some_rows_of_a_table_equal_those_of_the_whole(tiny: Tiny, family: str) -> None:
    view = _rotated(Source(tiny(family)))
    for key in (Key(None, "embed"), Key(None, "lm_head"), Key(0, "attn.o")):
        if key in view.entries:
            stored, computed = view.fetch_lazily(key, (5, 40))
            wanted = torch.tensor([2, 17, 3])
            assert torch.equal(computed(stored[wanted]), view.fetch(key)[5 + wanted])
    stored, computed = Source(tiny(family)).fetch_lazily(Key(None, "embed"), (5, 40))
    assert computed(stored) is stored


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_blocks_on_several_threads_are_the_whole_bit_for_bit(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the caller is in inference mode, which its threads are not."""
    source, methods = Source(tiny(family)), [method("rotate").options(name="rotate")]
    whole = view_of(source, methods)
    shared = view_of(source, methods, threads=3)
    expected = {key: whole.fetch(key) for key in whole.entries}
    monkeypatch.setattr("quantkit.checkpoint.transformed.BLOCK", 512)
    with torch.inference_mode():
        for key, value in expected.items():
            assert torch.equal(shared.fetch(key), value), key.shard_name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("family", ROTATED)
def test_an_accelerator_computes_the_bits_of_the_cpu(tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("rotate",) if family == "gpt_oss" else ("rotate", "balance")  # its feed-forward is not linear in up
    source, methods = Source(tiny(family)), [method(name).options(name=name) for name in names]
    here, there = view_of(source, methods), view_of(source, methods, device="cuda")
    for block in (1 << 23, 512):
        monkeypatch.setattr("quantkit.checkpoint.transformed.ACCELERATOR_BLOCK", block)
        for key in here.entries:
            assert torch.equal(there.fetch(key), here.fetch(key)), key.shard_name


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_values_are_those_of_the_formula(tiny: Tiny, family: str) -> None:
    """W diag(g) Q for readers and Q^T W for writers, in float64 with the matrix written out."""
    source = Source(tiny(family))
    view, q = _rotated(source), Rotation(source.dims.hidden, 2).matrix()
    layer = source.dims.layers - 1
    reader, writer = ("router", "expert.down") if source.dims.experts else ("mlp.up", "mlp.down")
    norm = source.get(Key(layer, "norm.pre_mlp")).double()
    expected = source.get(Key(layer, reader)).double() * norm @ q
    torch.testing.assert_close(view.get(Key(layer, reader)), expected.float(), rtol=1e-6, atol=1e-7)
    expected = q.T @ source.get(Key(layer, writer)).double()  # of all experts where they are stacked
    torch.testing.assert_close(view.get(Key(layer, writer)), expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ROTATED)
def test_kept_dtypes(tiny: Tiny, family: str) -> None:
    """Routers in float32, everything else in the dtype that it has in the source; untouched entries are the same."""
    source = Source(tiny(family))
    view = _rotated(source)
    for key, entry in source.entries.items():
        found = view.entries[key]
        if not view.is_transformed(key):
            assert found is entry
            assert torch.equal(view.fetch(key), source.fetch(key))
        else:
            assert view.fetch(key).dtype == torch.float32
            is_router = source.arch.role(key.role).kind is Kind.ROUTER
            assert found.kept_dtype == ("F32" if is_router else entry.dtype)


def test_a_tied_head_gets_its_own_tensor(tiny: Tiny) -> None:
    source = Source(tiny("qwen2"))
    head, embed = Key(None, "lm_head"), Key(None, "embed")
    assert source.tied
    assert source.dims.tied
    view = _rotated(source)
    assert not view.tied
    assert not view.dims.tied
    assert view.config["tie_word_embeddings"] is False
    assert source.config["tie_word_embeddings"] is True
    assert view.entries[head].name == "lm_head.weight"
    assert view.files_of(head) == source.files_of(embed)
    table, q = source.get(embed).double(), Rotation(source.dims.hidden, 2).matrix()
    norm = source.get(Key(None, "norm.final")).double()
    torch.testing.assert_close(view.get(head), (table * norm @ q).float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(view.get(embed), (table @ q).float(), rtol=1e-6, atol=1e-7)
    balanced = view_of(source, [method("balance").options(name="balance")])
    assert balanced.tied  # it touches neither end


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "qwen3_5_moe", "deepseek_v3"])
def test_matrix_reads_what_assemble_builds(tiny: Tiny, family: str) -> None:
    source = Source(tiny(family))
    fetch = lambda key: source.canonical(key, source.fetch(key))  # noqa: E731
    experts = range(source.dims.experts) if source.dims.experts else (None,)
    prefix = "expert" if source.dims.experts else "mlp"
    for expert in experts:
        for part in ("gate", "up", "down"):
            key = Key(1, f"{prefix}.{part}", expert)
            assert torch.equal(matrix(source, key), assemble(source.arch, source.dims, key, source.has, fetch))


def test_every_method_has_a_file_and_a_row() -> None:
    folder = Path(__file__).parents[2] / "quantkit" / "calibrate" / "methods"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert set(METHODS.values()) == files
    for name in METHODS:
        assert method(name).options(name=name).name == name
    with pytest.raises(UsageError, match="unknown method 'spin'"):
        method("spin")


def test_recipe_keys_of_methods_are_strict() -> None:
    text = "name: x\ndescription: x\nmethods:\n  - {name: rotate, seed: 3}\n  - {name: balance}\n"
    recipe = parse_recipe(text, "x")
    assert [options.name for options in recipe.methods] == ["rotate", "balance"]
    assert recipe.methods[0].seed == 3
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert recipe.model_dump(mode="json")["methods"][0] == {
        "name": "rotate",
        "seed": 3,
        "residual": True,
        "heads": False,
    }
    for wrong, reason in {
        "{name: spin}": "choices: balance, rotate",
        "{name: rotate, sed: 3}": "sed: Extra inputs",
        "{name: balance, exponent: 2}": "exponent: Input should be less than",
        "rotate": "method rotate",
        "{seed: 3}": "unknown method",
    }.items():
        with pytest.raises(UsageError) as caught:
            parse_recipe(f"name: x\ndescription: x\nmethods: [{wrong}]\n", "x")
        assert reason.split(":")[0] in str(caught.value), wrong


def test_shipped_recipe() -> None:
    assert [options.name for options in load_recipe("w8a8-rotate").methods] == ["balance", "rotate"]


def test_vectors_of_an_artifact(tiny: Tiny, tmp_path: Path) -> None:
    """A data-driven pair reads its vectors by name; a producer without one is left as it is."""
    source, key = Source(tiny("llama")), Key(1, "mlp.up")
    scale = torch.linspace(0.5, 2, source.dims.intermediate)
    save_file({f"smooth.{key.shard_name}": scale}, tmp_path / VECTORS_NAME)
    vectors = stored_vectors(tmp_path)
    view = TransformedSource(source, Transforms(steps=(ScalePair(producer="mlp.up", vectors="smooth"),)), vectors)
    up, down = source.get(key).float(), source.get(Key(1, "mlp.down")).float()
    torch.testing.assert_close(view.get(key), up / scale[:, None])
    torch.testing.assert_close(view.get(Key(1, "mlp.down")), down * scale)
    assert torch.equal(view.get(Key(0, "mlp.up")), source.get(Key(0, "mlp.up")).float())
    with pytest.raises(InputError):
        stored_vectors(tmp_path / "nowhere")
