"""MiniMax-M2: Mixtral's expert names, sigmoid router with a float32 correction bias, full-width q/k norms."""

from quantkit.archs.base import Architecture
from quantkit.archs.roles import Kind, Role, Split

ARCHITECTURE = Architecture(
    name="minimax_m2",
    model_types=("minimax_m2",),
    roles={
        # q_norm runs over all heads at once (config: qk_norm_type per_layer), so it splits with them; its sum of
        # squares then needs an all-reduce under tensor parallelism
        "attn.q_norm": Role("attn.q_norm", Kind.NORM, split=Split.COL, unit="heads", column="norm"),
        "attn.k_norm": Role("attn.k_norm", Kind.NORM, split=Split.COL, unit="kv_heads", column="norm"),
    },
    dim_keys={"moe_intermediate": ("intermediate_size",), "intermediate": ()},
    notes="Every layer is a mixture; intermediate_size is the experts' width.",
)
