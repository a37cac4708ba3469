"""Every tensor that a config promises: key, shape and dtype, from the role table and the record, without weights.

Experts are stacked, parts are unfused and all shapes are canonical (`[N, K]`, `[E, N, K]`); a checkpoint may store the
same values one by one, fused or transposed. Vision towers are not among them: a text config does not describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from quantkit.archs.base import Architecture
from quantkit.archs.dims import Dims, text_config
from quantkit.archs.optional import DEFAULT_OPTIONAL, MTP_COPIES
from quantkit.archs.roles import Key, Kind, Role, Split
from quantkit.archs.rules import DEFAULT_LAYER_RULES, DEFAULT_MODEL_RULES
from quantkit.archs.structure import Layer, draft_layers, layers_of, whole_number


class Expected(NamedTuple):
    """One tensor.

    Attributes:
        name: as such a checkpoint usually calls it (`*` for all experts).
        shape: canonical.
        dtype: safetensors name, before any quantization that the config declares.
    """

    key: Key
    name: str
    shape: tuple[int, ...]
    dtype: str


_ROWS: Mapping[str, Callable[[Dims], int]] = {
    "mla.q_a": lambda dims: dims.q_lora_rank,
    "mla.kv_a": lambda dims: dims.kv_lora_rank + dims.qk_rope_head_dim if dims.is_mla else dims.head_dim,
    "mla.q_a_norm": lambda dims: dims.q_lora_rank,
    "mla.kv_a_norm": lambda dims: dims.kv_lora_rank or dims.head_dim,
    "attn.q_norm": lambda dims: dims.head_dim,
    "attn.k_norm": lambda dims: dims.head_dim,
    "router": lambda dims: dims.experts,
    "router.correction": lambda dims: dims.experts,
    "shared.router": lambda dims: 1,
    "indexer.q": lambda dims: dims.index_heads * dims.index_head_dim,
    "indexer.k": lambda dims: dims.index_head_dim,
    "indexer.weights": lambda dims: dims.index_heads,
    "indexer.q_norm": lambda dims: dims.index_head_dim,
    "indexer.k_norm": lambda dims: dims.index_head_dim,
}
"""Rows of roles that no unit of the table gives."""

_LATENTS: Mapping[str, Callable[[Dims], int]] = {
    "mla.q_latent": lambda dims: dims.q_lora_rank,
    "mla.kv_latent": lambda dims: dims.kv_lora_rank,
    "attn.out_group": lambda dims: dims.heads * dims.head_dim // dims.output_groups,
}


def shape_of(arch: Architecture, dims: Dims, role: Role) -> tuple[int, ...]:
    """Canonical shape of a role's weight, one expert's where there are experts."""
    across = dims.count(role.unit) * dims.rows_per_unit(role.name) if role.unit else 0
    if role.split is Split.ROW:
        return (dims.hidden, across)
    rows = across or (_ROWS[role.name](dims) if role.name in _ROWS else dims.hidden)
    if role.kind in (Kind.NORM, Kind.VECTOR):
        return (rows,)
    return (rows, _LATENTS[role.input](dims) if role.input in _LATENTS else dims.hidden)


def expected_tensors(arch: Architecture, dims: Dims, config: Mapping[str, Any]) -> list[Expected]:
    """All tensors of the text model, draft layers included, in the order of the layers."""
    return list(_Promise(arch, dims, config).tensors())


class _Promise:
    def __init__(self, arch: Architecture, dims: Dims, config: Mapping[str, Any]) -> None:
        self.arch, self.dims, self.config = arch, dims, config
        self.text = text_config(config)
        stated = str(self.text.get("dtype") or self.text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        self.dtype = {"float16": "F16", "float32": "F32"}.get(stated, "BF16")
        self._optional = {**DEFAULT_OPTIONAL, **arch.optional}
        rules = [*arch.layer_rules.items(), *DEFAULT_LAYER_RULES.items(), *DEFAULT_MODEL_RULES.items()]
        self._names = {role: rest for rest, role in reversed(rules)}  # the first spelling of a role counts

    def tensors(self) -> Iterator[Expected]:
        yield from self._role(None, "embed")
        layers = layers_of(self.arch, self.dims, self.config)
        for index, layer in enumerate(layers):
            yield from self._layer(index, layer)
        yield from self._role(None, "norm.final")
        if self.dims.streams:
            yield from self._hyper(None, "head")
        if not self.dims.tied:
            yield from self._role(None, "lm_head")
        for index in range(len(layers), len(layers) + draft_layers(self.config)):
            yield from self._layer(index, layers[-1])
            yield from self._draft(index)

    def has(self, name: str) -> bool:
        return any(condition.holds(self.text) for condition in self._optional.get(name, ()))

    def _layer(self, index: int, layer: Layer) -> Iterator[Expected]:
        for role in ("norm.input", "norm.pre_mlp"):
            yield from self._role(index, role)
        for role in ("norm.post_attn", "norm.post_mlp"):
            yield from self._role(index, role, optional=True)
        if layer.attention == "linear":
            yield from self._linear_attention(index)
        elif self.dims.output_groups:
            yield from self._compressed_attention(index, layer)
        else:
            yield from self._attention(index, layer)
        if self.dims.streams:
            yield from self._hyper(index, "attn")
            yield from self._hyper(index, "mlp")
        yield from self._experts(index, layer.table) if layer.moe else self._parts(index, "mlp")

    def _attention(self, index: int, layer: Layer) -> Iterator[Expected]:
        if self.dims.is_mla:
            queries = ("mla.q_a", "mla.q_a_norm", "mla.q_b") if self.dims.q_lora_rank else ("attn.q",)
            required = (*queries, "mla.kv_a", "mla.kv_a_norm", "mla.kv_b", "attn.o")
        else:
            required = ("attn.q", "attn.k", "attn.v", "attn.o")
        for role in required:
            yield from self._role(index, role)
        for role in ("attn.q_norm", "attn.k_norm", "attn.sinks"):
            yield from self._role(index, role, optional=True)
        if layer.indexed:
            for role in ("indexer.q", "indexer.k", "indexer.k_norm"):
                yield from self._role(index, role)
            for role in ("indexer.q_norm", "indexer.weights"):
                yield from self._role(index, role, optional=True)

    def _linear_attention(self, index: int) -> Iterator[Expected]:
        """Gated delta rule (Qwen3-Next): projections, a short convolution, decay rates and a norm."""
        size = linear_attention_sizes(self.text)
        joint = 2 * size.key_width + size.value_width
        for role, shape in (
            ("linear_attn.qkvz", (joint + size.value_width, self.dims.hidden)),
            ("linear_attn.ba", (2 * size.value_heads, self.dims.hidden)),
            ("linear_attn.o", (self.dims.hidden, size.value_width)),
        ):
            yield self._tensor(Key(index, role), shape)
        for label, vector in (
            ("conv1d.weight", (joint, 1, size.kernel)),
            ("A_log", (size.value_heads,)),
            ("dt_bias", (size.value_heads,)),
            ("norm.weight", (size.value_dim,)),
        ):
            yield self._tensor(Key(index, "linear_attn", label=f"linear_attn.{label}"), vector)

    def _compressed_attention(self, index: int, layer: Layer) -> Iterator[Expected]:
        """DeepSeek-V4: one key that is the value too, and one more entry for every few tokens."""
        for role in ("mla.q_a", "mla.q_a_norm", "mla.q_b", "mla.kv_a", "mla.kv_a_norm", "attn.o_a", "attn.o"):
            yield from self._role(index, role)
        yield from self._role(index, "attn.sinks", optional=True)
        if layer.compress:
            yield from self._compressor(index, layer, "compressor", "compressor.norm", self.dims.head_dim)
        if layer.indexed:
            yield from self._compressor(index, layer, "indexer", "indexer.k_norm", self.dims.index_head_dim)
            yield from self._role(index, "indexer.q")
            yield from self._role(index, "indexer.weights")

    def _compressor(self, index: int, layer: Layer, prefix: str, norm: str, width: int) -> Iterator[Expected]:
        rows = 2 * width if layer.indexed else width  # entries that an indexer selects from overlap
        for part in ("kv", "gate"):
            yield self._tensor(Key(index, f"{prefix}.{part}"), (rows, self.dims.hidden))
        yield self._tensor(Key(index, norm), (width,))
        yield self._tensor(Key(index, f"{prefix}.position"), (layer.compress, rows))

    def _hyper(self, index: int | None, block: str) -> Iterator[Expected]:
        """Weights of hyper-connections: how streams enter a block, leave it and mix; at the head only the first."""
        streams = self.dims.streams
        rows, scales = (streams, 1) if index is None else (streams * (streams + 2), 3)
        for part, shape in (("weight", (rows, self.dims.stream_width)), ("base", (rows,)), ("scale", (scales,))):
            yield self._tensor(Key(index, f"hyper.{block}.{part}"), shape)

    def _experts(self, index: int, table: bool) -> Iterator[Expected]:
        yield from self._role(index, "router")
        if table:
            shape = (self.dims.vocab, self.dims.experts_per_token)
            yield self._tensor(Key(index, "router.table"), shape)._replace(dtype="I64")
        else:
            yield from self._role(index, "router.correction", optional=True)
        yield from self._parts(index, "expert")
        if self.dims.shared_intermediate:
            yield from self._parts(index, "shared")
            yield from self._role(index, "shared.router", optional=True)

    def _parts(self, index: int, prefix: str) -> Iterator[Expected]:
        for part in ("gate", "up", "down"):
            yield from self._role(index, f"{prefix}.{part}")

    def _draft(self, index: int) -> Iterator[Expected]:
        hidden = self.dims.hidden
        shapes: dict[str, tuple[int, ...]] = {"eh_proj": (hidden, 2 * hidden)}
        shapes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
        if self.has(MTP_COPIES):
            shapes |= dict.fromkeys(("embed_tokens", "shared_head.head"), (self.dims.vocab, hidden))
        for label, shape in shapes.items():
            yield self._tensor(Key(index, "mtp", label=f"{label}.weight"), shape)

    def _role(self, layer: int | None, name: str, *, optional: bool = False) -> Iterator[Expected]:
        """The weight of a role, and its bias where it has one."""
        if optional and not self.has(name):
            return
        role = self.arch.role(name)
        shape = shape_of(self.arch, self.dims, role)
        lead = (self.dims.experts,) if role.per_expert else ()
        yield self._tensor(Key(layer, name), (*lead, *shape))
        if self.has(f"{name}:bias"):
            yield self._tensor(Key(layer, name, part="bias"), (*lead, shape[0]))

    def _tensor(self, key: Key, shape: tuple[int, ...]) -> Expected:
        dtype = "F32" if key.role in self.arch.float32_parameters else self.dtype
        bare = self.arch.role(key.role).kind is Kind.VECTOR  # a parameter of its own, without a module
        rest = key.label or self._names.get(key.role, key.role) + ("" if bare else f".{key.part}")
        place = "model." if key.layer is None else f"model.layers.{key.layer}."
        place = "" if key.role == "lm_head" else place
        return Expected(key, f"{place}{rest}", shape, dtype)


class LinearAttentionSizes(NamedTuple):
    """Sizes of linear attention by the config: heads, widths of all heads together, size of one value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim


def linear_attention_sizes(text: Mapping[str, Any]) -> LinearAttentionSizes:
    """From the text part of a config; all 0 when it has none."""
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return LinearAttentionSizes(*(whole_number(text, f"linear_{key}") for key in keys))
