"""Streaming against the whole model, and what is observed against a recording of every matrix product."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate import experts
from quantkit.calibrate.activations import ActivationStore, LayerInput
from quantkit.calibrate.data import Batch
from quantkit.calibrate.observe import LayerObserver, missing_gemms
from quantkit.calibrate.stream import LayerStream
from quantkit.calibrate.weights import expected_gemms, gemm_keys
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError
from quantkit.recipe import load_recipe
from tests.families import FAMILIES, FAMILY_NAMES

CPU = torch.device("cpu")


def whole_model(root: Path, family: str = "", **options: object) -> torch.nn.Module:
    """transformers' model; MiniMax-M3 by its class, because AutoModelForCausalLM does not know its type."""
    import transformers

    name = FAMILIES[family].model_class if family == "minimax_m3" else "AutoModelForCausalLM"
    return getattr(transformers, name).from_pretrained(root, dtype=torch.float32, **options).eval()


def known_to_transformers(root: Path, family: str, folder: Path) -> Path:
    """The checkpoint under the model type that transformers has it under (Kimi-K2 is DeepSeek-V3)."""
    row = FAMILIES.get(family)
    if row is None or not row.retype:
        return root
    shutil.copytree(root, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace(f'"{row.retype}"', f'"{row.model_type}"'))
    return folder


def tokens(vocabulary: int, shape: tuple[int, int] = (3, 37)) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(7))


def stream_logits(source: Source, ids: Tensor, implementation: str = "") -> tuple[Tensor, list[LayerObserver]]:
    """Logits of a streamed run with every layer observed."""
    stream = LayerStream(source, dtype=torch.float32, device=CPU, experts=implementation)
    batch = Batch(ids, 0, tuple(range(len(ids))), ("",) * len(ids))
    with stream.embeddings(ids):
        value = stream.embed(ids)
    observers = []
    for layer in range(len(stream)):
        observer = LayerObserver(source.arch, source.dims, layer, f"{stream.prefix}.{layer}", kinds=1, device=CPU)
        with stream.materialized(layer) as module, observer.attached(module), observer.measuring(batch) as measured:
            value = stream.run_layer(layer, value)
        observer.merge(measured)
        assert all(parameter.is_meta for parameter in stream.layers[layer].parameters())
        observers.append(observer)
    return stream.logits(value), observers


def run_pieces(source: Source, batches: list[Tensor], threads: int) -> list[Tensor]:
    """Logits of several batches that go through each layer `threads` at a time."""
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    with stream.embeddings(torch.cat([ids.flatten() for ids in batches])):
        values = [stream.embed(ids) for ids in batches]
    with ThreadPoolExecutor(threads) as pool:
        for layer in range(len(stream)):
            with stream.materialized(layer):
                values = list(pool.map(partial(stream.run_layer, layer), values))
    return [stream.logits(value) for value in values]


@contextmanager
def recorded_products(model: torch.nn.Module, source: Source) -> Iterator[dict[Key, Tensor]]:
    """absmax per channel and rows of what enters every product with a decoder weight, caught in `F.linear`."""
    owners: dict[int, list[Key]] = {}
    for name, parameter in model.named_parameters():
        key = source.arch.parse(name)
        keys = gemm_keys(source.arch, source.dims, key) if key else []
        pieces = parameter if parameter.ndim == 3 else [parameter]
        for expert, piece in enumerate(pieces):
            mine = [each for each in keys if parameter.ndim == 2 or each.expert == expert]
            if mine:
                owners[piece.data_ptr()] = mine
    seen: dict[Key, Tensor] = {}
    original = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for key in owners.get(weight.data_ptr(), ()):
            seen[key] = x.reshape(-1, x.shape[-1]).abs().amax(0)
        return original(x, weight, bias)

    torch.nn.functional.linear = linear  # type: ignore[assignment]
    try:
        yield seen
    finally:
        torch.nn.functional.linear = original


