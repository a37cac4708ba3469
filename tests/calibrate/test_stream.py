"""Streaming against the whole model, and what is observed against a recording of every matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate import experts
from quantkit.calibrate.data import Batch
from quantkit.calibrate.observe import LayerObserver, missing_gemms
from quantkit.calibrate.stream import LayerStream
from quantkit.calibrate.weights import expected_gemms, gemm_keys
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError
from quantkit.recipe import load_recipe

CPU = torch.device("cpu")
FAMILIES = (
    "qwen2",  # tied
    "gemma3",  # sliding windows, scaled embeddings, (1 + w) norms
    "phi3",  # fused qkv and gate_up
    "mixtral",
    "qwen3_next",  # linear attention, gated shared expert
    "deepseek_v32",  # latent attention, indexer
    "gpt_oss",  # transposed, interleaved, biases, sinks
)


def whole_model(root: Path, **options: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, **options).eval()


def tokens(vocabulary: int, shape: tuple[int, int] = (3, 37)) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(7))


def stream_logits(source: Source, ids: Tensor, implementation: str = "") -> tuple[Tensor, list[LayerObserver]]:
    """Logits of a streamed run with every layer observed."""
    stream = LayerStream(source, dtype=torch.float32, device=CPU, experts=implementation)
    hidden: Tensor | None = None
    observers = []
    for layer in range(len(stream)):
        observer = LayerObserver(source.arch, source.dims, layer, f"{stream.prefix}.{layer}", kinds=1, device=CPU)
        observer.begin(Batch(ids, 0, tuple(range(len(ids))), ("",) * len(ids)))
        with stream.materialized(layer) as module, observer.attached(module):
            hidden = stream.run_layer(layer, ids, hidden)
        assert all(parameter.is_meta for parameter in stream.layers[layer].parameters())
        observers.append(observer)
    assert hidden is not None
    return stream.logits(ids, hidden), observers


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


@pytest.mark.parametrize("family", ["minimax", "deepseek", *FAMILIES])
def test_logits_are_bit_identical(family: str, tiny: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(family) if family in ("minimax", "deepseek") else tiny(family)
    experts.register()
    with_source = Source(root)
    ids = tokens(with_source.dims.vocab)
    with torch.inference_mode():
        wanted = whole_model(root)(input_ids=ids, use_cache=False).logits
    plain, _ = stream_logits(with_source, ids)
    assert torch.equal(plain, wanted)
    observed, observers = stream_logits(with_source, ids, experts.IMPLEMENTATION)
    torch.testing.assert_close(observed, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))
    gemms = expected_gemms(with_source, load_recipe("w8a8"))
    assert {key for observer in observers for key in observer.rows} <= gemms.keys()
    for layer, observer in enumerate(observers):
        mine = [key for key in gemms if key.layer == layer]
        assert missing_gemms(mine, observer, with_source.dims.experts_per_token) == []


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
    observer = LayerObserver(source.arch, source.dims, 0, f"{stream.prefix}.0", kinds=1, device=CPU)
    observer.begin(Batch(ids, 0, (0, 1, 2), ("",) * 3))
    with stream.materialized(0) as module:
        bare = stream.run_layer(0, ids, None)
        with observer.attached(module):
            observed = stream.run_layer(0, ids, None)
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


def test_layers_that_hand_on_more_than_hidden_states_are_refused(tiny: Callable[[str], Path]) -> None:
    source = Source(tiny("glm_moe_dsa"))
    stream = LayerStream(source, dtype=torch.float32, device=CPU)
    with stream.materialized(0), pytest.raises(InputError, match="cannot be run one at a time"):
        stream.run_layer(0, tokens(source.dims.vocab), None)
