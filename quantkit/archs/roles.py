"""Roles: what a tensor is for, and everything that follows from it.

A tensor on disk, a module parameter in memory and a tensor in a shard all parse to the same key
(layer, role, expert, part). Whether it is quantized, how it splits, what it fuses with and which memory column
it counts to are columns of the table below, never branches in code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What a role's tensors are made of."""

    LINEAR = "linear"  # a GEMM weight [N, K]: quantized unless its row says otherwise
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"  # [vocabulary, hidden], embed_tokens and lm_head
    VECTOR = "vector"  # sinks, correction biases: small parameters that stay as they are
    OPAQUE = "opaque"  # kept whole and unsplit: vision towers, linear attention, indexers, draft layers


class Split(StrEnum):
    """How tensor parallelism divides a weight [N, K]; the bias and the scales follow by `architectures` rules."""

    COL = "col"  # along N
    ROW = "row"  # along K
    REP = "rep"  # every rank holds all of it


class Stage(StrEnum):
    """Which pipeline stage holds it."""

    LAYER = "layer"  # that of its layer
    FIRST = "first"
    LAST = "last"


class Residual(StrEnum):
    """How a role's tensors meet the residual stream, the hidden states between the blocks."""

    NONE = ""
    IN = "in"  # a matrix that reads it through the norm `fed_by`: its columns are the stream's channels
    OUT = "out"  # a matrix whose output is added to it: its rows (of the embedding: its columns) are the channels
    SCALES = "scales"  # a norm that multiplies what is added to it, channel by channel
    BESIDE = "beside"  # it reads or mixes the stream itself, through no norm of the table: only a rotation concerns it
    UNKNOWN = "unknown"  # it reads or writes it in a way that the table does not describe


class Key(NamedTuple):
    """Identity of one tensor, the same on disk, in memory and in a shard.

    Attributes:
        layer: decoder layer, None for tensors outside the layers.
        role: a name from `ROLES`.
        expert: routed expert; None where there is none, or when one tensor stacks all experts.
        part: "weight", "bias", "weight_scale", ...: which tensor of that module.
        label: tells tensors of one opaque role apart (their name below the layer); "" otherwise.
    """

    layer: int | None
    role: str
    expert: int | None = None
    part: str = "weight"
    label: str = ""

    def with_part(self, part: str) -> Key:
        return self if part == self.part else Key(self.layer, self.role, self.expert, part, self.label)

    @property
    def shard_name(self) -> str:
        """Name of the tensor in rank shards: `layers.3.expert.gate.7.weight`, `embed.weight`."""
        fields = [] if self.layer is None else ["layers", str(self.layer)]
        fields.append(self.role)
        fields += [self.label] if self.label else []
        fields += [] if self.expert is None else [str(self.expert)]
        return ".".join([*fields, self.part])


@dataclass(frozen=True)
class Role:
    """One row of the table.

    Attributes:
        name: e.g. "attn.q".
        kind: what its tensors are.
        quantize: whether the default recipe converts it to INT8.
        split: direction under tensor parallelism.
        unit: name of the `Dims` count that the split must divide ("heads", "kv_heads", "intermediate", ...).
        stage: pipeline stage.
        fuse: role of the fused tensor that this one is a part of, "" if none.
        parts: for a fused role, its members in row order.
        input: names the GEMM input it reads; roles with the same input in a layer share one activation.
        fed_by: role of the norm or GEMM whose output channels feed `input` (for smoothing), "" if none.
        column: memory column in plans.
        per_expert: one tensor per routed expert.
        residual: how its weight meets the residual stream, for transforms of the whole model: see `Residual`.
    """

    name: str
    kind: Kind
    quantize: bool = False
    split: Split = Split.REP
    unit: str = ""
    stage: Stage = Stage.LAYER
    fuse: str = ""
    parts: tuple[str, ...] = ()
    input: str = ""
    fed_by: str = ""
    column: str = "other"
    per_expert: bool = False
    residual: Residual = Residual.NONE


def _linear(name: str, split: Split, unit: str, column: str, **columns: Any) -> Role:
    return Role(name, Kind.LINEAR, True, split, unit, column=column, **columns)


_ATTN_IN: dict[str, Any] = {"input": "attn.in", "fed_by": "norm.input", "residual": Residual.IN}
_MLP_IN: dict[str, Any] = {"input": "mlp.in", "fed_by": "norm.pre_mlp", "residual": Residual.IN}


def _mlp(prefix: str, unit: str, column: str, per_expert: bool = False) -> tuple[Role, ...]:
    """The roles of one gated MLP: routed experts, shared experts and dense layers have the same shape."""
    gate, up, down, fused = (f"{prefix}.{part}" for part in ("gate", "up", "down", "gate_up"))
    rest: dict[str, Any] = {"column": column, "per_expert": per_expert}
    entering: dict[str, Any] = {**_MLP_IN, **rest}
    return (
        _linear(gate, Split.COL, unit, fuse=fused, **entering),
        _linear(up, Split.COL, unit, fuse=fused, **entering),
        _linear(fused, Split.COL, unit, parts=(gate, up), **entering),
        _linear(down, Split.ROW, unit, input=f"{prefix}.down_in", fed_by=up, residual=Residual.OUT, **rest),
    )