@pytest.mark.parametrize("family", ["minimax", "deepseek", *FAMILY_NAMES])
def test_logits_are_bit_identical(
    family: str, tiny: Callable[[str], Path], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every family; and with our experts function, every GEMM is observed."""
    root = request.getfixturevalue(family) if family in ("minimax", "deepseek") else tiny(family)
    experts.register()
    with_source = Source(root)
    ids = tokens(with_source.dims.vocab)
    with torch.inference_mode():
        model = whole_model(known_to_transformers(root, family, tmp_path / "known"), family)
        wanted = model(input_ids=ids, use_cache=False).logits
    plain, _ = stream_logits(with_source, ids)
    assert torch.equal(plain, wanted)
    observed, observers = stream_logits(with_source, ids, experts.IMPLEMENTATION)
    torch.testing.assert_close(observed, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    gemms = expected_gemms(with_source, load_recipe("w8a8"))
    assert {key for observer in observers for key in observer.rows} <= gemms.keys()
    for layer, observer in enumerate(observers):
        mine = [key for key in gemms if key.layer == layer]
        assert mine
        assert missing_gemms(mine, observer, with_source.dims.experts_per_token) == []


@pytest.mark.parametrize("rows", [1, 7, 1 << 20])
def test_the_head_stays_as_it_is_stored_and_is_widened_some_rows_at_a_time(
    minimax: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    source = Source(minimax)
    monkeypatch.setattr("quantkit.calibrate.stream._TABLE_BYTES", rows * 4 * source.dims.hidden)
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    value = LayerInput(torch.randn(2, 5, source.dims.hidden, generator=torch.Generator().manual_seed(0)))
    norm, head = (source.get(Key(None, role)).double() for role in ("norm.final", "lm_head"))
    lm_head = stream.model.get_submodule("lm_head")
    with stream.head():
        assert lm_head.get_parameter("weight").dtype == torch.bfloat16
        got = stream.logits(value)
    x = value.hidden.double()
    x = x * (x.square().mean(-1, keepdim=True) + source.config["rms_norm_eps"]).rsqrt() * norm
    torch.testing.assert_close(got.double(), x @ head.T, rtol=0, atol=2e-5 * float(got.abs().max()))
    assert "forward" not in vars(lm_head)


@pytest.mark.parametrize("family", ["minimax", "deepseek", "mixtral", "qwen2_moe", "phi3"])
def test_observed_extremes_are_those_of_every_product(
    family: str, tiny: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(family) if family in ("minimax", "deepseek") else tiny(family)
    experts.register()
    source = Source(root)
    ids = tokens(source.dims.vocab)
    options = {"experts_implementation": "eager"} if source.dims.experts else {}
    model = whole_model(root, **options)
    with recorded_products(model, source) as seen, torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    _, observers = stream_logits(source, ids, experts.IMPLEMENTATION)
    gemms = expected_gemms(source, load_recipe("w8a8"))
    assert len(seen) > 0.5 * len(gemms)
    for key in gemms:
        observer = observers[key.layer or 0]
        assert (observer.rows[key] > 0) == (key in seen), key
        if key in seen:
            absmax = observer.inputs[observer.input_of[key]].absmax[key.expert or 0]
            torch.testing.assert_close(absmax, seen[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "minimax_m2", "ernie4_5_moe"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_equal_transformers_own(family: str, implementation: str, tiny: Callable[[str], Path]) -> None:
    """One experts module on random rows, also with a token whose experts coincide with nobody else's."""
    model = whole_model(tiny(family), experts_implementation=implementation)
    module = next(each for each in model.modules() if hasattr(each, "is_transposed"))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(23, model.config.hidden_size, generator=generator)
    index = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(23)])
    weights = torch.rand(23, 2, generator=generator)
    with torch.inference_mode():
        wanted = module(hidden, index, weights)
        found = experts.experts_forward(module, hidden, index, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_observing_does_not_change_the_output(minimax: Path) -> None:
    experts.register()
    source = Source(minimax)
    stream = LayerStream(source, dtype=torch.float32, device=CPU, experts=experts.IMPLEMENTATION)
    ids = tokens(source.dims.vocab)
    with stream.embeddings(ids):
        value = stream.embed(ids)
    observer = LayerObserver(source.arch, source.dims, 0, f"{stream.prefix}.0", kinds=1, device=CPU)
    with stream.materialized(0) as module:
        bare = stream.run_layer(0, value).hidden
        with observer.attached(module), observer.measuring(Batch(ids, 0, (0, 1, 2), ("",) * 3)):
            observed = stream.run_layer(0, value).hidden
    assert torch.equal(bare, observed)


def test_one_input_is_measured_once(deepseek: Path) -> None:
    """q_a and kv_a share the norm's output; shared experts, routed experts and the router share theirs."""
    experts.register()
    source = Source(deepseek)
    _, observers = stream_logits(source, tokens(source.dims.vocab), experts.IMPLEMENTATION)
    assert set(observers[1].inputs) == {
        "layers.1.attn.in",
        "layers.1.attn.out",
        "layers.1.expert.down_in.experts",
        "layers.1.mla.kv_latent",
        "layers.1.mla.q_latent",
        "layers.1.mlp.in",
        "layers.1.mlp.in.experts",
        "layers.1.shared.down_in",
    }
    assert observers[1].inputs["layers.1.attn.in"].tokens.tolist() == [111]
    assert observers[1].inputs["layers.1.mlp.in"].tokens.tolist() == [111]
    assert observers[1].inputs["layers.1.mlp.in.experts"].tokens.sum() == 222


def test_undeclared_state_between_layers_is_refused(tiny: Callable[[str], Path]) -> None:
    source = Source(tiny("glm_moe_dsa"))
    source.arch = replace(source.arch, carried_state={})
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    ids = tokens(source.dims.vocab)
    with stream.embeddings(ids), pytest.raises(InputError, match="cannot be run one at a time") as caught:
        stream.embed(ids)
    assert "carried_state" in caught.value.hint


def test_state_between_layers_is_carried(tiny: Callable[[str], Path]) -> None:
    """GLM-5's second layer reads the first one's selection, which leaves out some of 37 tokens."""
    source = Source(tiny("glm_moe_dsa"))
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    ids = tokens(source.dims.vocab)
    with stream.embeddings(ids):
        value = stream.embed(ids)
    assert not value.carried
    with stream.materialized(0):
        value = stream.run_layer(0, value)
    selection = value.carried["prev_topk_indices"]
    assert selection.shape == (3, 37, 16)
    with stream.materialized(1):
        after = stream.run_layer(1, value)
        other = stream.run_layer(1, LayerInput(value.hidden, {"prev_topk_indices": selection.flip(0)}))
    assert after.carried["prev_topk_indices"].equal(selection)
    assert not after.hidden.equal(other.hidden)


@pytest.mark.parametrize("family", ["phi3", "glm_moe_dsa", "qwen3_next", "gpt_oss"])
def test_batches_side_by_side(family: str, tiny: Callable[[str], Path]) -> None:
    """Batches of different lengths in one layer at the same time do not touch each other."""
    source = Source(tiny(family))
    batches = [tokens(source.dims.vocab, (1 + number % 3, 9 + 4 * number)) for number in range(9)]
    wanted = run_pieces(source, batches, 1)
    for found, each in zip(run_pieces(source, batches, 4), wanted, strict=True):
        assert torch.equal(found, each)


def stream_of_broken(source: Source, patch: pytest.MonkeyPatch) -> LayerStream:
    """A stream whose table has a NaN in row 77."""
    original = source.fetch

    def fetch(key: Key, rows: tuple[int, int] | None = None) -> Tensor:
        found = original(key, rows).clone()
        if key == Key(None, "embed") and rows is not None and rows[0] <= 77 < rows[1]:
            found[77 - rows[0], 5] = torch.nan
        return found

    patch.setattr(source, "fetch", fetch)
    return LayerStream(source, dtype=torch.float32, device=CPU)


def test_embedding_rows_that_are_not_needed_are_checked_and_left_alone(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(tiny("gemma3"))
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    ids = torch.tensor([[5, 3, 5, 130]])
    with stream.embeddings(ids):
        table = stream.model.get_input_embeddings().weight
        assert table[[3, 5, 130]].equal(source.get(Key(None, "embed"))[[3, 5, 130]].float())
    assert stream.model.get_input_embeddings().weight.is_meta
    with (
        pytest.raises(InputError, match=r"embed_tokens\.weight holds NaN"),
        monkeypatch.context() as patch,
        stream_of_broken(source, patch).embeddings(ids),
    ):
        pass


def test_store_in_memory_and_spooled(tmp_path: Path) -> None:
    """Any dtype and shape; what a later process finds on disk is what was put."""
    values = [
        LayerInput(torch.randn(2, 5 + number, 7), {"a": torch.arange(number + 1), "b": torch.tensor([[True]])})
        for number in range(3)
    ]
    values.append(LayerInput(torch.randn(1, 3, 7).bfloat16(), {}))
    for spool in (False, True):
        store = ActivationStore(tmp_path, len(values), spool=spool, device=CPU)
        for index, value in enumerate(values):
            store.put(4, index, value)
        assert store.last_boundary(9) == 0
        store.commit(4)
        assert store.last_boundary(9) == (4 if spool else 0)
        if spool:
            store = ActivationStore(tmp_path, len(values), spool=True, device=CPU)
        store.start(4)
        for index in (2, 0, 3, 1):
            found = store.get(index)
            assert found.hidden.dtype == values[index].hidden.dtype
            assert found.hidden.equal(values[index].hidden)
            assert found.carried.keys() == values[index].carried.keys()
            assert all(each.equal(values[index].carried[name]) for name, each in found.carried.items())
        store.forget(4)
    assert not list(tmp_path.iterdir())


def test_experts_of_a_stacked_tensor_are_read_one_by_one(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(tiny("gpt_oss"))
    read: list[int] = []
    original = Source.fetch

    def fetch(self: Source, key: Key, rows: tuple[int, int] | None = None) -> Tensor:
        found = original(self, key, rows)
        if key.role.startswith("expert."):
            read.append(found.shape[0])
        return found

    monkeypatch.setattr(Source, "fetch", fetch)
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    with stream.materialized(1):
        pass
    assert read == [1] * (4 * source.dims.experts)
