"""Int8Linear and the experts function against formulas in float64 and against transformers' own experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantkit_instruments.trace import gemm_rows
from quantkit_runtime import experts
from quantkit_runtime.account import Account
from quantkit_runtime.errors import ShapeMismatch, UnsupportedDtype
from quantkit_runtime.layers import Int8Experts, Int8Linear
from tests.reference import quantized_weight, w8a8_linear


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, group: int = 0) -> tuple[Int8Linear, Account]:
    account = Account()
    q, scale = quantized_weight(weight)
    linear = Int8Linear(
        q.to(torch.int8), scale.float(), bias, group_size=group, names=("w",), account=account, family="cpu"
    )
    return linear, account


def ref_linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, group: int) -> np.ndarray:
    """Dequantized input times dequantized weight, everything but the two scales in float64."""

    def rounded(values: np.ndarray) -> np.ndarray:
        scale = (np.abs(values).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
        return np.rint(values / scale).astype(np.float64) * scale

    grouped = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    out = rounded(grouped).reshape(x.shape) @ rounded(w).T
    return out if bias is None else out + bias


@pytest.mark.parametrize("group", [0, 11, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(33,), (1, 33), (2, 3, 33)])
def test_linear_against_float64(shape: tuple[int, ...], with_bias: bool, group: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal((7, 33)).astype(np.float32)
    bias = rng.standard_normal(7).astype(np.float32) if with_bias else None
    linear, _ = make_linear(torch.from_numpy(w), None if bias is None else torch.from_numpy(bias), group)
    got = linear(torch.from_numpy(x))
    assert got.dtype == torch.float32
    want = ref_linear(x, w, bias, group)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_linear_keeps_the_dtype_of_its_input() -> None:
    linear, _ = make_linear(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)))
    assert linear(torch.ones(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_zero_rows_and_zero_tokens_give_zero() -> None:
    weight = torch.zeros(4, 8)
    weight[1] = 1
    linear, _ = make_linear(weight)
    x = torch.zeros(3, 8)
    x[1] = 2
    got = linear(x)
    assert bool(torch.isfinite(got).all())
    assert got.nonzero().tolist() == [[1, 1]]


def test_every_call_is_counted() -> None:
    linear, account = make_linear(torch.ones(4, 8))
    linear(torch.ones(1, 8))
    linear(torch.ones(2, 8))
    [row] = gemm_rows(account)
    assert (row.kernel, row.dtype, row.weights, row.calls) == ("f32-chunks", "int8", 1, 2)


@pytest.mark.parametrize(
    ("weight", "scale", "group"),
    [((4, 8), (4,), 0), ((4, 8), (8, 1), 0), ((4, 8), (1, 8), 0), ((4, 8), (4, 1), 3), ((1, 133_145), (1, 1), 0)],
)
def test_wrong_scales_groups_and_lengths_are_refused(
    weight: tuple[int, ...], scale: tuple[int, ...], group: int
) -> None:
    with pytest.raises(ShapeMismatch):
        Int8Linear(
            torch.zeros(weight, dtype=torch.int8),
            torch.ones(scale),
            None,
            group_size=group,
            names=("w",),
            account=Account(),
            family="cpu",
        )


# ------------------------------------------------------------------------------------------------ experts


def make_experts(kind: str) -> Any:
    """transformers' experts module of a family, with random weights; 5 experts."""
    if kind == "minimax_m2":
        from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Config, MiniMaxM2Experts

        sizes = {"num_local_experts": 5, "hidden_size": 24, "intermediate_size": 20}
        module = MiniMaxM2Experts(MiniMaxM2Config(**sizes))
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

        sizes = {"num_local_experts": 5, "hidden_size": 24, "intermediate_size": 20}
        module = GptOssExperts(GptOssConfig(**sizes))
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    module.config._experts_implementation = "eager"
    return module.eval()


def install(module: Any, parameter: str, group: int = 0) -> Account:
    weight = getattr(module, parameter).data
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    q, scale = quantized_weight(weight)
    account = Account()
    names = tuple((f"{parameter}.{e}",) for e in range(weight.shape[0]))
    projection = Int8Experts(
        q.to(torch.int8), scale.float(), group_size=group, names=names, account=account, family="cpu"
    )
    experts.install(module, parameter, projection)
    return account


