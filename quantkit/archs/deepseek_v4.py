"""DeepSeek-V4: one shared key and value head, compressed caches, grouped output projection, hyper-connections.

Names on disk are those of DeepSeek's own inference code (`layers.0.attn.wq_a`), in memory transformers' modules.
"""

from typing import Any

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS
from quantkit.archs.roles import Kind, Residual, Role, Split, Stage

_READS_INPUT: dict[str, Any] = {"input": "attn.in", "fed_by": "norm.input", "residual": Residual.IN}

_ROLES = (
    # Heads are mixed in groups: the first projection is block-diagonal, no plain GEMM, so it is kept and no INT8 layer
    # can take its place. Both split over the groups, as in DeepSeek's own code.
    Role("attn.o_a", Kind.LINEAR, split=Split.COL, unit="output_groups", input="attn.out_group", column="attention"),
    Role(
        "attn.o",
        Kind.LINEAR,
        quantize=True,
        split=Split.ROW,
        unit="output_groups",
        input="attn.out",
        column="attention",
        residual=Residual.OUT,
    ),
    # what makes one cache entry of several tokens; small, and each entry is read by every later token: kept
    Role("compressor.kv", Kind.LINEAR, column="attention", **_READS_INPUT),
    Role("compressor.gate", Kind.LINEAR, column="attention", **_READS_INPUT),
    Role("compressor.norm", Kind.NORM, column="norm"),
    Role("compressor.position", Kind.VECTOR, column="attention"),
    # the indexer compresses keys of its own
    Role("indexer.kv", Kind.LINEAR, column="attention", **_READS_INPUT),
    Role("indexer.gate", Kind.LINEAR, column="attention", **_READS_INPUT),
    Role("indexer.position", Kind.VECTOR, column="attention"),
    # hyper-connections: how the parallel residual streams are joined before and spread after a block
    *(
        Role(f"hyper.{block}.{part}", Kind.VECTOR, column="other", residual=Residual.BESIDE)
        for block in ("attn", "mlp")
        for part in ("weight", "base", "scale")
    ),
    *(
        Role(f"hyper.head.{part}", Kind.VECTOR, stage=Stage.LAST, column="other", residual=Residual.BESIDE)
        for part in ("weight", "base", "scale")
    ),
)

_HYPER = {"fn": "weight", "base": "base", "scale": "scale"}

ARCHITECTURE = Architecture(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    layer_rules={
        "attn_norm": "norm.input",
        "ffn_norm": "norm.pre_mlp",
        "attn.wq_a": "mla.q_a",
        "attn.q_norm": "mla.q_a_norm",
        "attn.wq_b": "mla.q_b",
        "attn.wkv": "mla.kv_a",
        "attn.kv_norm": "mla.kv_a_norm",
        "attn.norm": "mla.kv_a_norm",  # so transformers saves it
        "attn.wo_a": "attn.o_a",
        "attn.wo_b": "attn.o",
        "attn.attn_sink": "attn.sinks",
        "attn.compressor.wkv": "compressor.kv",
        "attn.compressor.wgate": "compressor.gate",
        "attn.compressor.norm": "compressor.norm",
        "attn.compressor.ape": "compressor.position",
        "attn.indexer.wq_b": "indexer.q",
        "attn.indexer.weights_proj": "indexer.weights",
        "attn.indexer.compressor.wkv": "indexer.kv",
        "attn.indexer.compressor.wgate": "indexer.gate",
        "attn.indexer.compressor.norm": "indexer.k_norm",
        "attn.indexer.compressor.ape": "indexer.position",
        "ffn.gate": "router",
        "ffn.gate.bias": "router.correction",
        "ffn.gate.tid2eid": "router.table",
        "ffn.experts.*.w1": "expert.gate",
        "ffn.experts.*.w3": "expert.up",
        "ffn.experts.*.w2": "expert.down",
        "ffn.shared_experts.w1": "shared.gate",
        "ffn.shared_experts.w3": "shared.up",
        "ffn.shared_experts.w2": "shared.down",
        **{f"hc_attn_{name}": f"hyper.attn.{part}" for name, part in _HYPER.items()},
        **{f"hc_ffn_{name}": f"hyper.mlp.{part}" for name, part in _HYPER.items()},
        # transformers' modules
        "self_attn.q_a_norm": "mla.q_a_norm",
        "self_attn.kv_proj": "mla.kv_a",
        "self_attn.kv_norm": "mla.kv_a_norm",
        "self_attn.o_a_proj": "attn.o_a",
        "self_attn.o_b_proj": "attn.o",
        "self_attn.compressor.kv_proj": "compressor.kv",
        "self_attn.compressor.gate_proj": "compressor.gate",
        "self_attn.compressor.kv_norm": "compressor.norm",
        "self_attn.compressor.position_bias": "compressor.position",
        "self_attn.compressor.indexer.q_b_proj": "indexer.q",
        "self_attn.compressor.indexer.scorer.weights_proj": "indexer.weights",
        "self_attn.compressor.indexer.kv_proj": "indexer.kv",
        "self_attn.compressor.indexer.gate_proj": "indexer.gate",
        "self_attn.compressor.indexer.kv_norm": "indexer.k_norm",
        "self_attn.compressor.indexer.position_bias": "indexer.position",
        "mlp.gate.tid2eid": "router.table",
        **{f"attn_hc.{name}": f"hyper.attn.{part}" for name, part in _HYPER.items()},
        **{f"ffn_hc.{name}": f"hyper.mlp.{part}" for name, part in _HYPER.items()},
    },
    model_rules={
        "embed": "embed",
        "head": "lm_head",
        **{f"hc_head_{name}": f"hyper.head.{part}" for name, part in _HYPER.items()},
        **{f"hc_head.hc_{name}": f"hyper.head.{part}" for name, part in _HYPER.items()},
    },
    roles={role.name: role for role in _ROLES},
    optional={"attn.sinks": ALWAYS, "router.correction": ALWAYS},
    float32_parameters=(
        "router.correction",
        "attn.sinks",
        "compressor.position",
        "indexer.position",
        *(role.name for role in _ROLES if role.name.startswith("hyper.")),
    ),
    gate_is_linear_in_up=False,  # gate and up are clamped
    keys_are_values=True,
    layer_arguments=("input_ids",),
    notes="Layers of hash routing choose experts by token id, so every layer is called with the token ids.",
)
