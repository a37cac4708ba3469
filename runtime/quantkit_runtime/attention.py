"""Attention over the paged cache, registered in transformers' `AttentionInterface`.

The model runs on one row of packed tokens `[1, T]`; a `Step` says which of them belong to which sequence. Attention
always reads what the cache holds, the tokens of the same step included, so that neither the size of a chunk nor the
company in a batch changes what a token sees.

What the interface cannot express (linear attention, indexers, masks that are neither causal nor a window, rotary
frequencies that depend on the longest sequence) is found by one probing forward, and not by a list of names.

Shape suffixes: T tokens or queries, L positions, H heads, G key/value heads, R = H / G, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantkit.errors import first_line
from quantkit_runtime.kernels.reference import Rope, Tiles
from quantkit_runtime.kv_cache import KvCache, Layer, LayerSpec

NAME = "quantkit_paged"
PROBE = "quantkit_probe"
ROPE_PROOF = "quantkit_rope_proof"
FOREIGN = (RuntimeError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError, AssertionError)
"""How a model's code fails that was not written for this interface."""

_SCORES = 2**24
"""Scores that are held at once where torch has no fused attention (softcaps, sinks): 64 MiB in float32."""


@dataclass(frozen=True)
class Step:
    """What attention must know about the packed tokens of one forward.

    Attributes:
        cache: the pool.
        write: puts keys and values `[T, G, D]` of the tokens into a layer and gives back their queries `[T, H, D]`;
            with a `Rope` it rotates queries and keys first.
        table: int32 `[B, groups, blocks]`, padded with 0; a layer reads that of its group.
        kernel: `paged_decode` or `paged_prefill` (see `kernels.reference`), None for attention in torch.
        where: what the kernel takes behind the table: lengths of the sequences, or tiles of their queries.
        chunks: (queries, length) of each sequence, for attention in torch.
    """

    cache: KvCache
    write: Callable[[Layer, Tensor, Tensor, Tensor, Rope | None], Tensor]
    table: Tensor
    kernel: Callable[..., Tensor] | None = None
    where: Tensor | Tiles | None = None
    chunks: Sequence[tuple[int, int]] = ()


def register() -> None:
    """Make these attention functions known to transformers; masks are made for the probe alone."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionInterface.register(ROPE_PROOF, _rope_proof)
    AttentionMaskInterface.register(PROBE, _Mask)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run the model's attention through another function for a while."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by every layer: query `[1, H, T, D]`, key and value `[1, G, T, D]` of new tokens -> `[1, T, H, D]`."""
    layer = step.cache.layers[module.layer_idx]
    window, block, tables = layer.spec.window, step.cache.format.block, step.table[:, layer.group]
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    q_THD = step.write(layer, q_THD, k_TGD, v_TGD, left_rope(module, query, key))
    if step.kernel is not None:
        stores = layer.keys.data, layer.keys.scale, layer.values.data, layer.values.scale
        seen = step.kernel(q_THD, *stores, tables, step.where, scaling, s_aux, window, softcap or 0.0)
        return seen.unsqueeze(0), None
    out, first = [], 0
    for row, (queries, length) in enumerate(step.chunks):
        unseen = max(0, length - queries - window + 1) // block if window else 0  # blocks before every query's window
        table = tables[row, unseen : step.cache.format.blocks(length)]
        k, v = (store.read(table, query.dtype)[:, : length - unseen * block] for store in (layer.keys, layer.values))
        q = q_THD[first : first + queries].transpose(0, 1)
        out.append(attend(q, k, v, scaling, window, softcap, s_aux))
        first += queries
    return torch.cat(out, 1).transpose(0, 1).unsqueeze(0), None


def leave_rope(query: Tensor, key: Tensor, rope: Rope) -> None:
    """Leave the rotation of queries and keys to the write into the cache; attention must get these very tensors."""
    query.rope = key.rope = rope  # type: ignore[attr-defined]  # a tensor takes attributes, its type has none


def left_rope(module: Any, query: Tensor, key: Tensor) -> Rope | None:
    """What was left for these tensors; None where they come rotated.

    Raises:
        RuntimeError: the layer `leaves_rope`, and the model has put other tensors in their place.
    """
    rope: Rope | None = getattr(query, "rope", None)
    if getattr(key, "rope", None) is not rope or (rope is None and getattr(module, "leaves_rope", False)):
        raise RuntimeError("queries and keys changed between their rotation and attention")
    return rope