_TABLE: tuple[Role, ...] = (
    Role(
        "embed",
        Kind.EMBEDDING,
        split=Split.COL,
        unit="vocab",
        stage=Stage.FIRST,
        column="embedding",
        residual=Residual.OUT,
    ),
    Role(
        "lm_head",
        Kind.EMBEDDING,
        split=Split.COL,
        unit="vocab",
        stage=Stage.LAST,
        fed_by="norm.final",
        column="embedding",
        residual=Residual.IN,
    ),
    Role("norm.final", Kind.NORM, stage=Stage.LAST, column="norm"),
    # norms of a layer, named by what they stand before
    Role("norm.input", Kind.NORM, column="norm"),
    Role("norm.post_attn", Kind.NORM, column="norm", residual=Residual.SCALES),
    Role("norm.pre_mlp", Kind.NORM, column="norm"),
    Role("norm.post_mlp", Kind.NORM, column="norm", residual=Residual.SCALES),
    # attention with separate keys and values
    _linear("attn.q", Split.COL, "heads", "attention", fuse="attn.qkv", **_ATTN_IN),
    _linear("attn.k", Split.COL, "kv_heads", "attention", fuse="attn.qkv", **_ATTN_IN),
    _linear("attn.v", Split.COL, "kv_heads", "attention", fuse="attn.qkv", **_ATTN_IN),
    _linear("attn.qkv", Split.COL, "heads", "attention", parts=("attn.q", "attn.k", "attn.v"), **_ATTN_IN),
    _linear("attn.o", Split.ROW, "heads", "attention", input="attn.out", fed_by="attn.v", residual=Residual.OUT),
    Role("attn.q_norm", Kind.NORM, column="norm"),
    Role("attn.k_norm", Kind.NORM, column="norm"),
    Role("attn.sinks", Kind.VECTOR, split=Split.COL, unit="heads", column="attention"),
    # latent attention: the down projections are small, shared by all heads and the most sensitive GEMMs of
    # the layer, and engines fuse both, so both stay in the source's dtype
    Role("mla.q_a", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("mla.kv_a", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("mla.q_a_norm", Kind.NORM, column="norm"),
    Role("mla.kv_a_norm", Kind.NORM, column="norm"),
    _linear("mla.q_b", Split.COL, "heads", "attention", input="mla.q_latent", fed_by="mla.q_a_norm"),
    _linear("mla.kv_b", Split.COL, "heads", "attention", input="mla.kv_latent", fed_by="mla.kv_a_norm"),
    # feed-forward
    *_mlp("mlp", "intermediate", "mlp"),
    *_mlp("shared", "shared_intermediate", "shared experts"),
    *_mlp("expert", "moe_intermediate", "experts", per_expert=True),
    Role("router", Kind.ROUTER, column="router", **_MLP_IN),
    Role("router.correction", Kind.VECTOR, column="router"),
    Role("router.table", Kind.VECTOR, column="router"),  # experts by token id, in place of a choice by scores
    Role("shared.router", Kind.ROUTER, column="router", **_MLP_IN),
    # the indexer of sparse attention: a selection of keys is not averaged over, so an error flips it; kept
    Role("indexer.q", Kind.LINEAR, input="mla.q_latent", fed_by="mla.q_a_norm", column="attention"),
    Role("indexer.k", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("indexer.weights", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("indexer.q_norm", Kind.NORM, column="norm"),
    Role("indexer.k_norm", Kind.NORM, column="norm"),
    # linear attention: a recurrent state adds errors up over the whole sequence; kept
    Role("linear_attn.qkvz", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.qkv", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.z", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.ba", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.b", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.a", Kind.LINEAR, column="attention", **_ATTN_IN),
    Role("linear_attn.o", Kind.LINEAR, input="linear_attn.out", column="attention", residual=Residual.OUT),
    # kept whole, by rule
    Role("indexer", Kind.OPAQUE, column="attention", residual=Residual.UNKNOWN),
    Role("linear_attn", Kind.OPAQUE, column="attention"),
    Role("mtp", Kind.OPAQUE, stage=Stage.LAST, column="draft layers", residual=Residual.UNKNOWN),
    Role("vision", Kind.OPAQUE, stage=Stage.FIRST, column="vision", residual=Residual.UNKNOWN),
    Role("attn.cache_scale", Kind.OPAQUE, column="attention"),  # static scales of a cache, for engines
    Role("buffer", Kind.OPAQUE, column="other"),
)

ROLES: dict[str, Role] = {role.name: role for role in _TABLE}

FULL_WIDTH_QK_NORMS: dict[str, Role] = {
    "attn.q_norm": Role("attn.q_norm", Kind.NORM, split=Split.COL, unit="heads", column="norm"),
    "attn.k_norm": Role("attn.k_norm", Kind.NORM, split=Split.COL, unit="kv_heads", column="norm"),
}
"""For families whose q/k norms run over all heads at once: they split with the heads, and their sum of squares
needs an all-reduce under tensor parallelism."""

FUSED_BY_ENGINES: tuple[tuple[str, ...], ...] = (("mla.q_a", "mla.kv_a"),)
"""Roles that engines join into one GEMM although the source and our shards do not (vLLM: fused_qkv_a_proj)."""
