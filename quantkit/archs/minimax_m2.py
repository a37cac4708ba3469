"""MiniMax-M2: Mixtral's expert names, sigmoid router with a float32 correction bias, full-width q/k norms."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS, When
from quantkit.archs.roles import FULL_WIDTH_QK_NORMS

ARCHITECTURE = Architecture(
    name="minimax_m2",
    model_types=("minimax_m2",),
    roles=FULL_WIDTH_QK_NORMS,  # config: qk_norm_type per_layer
    optional={
        "attn.q_norm": (When("use_qk_norm", default=True),),
        "attn.k_norm": (When("use_qk_norm", default=True),),
        "router.correction": ALWAYS,
    },
    dim_keys={"moe_intermediate": ("intermediate_size",), "intermediate": ()},
    notes="Every layer is a mixture; intermediate_size is the experts' width.",
)
