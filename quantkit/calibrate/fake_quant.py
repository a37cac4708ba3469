"""A materialized layer with the arithmetic of INT8: which GEMMs are quantized is chosen for each pass through it.

Weights are rounded once and kept as codes beside the float ones, activations are rounded on the fly, products are those
of the dequantized values. Linear modules get a `forward` of their own, experts with 3-D parameters are reached through
`quantkit.calibrate.experts`. Within a layer a scheme belongs to a role: experts of a layer always share it.

Peak memory: the codes of one layer beside the layer, and the values of some of their rows for each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.archs import Architecture, Kind
from quantkit.archs.modeling import parameter_key
from quantkit.arithmetic import channel_scales, dequantize, quantize, represented
from quantkit.calibrate.by_rows import blocks, linear_by_rows
from quantkit.calibrate.experts import LINEAR, is_fused_experts, projection_weight
from quantkit.spec.scheme import Scheme, group_size_for

Schemes = Mapping[str, Scheme]
"""Role -> scheme; a role that is left out stays float."""

BF16: Schemes = {"": Scheme("bf16", 0, 0, False, "BF16 arithmetic")}
"""Instead of schemes: what enters and leaves every GEMM and norm is rounded to BF16. Engines that run the source round
that and more, so it is a yardstick: what differs no more than this from the float32 model is as good as the source."""

_BLOCK_ELEMENTS = 1 << 22
"""Of a weight that is rounded or multiplied at once: 16 MiB of float32."""

_ACCELERATOR_BLOCK_ELEMENTS = 1 << 28


class Codes(NamedTuple):
    """A weight as INT8: int8 `[N, K]`, float32 scales `[N, 1]`."""

    q: Tensor
    scale: Tensor


Rounded = Callable[[str, Tensor], Codes | Tensor]
"""(parameter name below the layer, of stacked experts `NAME.EXPERT`; value `[N, K]`) -> what is multiplied for it:
codes, or a tensor as it is."""

Corrected = Callable[[str, Tensor, Scheme], Tensor]
"""(name of the weight as for `Rounded`, bias `[N]` as the module holds it, scheme of the GEMM) -> what is added."""

RoundedTokens = Callable[[Tensor, Scheme], Tensor]
"""(activations `[..., K]`, scheme of the GEMM that they enter) -> the same as that scheme represents them."""


def round_to_nearest(_name: str, w_NK: Tensor) -> Codes:
    """Weights as INT8 per output channel."""
    scale_N1 = channel_scales(w_NK)
    q = torch.empty(w_NK.shape, dtype=torch.int8, device=w_NK.device)
    for rows in blocks(len(w_NK), _step(w_NK)):
        q[rows] = quantize(w_NK[rows], scale_N1[rows])
    return Codes(q, scale_N1)


def _linear(x: Tensor, weight: Codes | Tensor, bias_N: Tensor | None) -> Tensor:
    """`x` `[..., K]` times a weight -> `[..., N]`."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias_N)
    q_NK, scale_N1 = weight

    def values(rows: slice) -> Tensor:
        return dequantize(q_NK[rows], scale_N1[rows]).to(x.dtype)

    return linear_by_rows(x, len(q_NK), _step(q_NK), values, bias_N)


