"""The fusion `rope`: over the paged cache, attention leaves the rotation of queries and keys to the write.

Where a module's own forward calls transformers' function of that name, a copy of it calls `_LaterRope.leave`, which is
proved on what the layers of the model hand over. How queries and keys get from there to the write: `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import first_line
from quantkit_runtime import attention
from quantkit_runtime.kernels.reference import Rope, rotated
from quantkit_runtime.proof import TOKENS, difference

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
                self.reason = difference(got, list(want))
                if not self.reason:
                    return
                self.reason = f"its rotation is another: {self.reason}"


def fuse_rope(model: nn.Module) -> Iterator[tuple[str, str]]:
    """A pass of `fuse`: path of a module and why it is left alone, empty where it is not.

    The model runs once on a few tokens, so that what is compared is what its layers really hand over.
    """
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