def attend(
    q_HTD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last T of L positions -> `[H, T, D]`.

    Args:
        window: a query sees this many positions, itself included; 0 for all before it.
        softcap: scores become `softcap x tanh(score / softcap)`.
        sinks_H: a further score of each head that takes weight and has no value.
    """
    (heads, t, _), (groups, length, _) = q_HTD.shape, k_GLD.shape
    plain = softcap is None and sinks_H is None
    if plain and t == length and (not window or length <= window):
        q, k, v = (x.unsqueeze(0) for x in (q_HTD, k_GLD, v_GLD))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups != heads)[0]
    # the R heads of a group become more queries of that group, so that keys need no repetition
    q = q_HTD.reshape(groups, -1, q_HTD.shape[-1])
    seen = torch.ones((t, length), dtype=torch.bool, device=q.device).tril(length - t)
    if window:
        seen = seen.triu(length - t - window + 1)
    seen = seen.repeat(heads // groups, 1)
    if plain:
        q, k, v = (x.unsqueeze(0) for x in (q, k_GLD, v_GLD))
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).view(heads, t, -1)
    sinks = q.new_full((heads,), -torch.inf) if sinks_H is None else sinks_H
    sinks_GQ1 = sinks.float().view(groups, -1, 1).repeat_interleave(t, 1)
    rows = max(1, _SCORES // (groups * length))
    out = v_GLD.new_empty((*q.shape[:2], v_GLD.shape[-1]))
    for first in range(0, q.shape[1], rows):
        part = slice(first, first + rows)
        scores = (q[:, part] @ k_GLD.transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.cat((scores.masked_fill_(~seen[part], -torch.inf), sinks_GQ1[:, part]), -1)
        out[:, part] = scores.softmax(-1)[..., :-1].to(v_GLD.dtype) @ v_GLD
    return out.view(heads, t, -1)


def _rope_proof(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, arrived: set[Any], **_: Any
) -> tuple[Tensor, None]:
    """Adds to `arrived` a module whose queries and keys come as they were when their rotation was left."""
    rope = getattr(query, "rope", None)
    if rope is not None and getattr(key, "rope", None) is rope:
        arrived.add(module)
    return _nothing(query, value), None


def _nothing(query: Tensor, value: Tensor) -> Tensor:
    """`[1, T, H, D]` as attention gives it, all 0."""
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


# --------------------------------------------------------------------------------------------- probe


class _Mask:
    """What stands for a mask in the probe: the arguments that transformers' mask functions are called with."""

    def __init__(self, *, mask_function: Any, local_size: int | None = None, **_: Any) -> None:
        self.mask_function, self.window = mask_function, local_size or 0

    @property
    def is_plain(self) -> bool:
        """Whether it is causal, with a window or without, also around the window's edge."""
        at = torch.arange(2 * min(self.window, 512) + 3)
        q, k = at[:, None], at[None]
        q = q + max(0, self.window - 512) * (q > k)  # of a wide window the edge is looked at, not its inside
        got = self.mask_function(torch.zeros_like(at), torch.zeros_like(at), q, k)
        want = (k <= q) & (k > q - (self.window or 1 << 60))
        return torch.equal(got.expand_as(want), want)


_EXPRESSED = frozenset(("scaling", "softcap", "s_aux", "sliding_window", "dropout", "position_ids", "use_cache"))


def _probe_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, probe: list[LayerSpec | str], **options: Any
) -> tuple[Tensor, None]:
    """Adds to `probe` what the layer hands over, or why it cannot be served."""
    given = {name for name, option in options.items() if option is not None and option is not False}
    if given - _EXPRESSED:
        probe.append(f"its attention is called with {', '.join(sorted(given - _EXPRESSED))}")
    elif not isinstance(mask, _Mask) or not mask.is_plain:
        probe.append("its mask is neither causal nor a window")
    else:
        dims = key.shape[3], value.shape[3]
        probe.append(LayerSpec(module.layer_idx, key.shape[1], *dims, mask.window, query.shape[1]))
    return _nothing(query, value), None


def probe_layers(model: Any) -> tuple[LayerSpec, ...] | str:
    """What each layer's attention hands over, or why this cache cannot serve the model.

    Args:
        model: transformers' causal language model, on `meta` or loaded; it runs once on one token.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    others = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if others:
        return f"layers keep another state ({', '.join(sorted(others))})"
    ropes = " ".join(str(getattr(module, "rope_type", "")) for module in model.modules())  # one, or one per layer type
    for name in ("dynamic", "longrope"):
        if name in ropes:
            return f"{name} rotary frequencies depend on the longest sequence"
    ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    probe: list[LayerSpec | str] = []
    try:
        with torch.no_grad(), implementation(model, PROBE):
            model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True, probe=probe)
    # an answer and not an error: the model runs with transformers' cache, and what went wrong is shown
    except FOREIGN as error:
        return f"transformers' model does not run through its attention interface ({first_line(error)})"
    layers = [spec for spec in probe if isinstance(spec, LayerSpec)]
    here = {module.layer_idx for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)}
    if len(layers) == len(probe) and [spec.layer for spec in layers] != sorted(here):
        probe.append("not every layer calls the attention interface once")
    return next((problem for problem in probe if isinstance(problem, str)), tuple(layers))
