"""Fusions: equal to the model as it was, refused where they are not, and every GEMM still counted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantkit.errors import UsageError
from quantkit_instruments.trace import gemm_rows
from quantkit_runtime import fuse
from quantkit_runtime.account import Account
from quantkit_runtime.attention import probe_layers
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kernels import reference
from quantkit_runtime.kernels.reference import rope_write
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.layers import Int8Linear
from quantkit_runtime.runner import Chunk, PagedRunner
from quantkit_runtime.session import make_runner
from tests.families import FAMILY_NAMES, VOCAB, make_tiny
from tests.reference import quantized_weight
from tests.runtime.conftest import generate

FLOAT = KvFormat(torch.float32, torch.float32)
Load = Callable[..., LoadedModel]
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


ROTATE_THEMSELVES = {
    "deepseek_v2": "",  # by complex numbers: nothing of that name
    "deepseek_v3": "another function",
    "kimi_k2": "another function",
    "glm4_moe_lite": "another function",
}
"""Families with the paged cache that rotate as transformers wrote it, with the reason."""


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_rotates_in_the_cache_or_says_why_not(load: Load, tmp_path: Path, family: str) -> None:
    """By torch and by a kernel: the logits of one forward without a cache, which stays as it was."""
    loaded = load(make_tiny(family, tmp_path))
    paged = not isinstance(loaded.kv, str)
    ids = torch.randint(3, VOCAB, (1, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = loaded.model(input_ids=ids, use_cache=False).logits[0]
        outcomes = fuse.apply(loaded.model, ["rope"], paged=paged)
        assert torch.equal(loaded.model(input_ids=ids, use_cache=False).logits[0], want)
    if not paged:
        assert outcomes == []
        return
    assert loaded.account.calls.keys() == {row for row in loaded.account.calls if row[1] != "int8"}
    if family in ROTATE_THEMSELVES:
        assert not outcomes[0].fused
        assert all(ROTATE_THEMSELVES[family] in line for line in outcomes[0].refused)
    else:
        assert (len(outcomes[0].fused), outcomes[0].refused) == (loaded.files.dims.layers, ())
    plain = make_runner(loaded, FLOAT, 3)
    assert isinstance(plain, PagedRunner)
    kernel = PagedRunner(plain.model, make_runner(loaded, FLOAT, 3).cache, plain.device, plain.decode, rope_write)
    tokens = ids[0].tolist()
    for runner in (plain, kernel):
        assert runner.reserve(0, 23)
        got = [runner.forward([Chunk(0, 0, tokens[:22])]), runner.forward([Chunk(0, 22, tokens[22:])])]
        torch.testing.assert_close(torch.cat(got), want[-2:], rtol=0, atol=1e-5 * float(want.abs().max()))


def test_a_rotation_that_gets_lost_is_an_error_and_no_other_model_is_touched(load: Load, tmp_path: Path) -> None:
    root = make_tiny("llama", tmp_path)
    loaded, other = load(root), load(root)
    [outcome] = fuse.apply(loaded.model, ["rope"])
    assert len(outcome.fused) == 3
    model: Any = loaded.model
    layer = model.model.layers[1].self_attn
    assert "apply_rotary_pos_emb" in type(layer).forward.__globals__
    assert layer.forward.module is layer
    assert "forward" not in vars(other.model.get_submodule("model.layers.1.self_attn"))
    names = layer.forward.forward.__globals__
    changes = names["apply_rotary_pos_emb"]
    names["apply_rotary_pos_emb"] = lambda *given: tuple(2 * x for x in changes(*given))
    runner = make_runner(loaded, FLOAT, 3)
    assert runner.reserve(0, 4)
    with pytest.raises(RuntimeError, match="changed between their rotation and attention"):
        runner.forward([Chunk(0, 0, [3, 4, 5, 6])])


def test_a_model_that_changes_what_it_rotated_keeps_its_rotation(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    def own(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return tuple(2 * x for x in rotate(q, k, cos, sin))

    rotate = modeling_llama.apply_rotary_pos_emb
    loaded = load(make_tiny("llama", tmp_path))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    [outcome] = fuse.apply(loaded.model, ["rope"])
    assert not outcome.fused
    assert "its rotation is another: differs by" in outcome.refused[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_a_copy_of_a_fused_model_serves_as_well(
    load: Load, tmp_path: Path, copied: Callable[[nn.Module], nn.Module], family: str
) -> None:
    loaded = load(make_tiny(family, tmp_path))
    want = generate(loaded, IDS, 4)
    fuse.apply(loaded.model)
    assert fuse.apply(loaded.model)[-1].line == "rope: 3 fused"  # once more changes nothing
    assert generate(loaded, IDS, 4) == want
    other = replace(loaded, model=copied(loaded.model))
    del loaded
    assert generate(other, IDS, 4) == want


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def tripled(*given: Any, **named: Any) -> Any:
        out, *rest = forward(*given, **named)
        return 3 * out, *rest

    return tripled


@pytest.mark.parametrize("where", ["class", "module"])
def test_what_stands_around_a_forward_stays_there(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    if where == "class":
        monkeypatch.setattr(LlamaAttention, "forward", _wrapped(LlamaAttention.forward))
    loaded = load(make_tiny("llama", tmp_path))
    if where == "module":
        layer = loaded.model.get_submodule("model.layers.1.self_attn")
        layer.forward = _wrapped(layer.forward)
    want = generate(loaded, IDS, 4)
    [outcome] = fuse.apply(loaded.model, ["rope"])
    assert len(outcome.fused) == (0 if where == "class" else 2)
    assert all("another function stands" in line for line in outcome.refused)
    assert generate(loaded, IDS, 4) == want


def test_a_method_of_the_rotations_name_is_another() -> None:
    class Attention(nn.Linear):
        layer_idx = 0

        def apply_rotary_pos_emb(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apply_rotary_pos_emb(x)

    model: Any = nn.Sequential(Attention(2, 2))
    model.config = SimpleNamespace(_attn_implementation="eager")
    assert fuse.apply(model, ["rope"]) == [fuse.Outcome("rope", (), ())]


@pytest.mark.parametrize("error", [KeyError, IndexError, AssertionError, ZeroDivisionError, NotImplementedError])
def test_a_model_that_fails_in_the_proof_stays_as_it_was(load: Load, tmp_path: Path, error: type[Exception]) -> None:
    loaded = load(make_tiny("llama", tmp_path))
    want = generate(loaded, IDS, 4)

    def fails(*_: Any) -> None:
        raise error("what it says")

    hook = loaded.model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fails)
    assert "what it says" in str(probe_layers(loaded.model))
    [outcome] = fuse.apply(loaded.model, ["rope"])
    assert not outcome.fused
    assert all("what it says" in line for line in outcome.refused)
    hook.remove()
    assert generate(loaded, IDS, 4) == want


def test_a_rotation_is_proved_on_values_that_are_not_zero_whatever_the_model_computes(
    load: Load, tmp_path: Path
) -> None:
    """Vocabulary of two tokens, in a model whose embeddings are all zero while it is fused: neighbours are pairs."""
    loaded, ids = load(make_tiny("glm4", tmp_path)), torch.tensor([[1, 0, 0, 1, 1, 0]])
    model: Any = loaded.model
    model.resize_token_embeddings(2)
    table = model.get_input_embeddings().weight.data
    runner = make_runner(loaded, FLOAT, 3)
    assert isinstance(runner, PagedRunner)
    assert runner.reserve(0, 6)
    chunk = Chunk(0, 0, ids[0].tolist())
    want, kept = runner.forward([chunk]), table.clone()
    table.zero_()
    [outcome] = fuse.apply(model, ["rope"])
    assert outcome.fused
    table.copy_(kept)
    torch.testing.assert_close(runner.forward([chunk]), want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("adjacent", [False, True])
def test_rotation_is_that_of_the_formula(adjacent: bool) -> None:
    """RoFormer (arXiv:2104.09864) in float64: each pair of the first 12 values is a complex number that is turned."""
    generator = torch.Generator().manual_seed(0)
    x, angle = torch.randn(5, 3, 20, generator=generator), torch.randn(5, 6, generator=generator)
    first, second = (slice(0, 12, 2), slice(1, 12, 2)) if adjacent else (slice(0, 6), slice(6, 12))
    want = x.double().numpy().copy()
    turned = (want[..., first] + 1j * want[..., second]) * np.exp(1j * angle.double().numpy())[:, None]
    want[..., first], want[..., second] = turned.real, turned.imag
    rope = reference.Rope(angle.cos(), angle.sin(), adjacent)
    np.testing.assert_allclose(reference.rotated(x, rope).numpy(), want, rtol=0, atol=2e-6)
    half = reference.rotated(x.bfloat16(), rope)
    assert half.dtype == torch.bfloat16
    np.testing.assert_allclose(half.double().numpy(), want, rtol=0, atol=2e-2)