def _step(w_NK: Tensor) -> int:
    """Rows of a weight that are taken at once."""
    elements = _BLOCK_ELEMENTS if w_NK.device.type == "cpu" else _ACCELERATOR_BLOCK_ELEMENTS
    return max(1, elements // max(1, w_NK.shape[1]))


def uncorrected(_name: str, bias: Tensor, _scheme: Scheme) -> Tensor:
    """Biases as they are."""
    return bias


class Rounding(NamedTuple):
    """How the GEMMs of a layer are rounded, and what makes up for it."""

    weights: Rounded = round_to_nearest
    biases: Corrected = uncorrected


def round_tokens(x: Tensor, scheme: Scheme) -> Tensor:
    """Activations `[..., K]` as `scheme` represents them, in their own dtype."""
    if not scheme.group_size:
        return represented(x, channel_scales(x)).to(x.dtype)
    grouped = x.unflatten(-1, (-1, group_size_for(x.shape[-1], scheme.group_size)))
    return represented(grouped, channel_scales(grouped)).flatten(-2).to(x.dtype)


def narrow(x: Tensor) -> Tensor:
    """Values rounded to BF16, in their own dtype."""
    return x.bfloat16().to(x.dtype)


class _Current(threading.local):
    """What this thread's passes run with."""

    def __init__(self) -> None:
        self.schemes: Schemes = {}


class FakeQuantizer:
    """Runs the layers of one model with chosen schemes.

    Args:
        arch: record of the model.
        prefix: of a layer's parameter names, `model.layers.3`.
        rounding: how weights are rounded.
        rounded_tokens: how activations are.
    """

    def __init__(
        self,
        arch: Architecture,
        prefix: str,
        rounding: Rounding = Rounding(),  # noqa: B008  # immutable
        rounded_tokens: RoundedTokens = round_tokens,
    ) -> None:
        self._arch, self._prefix, self._rounding, self._rounded_tokens = arch, prefix, rounding, rounded_tokens
        self._current = _Current()
        self._weights: dict[str, Codes | Tensor] = {}
        self._biases: dict[tuple[str, str], Tensor] = {}

    @contextmanager
    def attached(self, layer: nn.Module, roles: Collection[str]) -> Iterator[FakeQuantizer]:
        """Prepare the GEMMs of `roles` in a materialized layer inside the block; without `running` all is float."""
        changed: list[tuple[nn.Module, str]] = []
        try:
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    changed += self._attach_linear(name, module, roles)
                elif is_fused_experts(module):
                    changed += self._attach_experts(name, module, roles)
                elif self._is_norm(name, module):
                    changed += self._attach_norm(module)
            yield self
        finally:
            for module, attribute in changed:
                delattr(module, attribute)
            self._weights.clear()
            self._biases.clear()

    @contextmanager
    def running(self, schemes: Schemes) -> Iterator[None]:
        """Passes of this thread inside the block are quantized so."""
        self._current.schemes = schemes
        try:
            yield
        finally:
            self._current.schemes = {}

    def _scheme(self, role: str) -> Scheme | None:
        """Scheme of a role now, None when it is float; a fused weight has that of its parts."""
        schemes = self._current.schemes
        found = schemes.get(role) or next(
            (schemes[part] for part in self._arch.role(role).parts if part in schemes), None
        )
        return found if found is not None and found.is_int8 else None

    def _role(self, parameter: str, roles: Collection[str]) -> str:
        """Role of a GEMM that is wanted, "" for others."""
        key = parameter_key(self._arch, f"{self._prefix}.{parameter}")
        role = self._arch.role(key.role)
        wanted = role.kind is Kind.LINEAR and any(name in roles for name in (role.name, *role.parts))
        return role.name if wanted else ""

    @property
    def _is_narrow(self) -> bool:
        return self._current.schemes is BF16

    # ------------------------------------------------------------------------------ norms and linear modules

    def _is_norm(self, name: str, module: nn.Module) -> bool:
        key = self._arch.parse(f"{self._prefix}.{name}.weight") if "weight" in module._parameters else None
        return key is not None and self._arch.role(key.role).kind is Kind.NORM

    def _attach_norm(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            return narrow(output) if self._is_narrow else output

        setattr(module, "forward", forward)  # noqa: B010
        return [(module, "forward")]

    def _attach_linear(self, name: str, module: nn.Linear, roles: Collection[str]) -> list[tuple[nn.Module, str]]:
        parameter = f"{name}.weight"
        role = self._role(parameter, roles)
        if role:
            self._weights[parameter] = self._rounding.weights(parameter, module.weight)
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            if self._is_narrow:
                return narrow(plain(narrow(x)))
            scheme = self._scheme(role) if role else None
            if scheme is None:
                return plain(x)
            bias = self._bias(parameter, module.bias, scheme)
            return _linear(self._rounded_tokens(x, scheme), self._weights[parameter], bias)

        setattr(module, "forward", forward)  # noqa: B010  # an instance attribute shadows the method, on purpose
        return [(module, "forward")]

    def _bias(self, parameter: str, bias: Tensor | None, scheme: Scheme) -> Tensor | None:
        """The bias of a GEMM under a scheme; threads that meet here find the same."""
        if bias is None:
            return None
        found = self._biases.get((parameter, scheme.name))
        if found is None:
            found = self._biases[parameter, scheme.name] = self._rounding.biases(parameter, bias, scheme)
        return found

    # ---------------------------------------------------------------------------------------------- experts

    def _attach_experts(self, name: str, module: Any, roles: Collection[str]) -> list[tuple[nn.Module, str]]:
        found: dict[str, tuple[str, str]] = {}
        for projection in ("in", "down"):
            parameter = projection_weight(module, projection)
            role = self._role(f"{name}.{parameter}", roles)
            if role:
                found[projection] = role, f"{name}.{parameter}"
                self._round_experts(f"{name}.{parameter}", module, parameter)

        def linear(projection: str, expert: int, x_SK: Tensor, w_NK: Tensor, bias: Tensor | None) -> Tensor:
            if self._is_narrow:
                return narrow(F.linear(narrow(x_SK), w_NK, bias))
            role, parameter = found.get(projection, ("", ""))
            scheme = self._scheme(role) if role else None
            if scheme is None:
                return F.linear(x_SK, w_NK, bias)
            name = f"{parameter}.{expert}"
            return _linear(self._rounded_tokens(x_SK, scheme), self._weights[name], self._bias(name, bias, scheme))

        setattr(module, LINEAR, linear)
        return [(module, LINEAR)]

    def _round_experts(self, name: str, module: Any, parameter: str) -> None:
        weight: Tensor = getattr(module, parameter)
        for expert, w_NK in enumerate(weight.transpose(1, 2) if module.is_transposed else weight):
            self._weights[f"{name}.{expert}"] = self._rounding.weights(f"{name}.{expert}", w_NK)
