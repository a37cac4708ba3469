"""MiniMax-M3: the text model inside a vision-language checkpoint; sparse attention by blocks, (1 + w) norms."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS
from quantkit.archs.roles import Kind, Residual, Role, Split

ARCHITECTURE = Architecture(
    name="minimax_m3",
    model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
    layer_rules={
        # on disk, and below it transformers' module
        "self_attn.index_q_proj": "indexer.q",
        "self_attn.index_k_proj": "indexer.k",
        "self_attn.index_q_norm": "indexer.q_norm",
        "self_attn.index_k_norm": "indexer.k_norm",
        "self_attn.indexer.q_proj": "indexer.q",
        "self_attn.indexer.k_proj": "indexer.k",
        "self_attn.indexer.q_norm": "indexer.q_norm",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "block_sparse_moe.shared_experts.gate_proj": "shared.gate",
        "block_sparse_moe.shared_experts.up_proj": "shared.up",
        "block_sparse_moe.shared_experts.down_proj": "shared.down",
    },
    opaque_prefixes={"patch_merge_mlp": "vision"},
    roles={
        # the indexer reads the layer's input (there is no query latent) and selects blocks for each kv head, so its
        # query heads go with the kv heads; its one key is shared by all
        "indexer.q": Role(
            "indexer.q",
            Kind.LINEAR,
            split=Split.COL,
            unit="index_heads",
            input="attn.in",
            fed_by="norm.input",
            column="attention",
            residual=Residual.IN,
        ),
    },
    optional={
        "attn.q_norm": ALWAYS,
        "attn.k_norm": ALWAYS,
        "indexer.q_norm": ALWAYS,
        "router.correction": ALWAYS,
    },
    dim_keys={
        "intermediate": ("dense_intermediate_size",),
        "moe_intermediate": ("intermediate_size",),
        "index_heads": ("index_n_heads", "sparse_attention_config.sparse_num_index_heads"),
        "index_head_dim": ("index_head_dim", "sparse_attention_config.sparse_index_dim"),
    },
    shared_width="shared_intermediate_size",
    norm_offset=1.0,
    gate_is_linear_in_up=False,  # (up + 1), after clamps
    notes="intermediate_size is the experts' width; published configs keep the indexer's sizes in a nested object.",
)
