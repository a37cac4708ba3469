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

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UsageError, first_line
from quantkit_runtime import attention
from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.reference import Rope, rotated
from quantkit_runtime.layers import Int8Linear

TOKENS = 3
"""Rows of the random input."""

_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative error (of norms) up to which results count as equal: a last bit may move an int8 value by one."""


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
    x = _random(first, first.in_features)
    with first.account.self_test():
        reason = _difference([part(x) for part in parts], [one(x) for one in layers])
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
    x = _random(down, gate.in_features)
    with down.account.self_test():
        reason = _difference([fused(x)], [module(x)])
    if not reason:
        module.forward = fused
    return reason


def _fuse_experts(module: Any, down: Any) -> str:
    """Routed experts take the fused kernel where their own gate is silu(gate) * up, gate first."""
    x = _random(down, 2 * down.in_features)
    group = down.group_size
    got = registry.find("silu_mul_quantize", down.family).run(x, group)
    want = registry.find("quantize", down.family).run(module._apply_gate(x), group)
    reason = _difference([_dequantized(*got)], [_dequantized(*want)])
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
    x = _random(reader, reader.in_features, norm.weight.dtype)
    want, reason = norm(x), ""
    for unit_offset in (False, True):
        fused = _FusedNorm(norm, unit_offset, reader.group_size, reader.family)
        got: Any = fused(x)
        q, scale, _ = got.int8
        reason = _difference([got, _dequantized(q, scale)], [want, _dequantized(*reader.quantize(want))])
        if not reason:
            norm.forward = fused
            break
    return reason and f"{type(norm).__name__} is another norm: {reason}"


# --------------------------------------------------------------------------------------------------- compare


def _random(layer: Any, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn((TOKENS, width), generator=torch.Generator().manual_seed(width))
    return x.to(layer.weight.device, dtype)


def _difference(got: list[Tensor], want: list[Tensor]) -> str:
    """Empty if equal but for rounding."""
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape:
            return f"shape {list(one.shape)}, not {list(other.shape)}"
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        if not error <= _ALLOWED[other.dtype]:
            return f"differs by {error:.2g} from the module as it was"
    return ""


# ---------------------------------------------------------------------------------- rotation and the cache

_ROPE = "apply_rotary_pos_emb"
"""What the attention of transformers' models rotates queries and keys with: a function of its own module's globals."""


_FORMS = ((False, 2), (True, 2), (False, 1), (True, 1))
"""(whether neighbours are a pair, how many values of cos stand for a pair), as families have them."""


class _LaterRope:
    """Forward of one attention module, a copy of its class's: over the paged cache it leaves the rotation to the write.

    Other models of the class stay as they are; a copy of the module gets its own.
    """

    def __init__(self, module: Any, form: tuple[bool, int] = _FORMS[0]) -> None:
        forward: Any = type(module).forward
        self.module, self.form, self.reason = module, form, "it rotates with another function"
        self.rotate: Callable[..., tuple[Tensor, Tensor]] = forward.__globals__[_ROPE]
        names = {**forward.__globals__, _ROPE: self.leave}
        self.forward = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        self.forward.__kwdefaults__ = forward.__kwdefaults__

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.forward(self.module, *given, **named)

    def __reduce__(self) -> tuple[type[_LaterRope], tuple[Any, tuple[bool, int]]]:
        return _LaterRope, (self.module, self.form)

    def leave(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        """What the forward calls in the place of the rotation."""
        kind = self.module.config._attn_implementation
        if kind == attention.ROPE_PROOF:
            self._choose_form(q, k, cos, sin, *rest, **options)
        if kind in (attention.NAME, attention.ROPE_PROOF):
            attention.leave_rope(q, k, self._rope(cos, sin))
            return q, k
        return self.rotate(q, k, cos, sin, *rest, **options)

    def _rope(self, cos_1TR: Tensor, sin_1TR: Tensor) -> Rope:
        adjacent, values = self.form
        pairs = slice(cos_1TR.shape[-1] // values)
        return Rope(cos_1TR[0, :, pairs], sin_1TR[0, :, pairs], adjacent)

    def _choose_form(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> None:
        """The form that gives what the module's own function gives, or `reason`.

        Of random queries and keys: those at hand may be 0, which every form leaves as it is.
        """
        self.reason = "its rotation takes another cos and sin"
        if cos.ndim != 3 or sin.shape != cos.shape or cos.shape[:2] != (q.shape[0], q.shape[2]) or cos.shape[-1] % 2:
            return
        random = torch.Generator().manual_seed(TOKENS)
        q, k = (torch.randn(x.shape, generator=random).to(x) for x in (q, k))
        want = self.rotate(q, k, cos, sin, *rest, **options)
        for self.form in _FORMS:
            rope = self._rope(cos, sin)
            if 2 * rope.cos.shape[1] <= q.shape[-1]:
                got = [rotated(x[0].transpose(0, 1), rope).transpose(0, 1).unsqueeze(0) for x in (q, k)]
                self.reason = _difference(got, list(want))
                if not self.reason:
                    return
                self.reason = f"its rotation is another: {self.reason}"


def _rope(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The model runs once on a few tokens, so that what is compared is what its layers really hand over."""
    if getattr(model, "config", None) is None:
        return
    rotating: dict[str, Any] = {path: module for path, module in model.named_modules() if _rotates(module)}
    for module in rotating.values():
        if not _is_wrapped(module):
            module.forward = _LaterRope(module)
    arrived: set[Any] = set()
    position = torch.arange(1, 1 + TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    accounts: set[Any] = {layer.account for layer in model.modules() if hasattr(layer, "account")}
    why = ""
    with ExitStack() as stack:
        for account in accounts:
            stack.enter_context(account.self_test())
        stack.enter_context(attention.implementation(model, attention.ROPE_PROOF))
        try:  # on token 0, which every vocabulary has
            model(input_ids=torch.zeros_like(position), position_ids=position, use_cache=False, arrived=arrived)
        except attention.FOREIGN as error:
            why = f"the model does not run with it: {first_line(error)}"
    for path, module in rotating.items():
        rope = module.__dict__.get("forward")
        if not isinstance(rope, _LaterRope):
            yield path, "another function stands in the place of its forward, or around it"
            continue
        changed = "" if module in arrived else "its queries or keys change behind the rotation"
        reason = why or rope.reason or changed
        if reason:
            del module.forward
        module.leaves_rope = not reason
        yield path, reason


def _rotates(module: Any) -> bool:
    """Whether the forward of its class calls the function."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return _ROPE in names and _ROPE in forward.__globals__ and hasattr(module, "layer_idx")


def _is_wrapped(module: Any) -> bool:
    """Whether that is not all that its forward does."""
    own = module.__dict__.get("forward")
    return hasattr(type(module).forward, "__wrapped__") or not (own is None or isinstance(own, _LaterRope))


PASSES: dict[str, Callable[[nn.Module], Iterator[tuple[str, str]]]] = {
    "qkv": _join("q_proj", "k_proj", "v_proj"),
    "gate_up": _join("gate_proj", "up_proj"),
    "act_quant": _act_quant,
    "norm_quant": _norm_quant,
    "rope": _rope,
}
"""Passes in the order in which they run."""
