"""Fusions: equal to the model as it was, refused where they are not, and every GEMM still counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.errors import UsageError
from quantkit_instruments.trace import gemm_rows
from quantkit_runtime import fuse
from quantkit_runtime.account import Account
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.layers import Int8Linear
from tests.reference import quantized_weight

IDS = torch.tensor([[5, 9, 77, 3, 41]])


def int8(n: int, k: int, seed: int, account: Account, bias: bool = False, group: int = 0) -> Int8Linear:
    generator = torch.Generator().manual_seed(seed)
    q, scale = quantized_weight(torch.randn(n, k, generator=generator))
    b = torch.randn(n, generator=generator) if bias else None
    options: dict[str, Any] = {"group_size": group, "account": account, "family": "cpu"}
    return Int8Linear(q.to(torch.int8), scale.float(), b, names=(f"w{seed}",), **options)


class Mlp(nn.Module):
    def __init__(self, act_fn: nn.Module, account: Account) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = int8(24, 16, 1, account), int8(24, 16, 2, account)
        self.down_proj, self.act_fn = int8(16, 24, 3, account), act_fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("model", ["tiny-minimax-m2", "tiny-deepseek-v3"])
@pytest.mark.parametrize("scheme", ["w8a8", "group"])
def test_a_fused_model_gives_the_same_logits(
    converted: Callable[..., Path], load: Callable[..., LoadedModel], model: str, scheme: str
) -> None:
    loaded = load(converted(model, "checkpoint", scheme))
    with torch.no_grad():
        want = loaded.model(input_ids=IDS, use_cache=False).logits
        outcomes = {outcome.name: outcome for outcome in fuse.apply(loaded.model)}
        got = loaded.model(input_ids=IDS, use_cache=False).logits
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert any(outcome.fused for outcome in outcomes.values())


@pytest.mark.parametrize("bias", [False, True])
def test_joined_projections_run_once_and_count_as_all(bias: bool) -> None:
    account, layer = Account(), nn.Module()
    layer.q_proj, layer.k_proj, layer.v_proj = (int8(n, 16, n, account, bias) for n in (12, 4, 8))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    want = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    calls = sum(row.calls for row in gemm_rows(account) if row.phase == "forward")
    [outcome] = fuse.apply(layer, ["qkv"])
    assert outcome.fused == ("",)
    got = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert sum(row.calls for row in gemm_rows(account) if row.phase == "forward") == calls + 1
    assert account.ran_int8("forward") == {"w12", "w4", "w8"}
    other = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(layer.q_proj(other), got[0])


def test_the_activation_is_fused_where_it_is_silu_and_refused_where_not() -> None:
    for act_fn, fused in ((nn.SiLU(), True), (nn.GELU(), False)):
        account = Account()
        mlp = Mlp(act_fn, account)
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
        want = mlp(x)
        _, outcome = fuse.apply(mlp, ["gate_up", "act_quant"])
        assert bool(outcome.fused) is fused
        assert fused or "differs by" in outcome.refused[0]
        torch.testing.assert_close(mlp(x), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gemma", "layer norm"])
def test_a_norm_hands_over_what_it_quantized(kind: str) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    account, layer = Account(), nn.Module()
    layer.self_attn = nn.Module()
    layer.self_attn.q_proj = int8(12, 16, 1, account)
    norm: Any = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "layer norm": nn.LayerNorm}[kind](16)
    norm.weight.data = torch.randn(16, generator=torch.Generator().manual_seed(3))
    layer.input_layernorm = norm
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = layer.self_attn.q_proj(norm(x))
        [outcome] = fuse.apply(layer, ["norm_quant"])
        normed = norm(x)
        got = layer.self_attn.q_proj(normed)
    assert bool(outcome.fused) is (kind != "layer norm")
    assert hasattr(normed, "int8") is (kind != "layer norm")
    assert torch.equal(got, want)
    if kind == "layer norm":
        assert "LayerNorm is another norm" in outcome.refused[0]


def test_layers_that_do_not_fit_together_stay_apart() -> None:
    account, layer = Account(), nn.Module()
    layer.gate_proj, layer.up_proj = int8(8, 16, 1, account), int8(8, 16, 2, account, group=4)
    [outcome] = fuse.apply(layer, ["gate_up"])
    assert outcome.refused == (": its projections differ in inputs, groups or bias",)
    layer.up_proj = nn.Linear(16, 8)
    [outcome] = fuse.apply(layer, ["gate_up"])
    assert "not all" in outcome.line


def test_an_unknown_fusion_is_refused() -> None:
    with pytest.raises(UsageError, match="qvk"):
        fuse.apply(nn.Module(), ["qvk"])