def routed(tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, expert ids of which 3 is never chosen, weights that sum to 1."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, 24, generator=generator)
    index = torch.stack([torch.tensor([0, 1, 2, 4])[torch.randperm(4, generator=generator)[:2]] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    return hidden, index, weights / weights.sum(1, keepdim=True)


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("kind", ["minimax_m2", "gpt_oss"])
def test_experts_against_a_loop_over_tokens(kind: str, group: int) -> None:
    """gpt-oss: transposed weights, biases, clamped and interleaved gate."""
    module = make_experts(kind)
    hidden, index, weights = routed()
    up, down = module.gate_up_proj.data, module.down_proj.data
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    (q_up, s_up), (q_down, s_down) = quantized_weight(up), quantized_weight(down)
    want = torch.zeros(9, 24)
    for token in range(9):
        for slot in range(2):
            e = int(index[token, slot])
            bias = (module.gate_up_proj_bias[e], module.down_proj_bias[e]) if module.has_bias else (None, None)
            inner = module._apply_gate(w8a8_linear(hidden[token], q_up[e], s_up[e], bias[0], group))
            want[token] += w8a8_linear(inner, q_down[e], s_down[e], bias[1], group) * weights[token, slot]
    account_up, account_down = install(module, "gate_up_proj", group), install(module, "down_proj", group)
    with torch.no_grad():
        got = experts.experts_forward(module, hidden, index, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert account_up.ran_int8("forward") == {f"gate_up_proj.{e}" for e in (0, 1, 2, 4)}
    assert account_down.ran_int8("forward") == {f"down_proj.{e}" for e in (0, 1, 2, 4)}


@pytest.mark.parametrize("kind", ["minimax_m2", "gpt_oss"])
def test_integer_valued_experts_equal_transformers_eager(kind: str) -> None:
    """Weights that INT8 holds exactly and inputs that it rounds little: transformers' own forward is the reference."""
    module = make_experts(kind)
    hidden, index, weights = routed()
    with torch.no_grad():
        want = module(hidden, index, weights)
        install(module, "gate_up_proj")
        install(module, "down_proj")
        got = experts.experts_forward(module, hidden, index, weights)
    assert float((got - want).norm() / want.norm()) < 0.02  # INT8 noise of two random GEMMs, not an error of layout


@pytest.mark.parametrize("quantized", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["minimax_m2", "gpt_oss"])
def test_a_kept_projection_runs_in_floating_point(kind: str, quantized: str) -> None:
    module = make_experts(kind)
    hidden, index, weights = routed()
    with torch.no_grad():
        want = module(hidden, index, weights)
        install(module, quantized)
        got = experts.experts_forward(module, hidden, index, weights)
    assert 0 < float((got - want).norm() / want.norm()) < 0.02


def test_places_of_other_ranks_add_nothing() -> None:
    module = make_experts("minimax_m2")
    install(module, "gate_up_proj")
    install(module, "down_proj")
    hidden, index, weights = routed()
    elsewhere = index.clone()
    elsewhere[0] = 5
    with torch.no_grad():
        got = experts.experts_forward(module, hidden, elsewhere, weights)
        want = experts.experts_forward(module, hidden, index, weights)
    assert not got[0].any()
    assert torch.equal(got[1:], want[1:])


def test_a_layer_without_int8_experts_runs_as_transformers_does() -> None:
    module = make_experts("minimax_m2")
    hidden, index, weights = routed()
    with torch.no_grad():
        want = module(hidden, index, weights)
        got = experts.experts_forward(module, hidden, index, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_experts_module_that_cannot_be_exchanged_is_refused() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(1, 2, 2))

    projection = Int8Experts(
        torch.zeros((1, 2, 2), dtype=torch.int8),
        torch.ones(1, 2, 1),
        group_size=0,
        names=(("w",),),
        account=Account(),
        family="cpu",
    )
    with pytest.raises(UnsupportedDtype, match="Fixed"):
        experts.install(Fixed(), "down_proj", projection)
