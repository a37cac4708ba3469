"""Fake quantization against float64 arithmetic in numpy: linear modules, experts, groups, odd sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.archs import Key
from quantkit.calibrate import experts
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.fake_quant import BF16, FakeQuantizer, round_tokens
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.reader import Source
from quantkit.spec.scheme import SCHEMES

Array = NDArray[np.float64]


def rounded(x: Array) -> Array:
    """INT8 with one scale for each row; scale and quotient are float32, as the format says, the rest float64."""
    narrow = x.astype(np.float32)
    scale = np.abs(narrow).max(-1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(narrow / scale), -127, 127).astype(np.float64) * scale


@pytest.mark.parametrize(("k", "group"), [(96, 96), (130, 65), (256, 128), (7, 7)])
def test_groups_have_their_own_scales(k: int, group: int) -> None:
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(k)) * torch.linspace(0.1, 9, k)
    wanted = rounded(x.double().numpy().reshape(5, -1, group)).reshape(5, k)
    np.testing.assert_allclose(round_tokens(x, SCHEMES["w8a8-group128"]).numpy(), wanted, rtol=1e-6)


def test_a_layer_runs_as_its_schemes_say(minimax: Path) -> None:
    """Only the output projection quantized, only the experts' down projections, nothing."""
    source = Source(minimax)
    experts.register()
    stream = LayerStream(source, dtype=torch.float32, device=torch.device("cpu"), experts=experts.IMPLEMENTATION)
    seen: dict[str, torch.Tensor] = {}
    value = LayerInput(torch.randn(1, 9, source.dims.hidden, generator=torch.Generator().manual_seed(1)))
    quantizer = FakeQuantizer(source.arch, f"{stream.prefix}.2")
    with stream.materialized(2) as layer, quantizer.attached(layer, ["attn.o", "expert.down"]):
        module = layer.get_submodule("self_attn.o_proj")
        handle = module.register_forward_hook(lambda _m, args, out: seen.update(x=args[0], y=out))
        plain = stream.run_layer(2, value).hidden
        assert torch.equal(seen["y"], torch.nn.functional.linear(seen["x"], module.weight))
        with quantizer.running({"attn.o": SCHEMES["w8a8"]}):
            only_o = stream.run_layer(2, value).hidden
        w = source.get(Key(2, "attn.o")).double().numpy()
        wanted = rounded(seen["x"][0].double().numpy()) @ rounded(w).T
        np.testing.assert_allclose(seen["y"][0].numpy(), wanted, rtol=1e-4, atol=1e-5)
        with quantizer.running({"expert.down": SCHEMES["w8a8"]}):
            only_down = stream.run_layer(2, value).hidden
        assert torch.equal(seen["y"], torch.nn.functional.linear(seen["x"], module.weight))
        with quantizer.running(BF16):
            stream.run_layer(2, value)
        wide = torch.nn.functional.linear(seen["x"].bfloat16().float(), module.weight)
        assert torch.equal(seen["y"], wide.bfloat16().float())
        handle.remove()
        assert torch.equal(stream.run_layer(2, value).hidden, plain)
    assert not torch.equal(only_o, plain)
    assert not torch.equal(only_down, plain)


def test_experts_equal_one_product_for_each_token(minimax: Path) -> None:
    source = Source(minimax)
    experts.register()
    stream = LayerStream(source, dtype=torch.float32, device=torch.device("cpu"), experts=experts.IMPLEMENTATION)
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(7, source.dims.hidden, generator=generator)
    index = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator)
    quantizer = FakeQuantizer(source.arch, f"{stream.prefix}.1")
    schemes = dict.fromkeys(("expert.gate", "expert.up", "expert.down"), SCHEMES["w8a8"])
    with stream.materialized(1) as layer, quantizer.attached(layer, schemes):
        module = layer.get_submodule("mlp.experts")
        with quantizer.running(schemes), torch.no_grad():
            found = module(x_TH, index, weights)
    for token in range(7):
        total = np.zeros(source.dims.hidden)
        for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
            gate, up, down = (
                rounded(source.get(Key(1, f"expert.{part}", expert)).double().numpy())
                for part in ("gate", "up", "down")
            )
            x = rounded(x_TH[token].double().numpy()[None])[0]
            gated = gate @ x
            y = rounded((gated / (1 + np.exp(-gated)) * (up @ x))[None])[0]
            total += weight * (down @ y)
        # a float32 sum may fall on the other side of a tie than a float64 one: half a step of one input in 96
        np.testing.assert_allclose(found[token].numpy(), total, atol=2e-3 * np.abs(total).max())


@pytest.mark.parametrize("block", [1, 96 * 5, 1 << 22])
def test_a_weight_is_rounded_and_multiplied_in_blocks_of_rows(
    minimax: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Rows of 96 in blocks of one, of five with a rest, and whole: what leaves the layer is the same."""
    monkeypatch.setattr("quantkit.calibrate.fake_quant._BLOCK_ELEMENTS", block)
    source = Source(minimax)
    experts.register()
    stream = LayerStream(source, dtype=torch.float32, device=torch.device("cpu"), experts=experts.IMPLEMENTATION)
    value = LayerInput(torch.randn(1, 9, source.dims.hidden, generator=torch.Generator().manual_seed(1)))
    quantizer = FakeQuantizer(source.arch, f"{stream.prefix}.2")
    schemes = dict.fromkeys(("attn.q", "attn.o", "expert.gate", "expert.up", "expert.down"), SCHEMES["w8a8"])
    with stream.materialized(2) as layer, quantizer.attached(layer, schemes):
        module = layer.get_submodule("self_attn.q_proj")
        entered: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda _m, args: entered.append(args[0]))
        with quantizer.running(schemes):
            q = module(torch.randn(2, 3, source.dims.hidden, generator=torch.Generator().manual_seed(2)))
            found = stream.run_layer(2, value).hidden
    w = source.get(Key(2, "attn.q")).double().numpy()
    wanted = rounded(entered[0].double().numpy().reshape(6, -1)) @ rounded(w).T
    np.testing.assert_allclose(q.numpy().reshape(6, -1), wanted, rtol=1e-4, atol=1e-5)
    assert found.shape == value.hidden.shape
    assert bool(torch.isfinite(found).all())
