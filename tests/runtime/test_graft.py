"""The loaded model against references that know nothing of it: logits and greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.archs.modeling import load_tokenizer
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.layers import Int8Experts, Int8Linear
from tests.reference import fake_quantized, greedy, transformers_model
from tests.runtime import outputs
from tests.runtime.conftest import TINY, generate

Converted = Callable[..., Path]
Load = Callable[..., LoadedModel]
PROMPTS = ("The king said to his daughter that the sea", "def quantize(x, scale):\n    return", "今天天气很好，我们")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def encode(model: str, text: str) -> torch.Tensor:
    ids = load_tokenizer(outputs.MODELS / model)(text, return_tensors="pt").input_ids
    assert isinstance(ids, torch.Tensor)
    return ids


def groups_of_128(width: Callable[[str], int]) -> Callable[[str], int]:
    """Group size of scheme `w8a8-group128`: 128, or the largest divisor of K below it."""
    return lambda name: max(size for size in range(1, 129) if width(name) % size == 0)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_logits_and_greedy_tokens_equal_the_fake_quantized_reference(
    converted: Converted, load: Load, model: str, form: str
) -> None:
    loaded, reference = load(converted(model, form)), fake_quantized(outputs.MODELS / model)
    for text in PROMPTS:
        ids = encode(model, text)
        with torch.no_grad():
            got, want = loaded.model(input_ids=ids).logits, reference(input_ids=ids).logits
        assert relative(got, want) < 1e-5
        assert generate(loaded, ids, 12) == greedy(reference, ids, 12)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_activation_groups_of_the_manifest_are_used(converted: Converted, load: Load, model: str, form: str) -> None:
    loaded = load(converted(model, form, "group"))
    source = transformers_model(outputs.MODELS / model, torch.float32)

    def width(name: str) -> int:
        found = source.get_parameter(name if ".experts." in name else f"{name}.weight")
        return int(found.shape[-1])

    reference = fake_quantized(outputs.MODELS / model, groups_of_128(width))
    ids = encode(model, PROMPTS[0])
    with torch.no_grad():
        got, want = loaded.model(input_ids=ids).logits, reference(input_ids=ids).logits
        plain = load(converted(model, form)).model(input_ids=ids).logits
    assert relative(got, want) < 1e-5
    assert relative(plain, want) > 1e-4  # the groups matter, so the first comparison means something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["source", "checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_unquantized_weights_give_transformers_logits_bit_for_bit(
    converted: Converted, load: Load, model: str, form: str, dtype: torch.dtype
) -> None:
    folder = outputs.MODELS / model if form == "source" else converted(model, form, "keep")
    loaded, reference = load(folder, dtype), transformers_model(outputs.MODELS / model, dtype)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # transformers rounds some families' correction biases to bf16, which makes experts tie; we never do
            stored = transformers_model(outputs.MODELS / model, torch.float32).get_buffer(name)
            reference.get_submodule(name.rpartition(".")[0])._buffers["e_score_correction_bias"] = stored
            assert buffer.shape == stored.shape
    ids = encode(model, PROMPTS[0])
    with torch.no_grad():
        got, want = loaded.model(input_ids=ids).logits, reference(input_ids=ids).logits
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    for name, value in reference.state_dict().items():
        mine = loaded.model.state_dict()[name]
        assert mine.dtype == value.dtype, name
        assert torch.equal(mine, value), name


@pytest.mark.parametrize("model", TINY)
def test_what_is_stored_in_int8_is_an_int8_module_and_nothing_else(
    converted: Converted, load: Load, model: str
) -> None:
    loaded = load(converted(model))
    int8 = {name for name, module in loaded.model.named_modules() if isinstance(module, Int8Linear | Int8Experts)}
    assert int8 == {row.name.removesuffix(".weight") for row in loaded.planned if row.int8}
    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert name.split(".")[-1] in {"lm_head", "q_a_proj", "kv_a_proj_with_mqa"}


def test_fused_shards_are_cut_without_copies(converted: Converted, load: Load) -> None:
    loaded = load(converted("tiny-minimax-m2", "sharded"))
    attention = loaded.model.get_submodule("model.layers.2.self_attn")
    pointers = {getattr(attention, f"{part}_proj").weight.untyped_storage().data_ptr() for part in "qkv"}
    assert len(pointers) == 1
