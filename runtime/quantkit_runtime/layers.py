"""Linear layers whose weight is INT8 per output channel and whose input is quantized as it arrives.

Shape suffixes: T tokens, N output channels, K input channels, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.arithmetic import quantize_tokens
from quantkit_runtime.account import Account
from quantkit_runtime.errors import ShapeMismatch
from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.reference import check_accumulator


class Int8Linear(nn.Module):
    """W8A8 in place of `nn.Linear`: quantize the input, multiply in int32, scale in float32, cast to x's dtype.

    Args:
        weight: int8 `[N, K]`.
        weight_scale: float32 `[N, 1]`.
        bias: `[N]` or None.
        group_size: inputs that share an activation scale; 0 means one scale per token.
        names: the GEMM weights that it stands for, for the account.
        account: ledger that every call is reported to.
        family: device family that selects the kernel.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        group_size: int,
        names: tuple[str, ...],
        account: Account,
        family: str,
    ) -> None:
        super().__init__()
        check_weight(weight, weight_scale, group_size, names[0] if names else "a weight")
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape
        self.group_size, self.names, self._account = group_size, names, account
        self._kernel = registry.find("w8a8_gemm", family)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`."""
        x_TK = x.reshape(-1, self.in_features)
        q_TK, x_scale = quantize_tokens(x_TK, self.group_size or None)
        with self._account.int8_gemm(self._kernel.name, self.names):
            out = self._kernel.run(q_TK, x_scale, self.weight, self.weight_scale, self.bias, x.dtype)
        assert isinstance(out, Tensor)
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        scale = f"group {self.group_size}" if self.group_size else "token"
        return f"in_features={self.in_features}, out_features={self.out_features}, activations per {scale}"


class Int8Experts(nn.Module):
    """One projection of all experts of a layer: int8 `[E, N, K]`, scales `[E, N, 1]`, one GEMM per expert hit.

    Arguments as `Int8Linear`, with a leading E; `names` holds one tuple per expert.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        group_size: int,
        names: tuple[tuple[str, ...], ...],
        account: Account,
        family: str,
    ) -> None:
        super().__init__()
        check_weight(weight, weight_scale, group_size, names[0][0] if names else "a weight")
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.group_size, self.names, self._account = group_size, names, account
        self._kernel = registry.find("w8a8_gemm", family)

    def forward(self, x_TK: Tensor, expert: int, bias: Tensor | None = None) -> Tensor:
        """`[T, K]` through one expert -> `[T, N]`."""
        q_TK, x_scale = quantize_tokens(x_TK, self.group_size or None)
        weight, scale = self.weight[expert], self.weight_scale[expert]
        with self._account.int8_gemm(self._kernel.name, self.names[expert]):
            out = self._kernel.run(q_TK, x_scale, weight, scale, bias, x_TK.dtype)
        assert isinstance(out, Tensor)
        return out


def check_weight(weight: Tensor, weight_scale: Tensor, group_size: int, name: str) -> None:
    """Refuse weights that the kernels would compute wrong numbers from.

    Raises:
        ShapeMismatch: scales are not one per output channel, groups do not divide K, or K is too long for int32.
    """
    wanted = (*weight.shape[:-1], 1)
    if tuple(weight_scale.shape) != wanted:
        raise ShapeMismatch(
            f"{name}: weight_scale has shape {list(weight_scale.shape)}, the weight wants {list(wanted)}",
            "convert again with one scale per output channel",
        )
    if weight.dtype != torch.int8 or weight_scale.dtype != torch.float32:
        raise ShapeMismatch(f"{name}: expected int8 and float32, got {weight.dtype} and {weight_scale.dtype}")
    if group_size and weight.shape[-1] % group_size:
        raise ShapeMismatch(
            f"{name}: groups of {group_size} do not divide {weight.shape[-1]} inputs",
            "convert again with a group size that divides",
        )
    check_accumulator(weight.shape[-1], name)
