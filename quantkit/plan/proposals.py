"""Which meshes are legal, which of them fit, and in what order a person should look at them.

The order follows one figure: bytes on the critical path of one decode step, what the cards read of weights and cache
plus what the links carry, each link byte weighted. The weights are assumptions about the usual relation of memory to
links; they order proposals and promise no speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.archs import Dims
from quantkit.plan.cache import kv_heads_of_rank, sequence_bytes
from quantkit.plan.estimate import CardMemory, Model, Workload, fullest, stage_memory
from quantkit.spec.mesh import Mesh

LINK_IN_NODE = 16
"""A byte sent to a card of the same node costs as much as this many bytes read from memory (assumed)."""

LINK_BETWEEN_NODES = 64
"""The same between nodes (assumed)."""

COLLECTIVE_IN_NODE = 8 << 20
"""Start of one collective operation, in bytes read from memory in that time (assumed)."""

COLLECTIVE_BETWEEN_NODES = 32 << 20

NARROW = 64
"""Slices of an expert that are no multiple of this leave INT8 matrix instructions partly empty."""


@dataclass(frozen=True)
class Proposal:
    """A legal mesh.

    Attributes:
        memory: of its fullest card.
        balance: layers of the largest stage, relative to the mean.
        replicas: times that each kv head stands within a tensor-parallel group (latents: on every rank).
        tp_bytes: that a rank sends for one token in one layer, for all-reduces.
        ep_bytes: the same for reaching experts.
        pp_bytes: that one token sends between all stages together.
        cost: see the module.
        notes: what a person should know.
    """

    mesh: Mesh
    memory: CardMemory
    balance: float
    replicas: int
    tp_bytes: int
    ep_bytes: int
    pp_bytes: int
    cost: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.free >= 0


@dataclass(frozen=True)
class Rejected:
    """Meshes that cannot be used, and why."""

    meshes: tuple[Mesh, ...]
    reason: str


def divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def meshes(cards: int, has_experts: bool) -> Iterator[Mesh]:
    """All meshes of a number of cards, legal or not."""
    for tp in divisors(cards):
        for pp in divisors(cards // tp):
            dp = cards // tp // pp
            for ep in divisors(tp * dp) if has_experts else [1]:
                yield Mesh(tp=tp, pp=pp, dp=dp, ep=ep)


def propose(
    model: Model, cards: int, cards_per_node: int, work: Workload, card: int
) -> tuple[list[Proposal], list[Rejected]]:
    """Proposals that fit, the best first, and the rest by reason (the reason that concerns most meshes first)."""
    found: list[Proposal] = []
    refused: dict[str, list[Mesh]] = {}
    for mesh in meshes(cards, bool(model.dims.experts)):
        reasons = illegal(model, mesh, cards_per_node)
        if not reasons:
            proposal = rate(model, mesh, cards_per_node, work, card)
            if proposal.fits:
                found.append(proposal)
                continue
            reasons = [_too_big(proposal.memory)]
        for reason in reasons[:1]:
            refused.setdefault(reason, []).append(mesh)
    found.sort(key=lambda row: (row.cost, -row.memory.free))
    rejected = [Rejected(tuple(group), reason) for reason, group in refused.items()]
    return found, sorted(rejected, key=lambda row: -len(row.meshes))


def _too_big(memory: CardMemory) -> str:
    """What does not fit, in words that are the same for all meshes of a kind."""
    if memory.weight_bytes + memory.reserve > memory.card:
        return "the weights of one card alone are larger than its memory less the reserve"
    return "the weights fit, but not beside the cache, activations and buffers of this workload"


def illegal(model: Model, mesh: Mesh, cards_per_node: int) -> list[str]:
    """Why a mesh cannot be used, the gravest reason first; the words of `convert` where it would refuse it."""
    found = []
    if mesh.tp > cards_per_node:
        found.append(
            f"tp={mesh.tp} would leave the node of {cards_per_node} cards, and every layer waits for its links"
        )
    elif mesh.world > cards_per_node and cards_per_node % mesh.tp:
        found.append(f"tp={mesh.tp} does not divide a node of {cards_per_node} cards, so a group would lie on two")
    return found + model.weights.misfits(mesh)


def rate(model: Model, mesh: Mesh, cards_per_node: int, work: Workload, card: int) -> Proposal:
    """Figures of a legal mesh."""
    dims = model.dims
    cards = stage_memory(model, mesh, work, card)
    stages = mesh.stage_layers(dims.layers)
    tp_bytes, ep_bytes = _traffic(model, mesh)
    return Proposal(
        mesh,
        fullest(cards),
        max(map(len, stages)) * mesh.pp / dims.layers,
        kv_replicas(model, mesh.tp),
        tp_bytes,
        ep_bytes,
        (mesh.pp - 1) * 2 * dims.hidden,
        _cost(model, mesh, cards_per_node, work, cards),
        tuple(_notes(model, mesh, cards)),
    )


def kv_replicas(model: Model, tp: int) -> int:
    """Copies of each key and value within a tensor-parallel group."""
    return tp if model.dims.is_mla else kv_heads_of_rank(model.dims, tp) * tp // model.dims.kv_heads


def _traffic(model: Model, mesh: Mesh) -> tuple[int, int]:
    """(all-reduce, experts): bytes that a rank sends for one token in one layer, in BF16.

    A ring all-reduce sends 2 (n - 1) / n of the data, and a layer has two. Experts inside one tensor-parallel group
    need no more than the second of them; experts of other replicas get the token and send its result back.
    """
    state = 2 * model.dims.hidden
    reduced = 2 * 2 * state * (mesh.tp - 1) // mesh.tp
    group = mesh.tp * mesh.dp
    if not model.dims.experts or mesh.dp == 1:
        return reduced, 0
    # tokens of a replica reach min(k, groups) others; with ep = 1 every rank has a slice of every expert
    reached = min(model.dims.experts_per_token, mesh.ep) if mesh.ep > 1 else 1
    moved = 2 * reached * max(1, mesh.moe_tp // mesh.tp) * state * (group - mesh.tp) // group
    return reduced // 2 + moved, moved


def _cost(model: Model, mesh: Mesh, cards_per_node: int, work: Workload, cards: list[CardMemory]) -> float:
    """Bytes on the critical path of one decode step of all sequences (see the module)."""
    dims = model.dims
    sequences = work.sequences(mesh.dp)
    batch = -(-sequences // min(mesh.pp, sequences))  # micro-batches keep the stages busy
    share = _experts_read(dims, mesh, batch * mesh.dp) if dims.experts else 1.0
    read = sum(
        nbytes * (share if column == "experts" else 1.0) for card in cards for column, nbytes in card.weights.items()
    )
    read += batch * sequence_bytes(model.caches(work.cache, mesh.tp), work.context)
    tp_bytes, ep_bytes = _traffic(model, mesh)
    far = mesh.tp * mesh.dp > cards_per_node
    ep_link = LINK_BETWEEN_NODES if far else LINK_IN_NODE
    links = batch * dims.layers * ((tp_bytes - ep_bytes) * LINK_IN_NODE + ep_bytes * ep_link)
    starts = dims.layers * (2 if mesh.tp > 1 else 0) * COLLECTIVE_IN_NODE
    if ep_bytes:
        starts += dims.layers * 2 * (COLLECTIVE_BETWEEN_NODES if far else COLLECTIVE_IN_NODE)
    hops = mesh.pp - 1
    far_hops = min(hops, -(-mesh.world // cards_per_node) - 1)
    starts += far_hops * COLLECTIVE_BETWEEN_NODES + (hops - far_hops) * COLLECTIVE_IN_NODE
    links += batch * 2 * dims.hidden * (far_hops * LINK_BETWEEN_NODES + (hops - far_hops) * LINK_IN_NODE)
    return float(read + links + starts)


def _experts_read(dims: Dims, mesh: Mesh, tokens: int) -> float:
    """Share of a rank's experts that it reads in a step, on the rank that has most of them to read.

    Tokens choose independently; the fullest of n bins that hold m balls each on average has about
    m + sqrt(2 m ln n). A slice that is no multiple of NARROW is read as if it were padded to one.
    """
    touched = dims.experts * (1 - (1 - dims.experts_per_token / dims.experts) ** tokens)
    mean = touched / mesh.ep
    most = min(dims.experts / mesh.ep, mean + math.sqrt(2 * mean * math.log(mesh.ep)))
    width = dims.moe_intermediate / mesh.moe_tp
    return most / (dims.experts / mesh.ep) * math.ceil(width / NARROW) * NARROW / width


def _notes(model: Model, mesh: Mesh, cards: list[CardMemory]) -> Iterator[str]:
    dims = model.dims
    copies = kv_replicas(model, mesh.tp)
    if copies > 1 and dims.is_mla:
        yield f"every rank of a group keeps the same latents: {copies} copies of the cache"
    elif copies > 1:
        yield f"tp={mesh.tp} exceeds {dims.kv_heads} kv heads: each stands on {copies} ranks"
    sizes = [len(layers) for layers in mesh.stage_layers(dims.layers)]
    if len(set(sizes)) > 1:
        yield f"stages of {', '.join(map(str, sizes))} layers"
    if dims.experts and mesh.ep > 1 and dims.experts % mesh.ep:
        held = [len(row) for row in mesh.rank_experts(dims.experts)]
        yield f"{dims.experts} experts over {mesh.ep}: {max(held)} on some ranks, {min(held)} on others"
    if dims.experts and mesh.moe_tp > 1 and dims.moe_intermediate // mesh.moe_tp % NARROW:
        yield f"slices of {dims.moe_intermediate // mesh.moe_tp} of an expert's width: no multiple of {NARROW}"
    spread = [card.weight_bytes for card in cards]
    if min(spread) == 0:
        yield "stages without weights: tensors of their layers are missing"
    elif max(spread) > 1.1 * min(spread):
        yield f"weights of the stages differ by {max(spread) / min(spread) - 1:.0%}"
