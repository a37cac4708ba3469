"""On a HIP or CUDA card: the INT8 product is exact, and a model runs as on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.archs.modeling import load_tokenizer
from quantkit_instruments import smoke
from quantkit_instruments.perplexity import perplexity, windows
from quantkit_runtime import device as devices
from quantkit_runtime.graft import LoadedModel, load_model
from quantkit_runtime.kernels import int_mm, reference, registry
from tests.runtime import outputs
from tests.runtime.conftest import TINY
from tests.runtime.test_kernels import SIZES, random_int8, ref_int32_product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")]


@pytest.mark.parametrize(("t", "n", "k"), SIZES)
@pytest.mark.parametrize("product", [reference.int32_product, int_mm.int32_product], ids=["f32-chunks", "int_mm"])
def test_product_is_exact(product: reference.Product, t: int, n: int, k: int) -> None:
    x, w = random_int8(k, t, k), random_int8(k + 1, n, k)
    assert np.array_equal(product(x.cuda(), w.cuda()).cpu().numpy(), ref_int32_product(x, w))


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("model", TINY)
def test_smoke_load_on_the_card(converted: Callable[..., Path], model: str, form: str) -> None:
    result = smoke.run(smoke.Options(converted(model, form), prompt="The king said", max_new_tokens=8))
    assert result.passed
    assert result.loaded.device.family in ("cuda", "hip")
    assert result.verdict.forward + result.verdict.self_tested == result.verdict.expected
    ops = ("w8a8_gemm", "grouped_gemm", "expert_gemm", "quantize_gemm")
    own = {name for op in ops for name in registry.names(op, result.loaded.device.family)}
    assert {row.kernel for row in result.rows if row.dtype == "int8"} <= own
    assert result.memory_peak > 0
    for name, value in result.loaded.model.state_dict().items():
        assert value.is_cuda, name


@pytest.mark.parametrize("model", TINY)
def test_perplexity_is_that_of_the_cpu(
    converted: Callable[..., Path], load: Callable[..., LoadedModel], model: str
) -> None:
    """Rounding differs between devices, so that activations next to a boundary fall on either side of it."""
    lines = (outputs.MODELS / "texts" / "english.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    ids = windows(load_tokenizer(outputs.MODELS / model), texts, 128)[:8]
    card = devices.resolve("auto")
    on_card = load_model(converted(model), card, torch.float32).model
    got, want = perplexity(on_card, ids), perplexity(load(converted(model)).model, ids)
    assert got.value == pytest.approx(want.value, rel=3e-3)
