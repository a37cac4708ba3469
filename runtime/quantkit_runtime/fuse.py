"""Fusions as switches: each replaces modules that it recognises and keeps its change only where it proves equal.

A pass looks for a shape of module (three projections of one input, a gated MLP, an RMSNorm before INT8 layers), never
for a model's name. Before it takes effect it runs the module as it was and as it would be on the same random input; a
difference beyond rounding leaves the module unfused, with the reason in the outcome. Whatever a pass does not recognise
stays as transformers wrote it.

- `qkv`, `gate_up`: projections of the same input become one product, whose parts are handed out.
- `act_quant`: silu(gate) * up is quantized in the kernel that computes it, in dense MLPs and in routed experts.
- `norm_quant`: an RMSNorm hands its quantized output to the INT8 layers that read it.
- `rope`: queries and keys are rotated in the kernel that writes the keys into the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UsageError
from quantkit_runtime.kernels import registry
from quantkit_runtime.layers import Int8Linear
from quantkit_runtime.proof import difference, random_rows
from quantkit_runtime.rope import fuse_rope


@dataclass(frozen=True)
class Outcome:
    """What a pass did: modules that it fused, and those that it left alone, with the reason."""

    name: str
    fused: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def line(self) -> str:
        text = f"{self.name}: {len(self.fused)} fused"
        return text + (f", {len(self.refused)} left as they were ({self.refused[0]})" if self.refused else "")


def apply(model: nn.Module, names: Iterable[str] | None = None, *, paged: bool = True) -> list[Outcome]:
    """Run passes in order on a loaded model.

    Args:
        names: of `PASSES`; None means all of them.
        paged: keys and values go into the paged cache; `rope` has nothing to do elsewhere.

    Raises:
        UsageError: an unknown name.
    """
    chosen = list(PASSES) if names is None else [name for name in names if name]
    if unknown := sorted(set(chosen) - set(PASSES)):
        raise UsageError(f"unknown fusion {', '.join(unknown)}", choices=list(PASSES))
    with torch.no_grad():
        done = [_outcome(name, PASSES[name](model)) for name in PASSES if name in chosen and (paged or name != "rope")]
    model.__dict__["fusions"] = done  # no part of the model: its state and its modules stay those of transformers
    return done


def outcomes(model: nn.Module) -> list[Outcome]:
    """What `apply` did to a model."""
    found: list[Outcome] = getattr(model, "fusions", [])
    return found


def parse(text: str) -> list[str] | None:
    """Names of `--fuse`: "all", "none", or names with commas."""
    return None if text == "all" else [] if text == "none" else [name.strip() for name in text.split(",")]


def _outcome(name: str, results: Iterator[tuple[str, str]]) -> Outcome:
    rows = list(results)
    return Outcome(
        name,
        tuple(module for module, reason in rows if not reason),
        tuple(f"{module}: {reason}" for module, reason in rows if reason),
    )


# ------------------------------------------------------------------------------ projections of the same input


class _Joined:
    """One layer in the place of several that read the same input; it runs once for all of them."""

    def __init__(self, layer: Int8Linear, parts: int) -> None:
        self.layer, self.parts = layer, parts
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._input is not x or not self._left:
            self._input, self._output, self._left = x, self.layer(x), self.parts
        output = self._output
        assert output is not None
        self._left -= 1
        if not self._left:
            self._input = self._output = None  # nothing is kept alive between layers
        return output


class Part(nn.Module):
    """What one of the joined layers gave: a range of output channels."""

    def __init__(self, joined: _Joined, start: int, stop: int) -> None:
        super().__init__()
        self.layer = joined.layer  # registered, so that the weights move and count with the model
        self.joined, self.range = joined, slice(start, stop)
        self.in_features, self.out_features = joined.layer.in_features, stop - start

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(x)[..., self.range]

    def extra_repr(self) -> str:
        return f"output channels {self.range.start} to {self.range.stop}"


def _join(*names: str) -> Callable[[nn.Module], Iterator[tuple[str, str]]]:
    def run(model: nn.Module) -> Iterator[tuple[str, str]]:
        for path, module in list(model.named_modules()):
            layers = [getattr(module, name, None) for name in names]
            if not any(isinstance(layer, Int8Linear) for layer in layers):
                continue
            reason = _joinable(layers)
            if not reason:
                reason = _replace_joined(module, names, [layer for layer in layers if isinstance(layer, Int8Linear)])
            yield path, reason

    return run


def _joinable(layers: list[Any]) -> str:
    if not all(isinstance(layer, Int8Linear) for layer in layers):
        return "not all of its projections are in INT8"
    if len({(layer.in_features, layer.group_size, layer.team.size, layer.bias is None) for layer in layers}) > 1:
        return "its projections differ in inputs, groups or bias"
    return "" if layers[0].team.size == 1 else "ranks split its inputs"


def _replace_joined(module: nn.Module, names: tuple[str, ...], layers: list[Int8Linear]) -> str:
    first = layers[0]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    layer = Int8Linear(
        torch.cat([one.weight for one in layers]),
        torch.cat([one.weight_scale for one in layers]),
        torch.cat(biases) if biases else None,
        names=tuple(name for one in layers for name in one.names),
        group_size=first.group_size,
        account=first.account,
        family=first.family,
    )
    joined, start, parts = _Joined(layer, len(layers)), 0, []
    for one in layers:
        parts.append(Part(joined, start, start + one.out_features))
        start += one.out_features
    x = random_rows(first, first.in_features)
    with first.account.self_test():
        reason = difference([part(x) for part in parts], [one(x) for one in layers])
    if not reason:
        for name, part in zip(names, parts, strict=True):
            setattr(module, name, part)
    return reason


# ----------------------------------------------------------------------------------- activation and quantize


class _FusedMlp:
    """Forward of a gated MLP whose gate and up are joined."""

    def __init__(self, module: Any) -> None:
        self.joined, self.down = module.gate_proj.joined, module.down_proj

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self.joined.layer(x)
        rows = gate_up.reshape(-1, gate_up.shape[-1])
        quantized = registry.find("silu_mul_quantize", self.down.family).run(rows, self.down.group_size)
        out = self.down.multiply(*quantized, x.dtype)
        assert isinstance(out, Tensor)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def _act_quant(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in list(model.named_modules()):
        down = getattr(module, "down_proj", None)
        if isinstance(down, Int8Linear) and hasattr(module, "gate_proj"):
            yield path, _fuse_mlp(module, down)
        elif hasattr(module, "_apply_gate") and hasattr(down, "account"):
            yield path, _fuse_experts(module, down)


def _fuse_mlp(module: Any, down: Int8Linear) -> str:
    gate, up = module.gate_proj, getattr(module, "up_proj", None)
    if not (isinstance(gate, Part) and isinstance(up, Part) and gate.joined is up.joined):
        return "its gate and up are not joined"
    if down.team.size > 1:
        return "ranks split its inputs, and one scale for all of them comes first"
    fused = _FusedMlp(module)
    x = random_rows(down, gate.in_features)
    with down.account.self_test():
        reason = difference([fused(x)], [module(x)])
    if not reason:
        module.forward = fused
    return reason


def _fuse_experts(module: Any, down: Any) -> str:
    """Routed experts take the fused kernel where their own gate is silu(gate) * up, gate first."""
    x = random_rows(down, 2 * down.in_features)
    group = down.group_size
    got = registry.find("silu_mul_quantize", down.family).run(x, group)
    want = registry.find("quantize", down.family).run(module._apply_gate(x), group)
    reason = difference([_dequantized(*got)], [_dequantized(*want)])
    module.fused_silu = not reason
    return reason


def _dequantized(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale.repeat_interleave(q.shape[1] // scale.shape[1], dim=1)


# ----------------------------------------------------------------------------------------- norm and quantize


class _FusedNorm:
    """Forward of an RMSNorm that leaves the quantized values beside its output."""

    def __init__(self, module: Any, unit_offset: bool, group_size: int, family: str) -> None:
        self.weight, self.unit_offset = module.weight, unit_offset
        self.eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        self.group_size, self.family = group_size, family

    def __call__(self, x: Tensor) -> Tensor:
        run = registry.find("norm_quantize", self.family).run
        rows = x.reshape(-1, x.shape[-1])
        done = run(rows, self.weight, self.eps, unit_offset=self.unit_offset, group_size=self.group_size)
        normed = done.normed.view(x.shape)
        normed.int8 = done.q, done.scale, self.group_size
        assert isinstance(normed, Tensor)
        return normed


_READERS = {
    "input_layernorm": "self_attn.q_proj",
    "post_attention_layernorm": "mlp.gate_proj",
    "pre_feedforward_layernorm": "mlp.gate_proj",
}
"""Norms of a decoder layer as transformers names them -> a layer that reads their output as it is."""


def _norm_quant(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, layer in list(model.named_modules()):
        for name, reads in _READERS.items():
            norm, reader = getattr(layer, name, None), _int8_at(layer, reads)
            if norm is not None and reader is not None:
                yield f"{path}.{name}", _fuse_norm(norm, reader)


def _int8_at(layer: nn.Module, path: str) -> Int8Linear | None:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    found = found.layer if isinstance(found, Part) else found
    return found if isinstance(found, Int8Linear) else None


def _fuse_norm(norm: Any, reader: Int8Linear) -> str:
    if getattr(norm, "weight", None) is None or norm.weight.shape != (reader.in_features,):
        return f"{type(norm).__name__} has no weight for each input"
    x = random_rows(reader, reader.in_features, norm.weight.dtype)
    want, reason = norm(x), ""
    for unit_offset in (False, True):
        fused = _FusedNorm(norm, unit_offset, reader.group_size, reader.family)
        got: Any = fused(x)
        q, scale, _ = got.int8
        reason = difference([got, _dequantized(q, scale)], [want, _dequantized(*reader.quantize(want))])
        if not reason:
            norm.forward = fused
            break
    return reason and f"{type(norm).__name__} is another norm: {reason}"


PASSES: dict[str, Callable[[nn.Module], Iterator[tuple[str, str]]]] = {
    "qkv": _join("q_proj", "k_proj", "v_proj"),
    "gate_up": _join("gate_proj", "up_proj"),
    "act_quant": _act_quant,
    "norm_quant": _norm_quant,
    "rope": fuse_rope,
}
"""Passes in the order in which they run."""
