"""The operators that a model needs, by module: what they are, what goes wrong with them, and who runs them here.

Rows of data, chosen by the roles that a model has. "own INT8" means that its GEMMs run as an operation of the runtime's
kernel registry, in whatever kernel that has for the device; "torch" that transformers' code and torch run it;
"missing" that `quantkit-runtime` does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from quantkit.archs import Architecture, Dims
from quantkit.archs.structure import Layer
from quantkit.rope import rope_text, rope_type

State = Literal["own INT8", "torch", "missing"]
KERNEL = "w8a8_gemm"
"""Operation of the runtime's registry that quantized GEMMs run in."""


class OperatorRow(BaseModel):
    """One function of the model.

    Attributes:
        function: what it is for.
        operators: what it is made of.
        watch: what goes wrong with it.
        state: who runs it in `quantkit-runtime`.
        kernel: operation of the kernel registry, "" for torch.
        roles: roles of the model that it covers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str
    operators: str
    watch: str
    state: State
    kernel: str = ""
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Row:
    """A row of the table: needed when the model has one of `roles` (names, or prefixes that end in a dot)."""

    function: str
    roles: tuple[str, ...]
    operators: str
    watch: str
    state: State = "torch"
    kernel: str = ""

    def covers(self, role: str) -> bool:
        return any(role.startswith(name) if name.endswith(".") else role == name for name in self.roles)


_INT8: dict[str, Any] = {"state": "own INT8", "kernel": KERNEL}

_TABLE: tuple[_Row, ...] = (
    _Row("embedding", ("embed",), "gather", "vocabulary is padded when it is split"),
    _Row("norms", ("norm.",), "RMSNorm", "mean of squares in float32"),
    _Row(
        "attention projections",
        ("attn.q", "attn.k", "attn.v", "attn.qkv", "attn.o"),
        "quantize, INT8 GEMM, bias",
        "one scale per token and per output row; split each part of a fused q+k+v",
        **_INT8,
    ),
    _Row("query and key norms", ("attn.q_norm", "attn.k_norm"), "RMSNorm per head", "before the rotation"),
    _Row(
        "latent projections down", ("mla.q_a", "mla.kv_a", "mla.q_a_norm", "mla.kv_a_norm"), "GEMM, RMSNorm",
        "kept: shared by all heads; engines fuse both",
    ),
    _Row("latent projections up", ("mla.q_b", "mla.kv_b"), "quantize, INT8 GEMM", "split by head", **_INT8),
    _Row(
        "attention", ("attn.q", "attn.qkv", "mla.q_b"), "rotate, q k^T, softmax, v",
        "softmax in float32; kv heads replicate when tp exceeds them",
    ),
    _Row("static cache scales", ("attn.cache_scale",), "a factor for FP8 keys and values",
         "for engines; this runtime scales per token and head", "missing"),
    _Row("attention sinks", ("attn.sinks",), "a logit per head in the softmax", "it takes mass and has no value"),
    _Row("grouped output projection", ("attn.o_a",), "a GEMM for each group of heads", "kept: block-diagonal"),
    _Row(
        "compressed cache", ("compressor.",), "GEMMs, softmax and sum over a few tokens",
        "kept: every later token reads an entry; the tokens of an unfinished one must be kept too",
    ),
    _Row(
        "hyper-connections", ("hyper.",), "norm, GEMM, Sinkhorn iterations, sums over streams",
        "parallel residual streams; weights and iterations in float32",
    ),
    _Row(
        "sparse indexer", ("indexer", "indexer."), "GEMMs, top-k of positions",
        "kept: a wrong selection is no small error; ties in their order",
    ),
    _Row(
        "linear attention", ("linear_attn", "linear_attn."), "GEMMs, short convolution, recurrent state",
        "kept: the state adds errors up; its decay in float32",
    ),
    _Row("router", ("router",), "GEMM, scores, top-k", "kept in its own dtype; ties in their order"),
    _Row("router by token id", ("router.table",), "gather", "the token ids must reach every layer"),
    _Row("router correction", ("router.correction",), "bias for the choice only", "float32: BF16 merges values"),
    _Row(
        "routed experts", ("expert.",), "sort by expert, INT8 GEMMs, gate, weighted sum",
        "experts without a token; the order of gate and up", **_INT8,
    ),
    _Row("shared experts", ("shared.gate", "shared.up", "shared.gate_up", "shared.down"), "quantize, INT8 GEMM, gate",
         "every token passes", **_INT8),
    _Row("gate of shared experts", ("shared.router",), "GEMM, sigmoid", "kept"),
    _Row("feed-forward", ("mlp.",), "quantize, INT8 GEMM, gate", "long tails before the down projection", **_INT8),
    _Row("output head", ("lm_head", "embed"), "GEMM", "kept; the embedding itself when tied"),
    _Row("draft layers", ("mtp",), "a decoder layer that proposes tokens", "kept as they are, in no shard", "missing"),
    _Row("vision tower", ("vision",), "convolution, encoder, projector", "kept as it is, in no shard", "missing"),
)  # fmt: skip


def operator_list(
    arch: Architecture, dims: Dims, config: Mapping[str, Any], layers: Iterable[Layer], roles: Iterable[str]
) -> tuple[OperatorRow, ...]:
    """Rows for the roles of a model, with what its config adds to watch for."""
    present = sorted(set(roles))
    extra = _from_config(arch, dims, config, tuple(layers))
    rows = []
    for row in _TABLE:
        covered = tuple(role for role in present if row.covers(role))
        if covered:
            watch = "; ".join([row.watch, *extra.get(row.function, ())])
            rows.append(
                OperatorRow(
                    function=row.function,
                    operators=row.operators,
                    watch=watch,
                    state=row.state,
                    kernel=row.kernel,
                    roles=covered,
                )
            )
    return tuple(rows)


def unlisted(roles: Iterable[str]) -> list[str]:
    """Roles that no row of the table covers."""
    return sorted(role for role in set(roles) if not any(row.covers(role) for row in _TABLE))


def _from_config(
    arch: Architecture, dims: Dims, config: Mapping[str, Any], layers: tuple[Layer, ...]
) -> dict[str, list[str]]:
    """Function -> what this model's record and config add."""
    found: dict[str, list[str]] = {}

    def add(function: str, text: str) -> None:
        found.setdefault(function, []).append(text)

    if arch.norm_offset:
        add("norms", f"weights count as {arch.norm_offset:g} + w")
    if arch.role("attn.q_norm").unit:
        add("query and key norms", "over all heads at once: an all-reduce under tp")
    windows = sorted({layer.window for layer in layers if layer.window})
    if windows:
        count = sum(layer.window > 0 for layer in layers)
        add("attention", f"{count} of {len(layers)} layers see the last {', '.join(map(str, windows))} tokens")
    if dims.is_mla:
        add("attention", f"caches latents of {dims.kv_lora_rank} + {dims.qk_rope_head_dim}, the same on every rank")
    if arch.query_gate:
        add("attention", "its output has a gate beside each query head")
    if rope_type(config) != "default":
        add("attention", f"rope {rope_text(config)}")
    if arch.gate_up_interleaved:
        add("routed experts", "rows of gate and up alternate")
    if not arch.gate_is_linear_in_up:
        for function in ("routed experts", "shared experts", "feed-forward"):
            add(function, "gate and up are clamped: no factor moves from up to down")
    return found
