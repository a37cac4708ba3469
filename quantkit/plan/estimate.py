"""Memory of every card of a mesh: weights, cache, activations, communication buffers, reserve.

Weights and cache are exact. Activations and buffers are estimates of what an engine holds at once while it works on a
prefill chunk; the reserve is for what no formula knows: the driver's context, compiled kernels, the communication
library's own buffers, fragmentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.archs import Dims
from quantkit.archs.structure import Layer
from quantkit.plan.cache import CacheFormat, LayerCache, layer_caches, sequence_bytes
from quantkit.plan.weights import ModelWeights
from quantkit.spec.mesh import Mesh

CHUNK = 512
"""Tokens of a prefill chunk."""

RESERVE = 0.12
"""Share of a card that is left free: 10 to 15 % is usual."""

VALUE = 2
"""Bytes of an activation (BF16)."""

_SEARCH_LIMIT = 1 << 40


@dataclass(frozen=True)
class Workload:
    """What has to fit.

    Attributes:
        context: tokens of every sequence.
        concurrency: sequences at the same time, over all replicas.
        cache: dtypes of keys and values.
    """

    context: int
    concurrency: int
    cache: CacheFormat = field(default_factory=CacheFormat)

    def sequences(self, dp: int) -> int:
        """Sequences of one replica, of the fullest one."""
        return -(-self.concurrency // dp)


@dataclass(frozen=True)
class CardMemory:
    """Bytes on one card.

    Attributes:
        weights: by memory column.
        cache: of all its sequences.
        activations, buffers, reserve: see the module.
        card: its memory.
    """

    weights: Mapping[str, int]
    cache: int
    activations: int
    buffers: int
    reserve: int
    card: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        return self.weight_bytes + self.cache + self.activations + self.buffers + self.reserve

    @property
    def free(self) -> int:
        """Bytes left; negative when it does not fit."""
        return self.card - self.total


@dataclass
class Model:
    """A model as planning sees it.

    Attributes:
        config: parsed config.json.
        layers: see `archs.structure`.
        weights: all tensors.
    """

    dims: Dims
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    weights: ModelWeights
    _caches: dict[tuple[CacheFormat, int], tuple[LayerCache, ...]] = field(default_factory=dict)

    def caches(self, form: CacheFormat, tp: int) -> tuple[LayerCache, ...]:
        """Cache of every layer on one rank of `tp`."""
        key = (form, tp)
        if key not in self._caches:
            self._caches[key] = layer_caches(self.dims, self.config, self.layers, form, tp)
        return self._caches[key]


def rank_weights(model: Model, mesh: Mesh) -> list[Counter[str]]:
    """Bytes of weights of every rank, by column, in the order of the ranks; the mesh must be legal."""
    stages = mesh.stage_layers(model.dims.layers)
    parts = [model.weights.stage(mesh, stage, layers) for stage, layers in enumerate(stages)]
    experts = _experts_held(model, mesh)
    found = []
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        dense, expert = parts[at.pp]
        total = Counter(dense)
        for column, nbytes in expert.items():
            total[column] += nbytes * experts[at.ep]
        found.append(total)
    return found


def _experts_held(model: Model, mesh: Mesh) -> list[int]:
    if not model.dims.experts:
        return [0] * mesh.ep
    return [len(held) for held in mesh.rank_experts(model.dims.experts)]


def stage_memory(model: Model, mesh: Mesh, work: Workload, card: int) -> list[CardMemory]:
    """The fullest card of every pipeline stage."""
    most = max(_experts_held(model, mesh))
    found = []
    for stage, layers in enumerate(mesh.stage_layers(model.dims.layers)):
        dense, expert = model.weights.stage(mesh, stage, layers)
        weights = Counter(dense)
        for column, nbytes in expert.items():
            weights[column] += nbytes * most
        caches = [model.caches(work.cache, mesh.tp)[index] for index in layers]
        found.append(
            CardMemory(
                dict(weights),
                sequence_bytes(caches, work.context) * work.sequences(mesh.dp),
                activation_bytes(model.dims, mesh, work, last=stage == mesh.pp - 1),
                buffer_bytes(model.dims, mesh),
                int(card * RESERVE),
                card,
            )
        )
    return found


def fullest(cards: list[CardMemory]) -> CardMemory:
    """The card with the least left."""
    return min(cards, key=lambda card: card.free)


def activation_bytes(dims: Dims, mesh: Mesh, work: Workload, *, last: bool) -> int:
    """Estimate of what is alive at once in one layer for a chunk, and of the logits on the last stage.

    Three tensors of hidden states (residual, normed, output), then the wider of attention (queries, keys, values and
    the output, each once more while they are rotated) and feed-forward (gate, up, their product, and the INT8 GEMM's
    int32 sums). Routed tokens count once for each expert that a rank computes them for.
    """
    states = 3 * CHUNK * dims.hidden * VALUE
    heads = max(1, dims.heads // mesh.tp)
    key_heads = heads if dims.is_mla else max(1, dims.kv_heads // mesh.tp)
    row = heads * (dims.query_rows or dims.head_dim) + key_heads * (dims.head_dim + dims.v_head_dim)
    attention = 2 * CHUNK * (row + heads * (dims.v_head_dim or dims.head_dim)) * VALUE
    width = max(dims.intermediate, dims.shared_intermediate) // mesh.tp
    dense = CHUNK * width * (3 * VALUE + 4)
    routed = 0
    if dims.experts:
        slots = CHUNK * mesh.dp * min(dims.experts_per_token, max(1, -(-dims.experts // mesh.ep)))
        inner = dims.moe_intermediate // max(1, mesh.moe_tp) * (3 * VALUE + 4)
        routed = slots * (inner + 2 * dims.hidden * VALUE)
    sequences = work.sequences(mesh.dp)
    logits = sequences * (dims.vocab + dims.vocab // mesh.tp) * 4 if last else 0
    return states + max(attention, dense, routed) + logits


def buffer_bytes(dims: Dims, mesh: Mesh) -> int:
    """Estimate of send and receive buffers: a chunk's hidden states, twice for each direction of the mesh in use, and
    once more for each expert of a token where experts of other replicas are reached."""
    chunk = CHUNK * dims.hidden * VALUE
    total = 2 * chunk * ((mesh.tp > 1) + (mesh.pp > 1))
    if dims.experts and mesh.ep > 1 and mesh.dp > 1:
        total += 2 * chunk * min(dims.experts_per_token, mesh.ep)
    return total


def longest_context(model: Model, mesh: Mesh, work: Workload, card: int) -> int:
    """The most tokens that each of the workload's sequences can have; 0 when nothing fits."""
    return _largest(lambda n: _fits(model, mesh, Workload(n, work.concurrency, work.cache), card))


def largest_batch(model: Model, mesh: Mesh, work: Workload, card: int) -> int:
    """The most sequences of the workload's context."""
    return _largest(lambda n: _fits(model, mesh, Workload(work.context, n, work.cache), card))


def _fits(model: Model, mesh: Mesh, work: Workload, card: int) -> bool:
    return fullest(stage_memory(model, mesh, work, card)).free >= 0


def _largest(fits: Any) -> int:
    """The largest n that fits, by doubling and halving; what never ends is cut at 2^40 (nothing is cached)."""
    if not fits(1):
        return 0
    high = 2
    while high < _SEARCH_LIMIT and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
