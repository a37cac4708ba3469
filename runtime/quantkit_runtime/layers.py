"""Linear layers whose weight is INT8 per output channel and whose input is quantized as it arrives.

Where a team of ranks splits the input channels (row-parallel layers), each rank sees a part of a token. In float32, the
dtype of proofs, its scale is the largest one over the team and the int32 sums themselves are added: only with one
common scale are the partial sums those of a single process, and then the result is so bit for bit. In shorter dtypes a
rank scales its own part, which is finer and one collective less, and the ranks add what they have scaled.

Shape suffixes: T tokens, S places (a token's expert), N output channels, K input channels, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arithmetic import quantize, scale_from_absmax
from quantkit_runtime.account import Account
from quantkit_runtime.errors import ShapeMismatch
from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.reference import check_accumulator
from quantkit_runtime.parallel import ALONE, Team


class _Int8(nn.Module):
    """A weight, its scales and how inputs are quantized for it.

    Args:
        weight: int8 `[N, K]`, or `[E, N, K]`.
        weight_scale: float32 `[N, 1]`, or `[E, N, 1]`.
        group_size: inputs that share an activation scale; 0 means one scale per token.
        account: ledger that every call is reported to.
        family: device family that selects the kernel.
        team: ranks that split K; their outputs are added.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        name: str,
        *,
        group_size: int,
        account: Account,
        family: str,
        team: Team = ALONE,
    ) -> None:
        super().__init__()
        check_weight(weight, weight_scale, group_size, name)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.out_features, self.in_features = weight.shape[-2:]
        self.group_size, self.team, self.family, self.account = group_size, team, family, account

    def quantize(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """int8 `[T, K]` and float32 scales `[T, 1]` or `[T, K / group]`; groups lie within a rank."""
        if not self.adds_sums(x_TK.dtype):
            q, scale = registry.find("quantize", self.family).run(x_TK, self.group_size)
            return q, scale
        scale = self.team.max(scale_from_absmax(x_TK.abs().amax(dim=-1, keepdim=True)))
        return quantize(x_TK, scale), scale

    def adds_sums(self, dtype: torch.dtype) -> bool:
        """Whether the team shares one scale and adds int32 sums before they are scaled."""
        return self.team.size > 1 and dtype == torch.float32 and not self.group_size

    def extra_repr(self) -> str:
        scale = f"group {self.group_size}" if self.group_size else "token"
        split = f", inputs split over {self.team.size} ranks" if self.team.size > 1 else ""
        return f"weight={list(self.weight.shape)}, activations per {scale}{split}"

    def _run(self, names: tuple[str, ...], q_TK: Tensor, *arguments: Any) -> Tensor:
        """One call of the kernel for this number of tokens, see `kernels.registry`."""
        (tokens, k), group = q_TK.shape, self.group_size
        kernel = registry.find("w8a8_gemm", self.family, rows=tokens, k=k, group=group)
        with self.account.int8_gemm(kernel.name, names):
            out = kernel.run(q_TK, *arguments)
        assert isinstance(out, Tensor)
        return out


class Int8Linear(_Int8):
    """W8A8 in place of `nn.Linear`: quantize the input, multiply in int32, scale in float32, cast to x's dtype.

    Arguments as `_Int8`; `bias` is `[N]` or None, `names` the GEMM weights that it stands for, for the account.
    """

    bias: Tensor | None

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, *, names: tuple[str, ...], **options: Any
    ) -> None:
        super().__init__(weight, weight_scale, names[0] if names else "a weight", **options)
        self.register_buffer("bias", bias)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]`; an input that a fused norm has quantized already is taken so (see `fuse`)."""
        q_TK, scale, group = getattr(x, "int8", (None, None, None))
        if q_TK is None and self._fits_one_kernel(x):
            return self._run_whole(x)
        if q_TK is None or scale is None or group != self.group_size or self.team.size > 1:
            q_TK, scale = self.quantize(x.reshape(-1, self.in_features))
        weight_scale, alone = self.weight_scale, self.team.size == 1
        adds_sums = self.adds_sums(x.dtype)
        bias = self.bias if alone else None

        def product(rows: slice) -> Tensor:
            scales = scale[rows], self.weight, weight_scale
            return self._run(self.names, q_TK[rows], *(_unscaled(*scales) if adds_sums else scales), bias, x.dtype)

        out = self.team.sum_of(product, len(q_TK))
        if adds_sums:
            out = out * scale * weight_scale.T
        if not alone and self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)

    def _fits_one_kernel(self, x: Tensor) -> bool:
        """Whether a kernel quantizes and multiplies at once: one token, one scale, no team to agree on it."""
        if self.group_size or self.team.size > 1 or x.numel() != self.in_features:
            return False
        return registry.has("quantize_gemm", self.family, rows=1, k=self.in_features)

    def _run_whole(self, x: Tensor) -> Tensor:
        kernel = registry.find("quantize_gemm", self.family, rows=1, k=self.in_features)
        with self.account.int8_gemm(kernel.name, self.names):
            out = kernel.run(x.reshape(1, -1), self.weight, self.weight_scale, self.bias, x.dtype)
        assert isinstance(out, Tensor)
        return out.reshape(*x.shape[:-1], self.out_features)

    def multiply(self, q_TK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Quantized `[T, K]` with its scales -> `[T, N]`, for a layer that no ranks split."""
        return self._run(self.names, q_TK, scale, self.weight, self.weight_scale, self.bias, dtype)


class Int8Experts(_Int8):
    """One projection of the experts of a layer that this rank holds: int8 `[E, N, K]`, scales `[E, N, 1]`.

    Arguments as `_Int8`; `names` holds one tuple per expert.
    """

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, *, names: tuple[tuple[str, ...], ...], **options: Any
    ) -> None:
        super().__init__(weight, weight_scale, names[0][0] if names else "a weight", **options)
        self.names = names

    def forward(
        self, x_TK: Tensor, expert_S: Tensor, token_S: Tensor | None = None, bias_EN: Tensor | None = None
    ) -> Tensor:
        """Each place's token through its expert, one GEMM for each expert that is met.

        Args:
            x_TK: tokens.
            expert_S: expert of each place, by its place in the stack; -1 where another rank computes it.
            token_S: row of `x_TK` of each place; None: place s is row s.
            bias_EN: a team's first rank has the bias, the others zeros.

        Returns:
            `[S, N]`, zeros where the expert is none of this rank's; what a team's ranks return adds up to the result.
        """
        q, scale = self.quantize(x_TK)
        if token_S is not None:
            q, scale = q[token_S], scale[token_S]
        out_SN, adds_sums = x_TK.new_zeros((len(expert_S), self.out_features)), self.adds_sums(x_TK.dtype)
        places = places_of(expert_S, len(self.names))
        for expert, rows in places:
            bias = None if bias_EN is None else bias_EN[expert]
            out_SN[rows] = self.gemm(expert, q[rows], scale[rows], bias, x_TK.dtype, scaled=not adds_sums)
        if not adds_sums:
            return out_SN
        sums_SN, out_SN = self.team.sum(out_SN), torch.zeros_like(out_SN)
        for expert, rows in places if self.team.index == 0 else ():
            scaled = sums_SN[rows] * scale[rows] * self.weight_scale[expert].T
            out_SN[rows] = scaled if bias_EN is None else scaled + bias_EN[expert]
        return out_SN

    def gemm(
        self, expert: int, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, *, scaled: bool = True
    ) -> Tensor:
        """Quantized rows through this rank's part of one expert; as int32 sums (in `dtype`) if not `scaled`."""
        scales_and_weight = (scale, self.weight[expert], self.weight_scale[expert])
        if not scaled:
            scales_and_weight, bias = _unscaled(*scales_and_weight), None
        return self._run(self.names[expert], q, *scales_and_weight, bias, dtype)


def _unscaled(scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones_like(scale), weight, torch.ones_like(weight_scale)


def places_of(expert_S: Tensor, experts: int) -> list[tuple[int, Tensor]]:
    """(expert, its places) of every expert that is met; other numbers are places of other ranks."""
    met = torch.unique(expert_S).tolist()
    return [(expert, (expert_S == expert).nonzero().squeeze(1)) for expert in met if 0 <= expert < experts]


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
