"""OLMoE: the usual names, with q/k norms over the full width."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS
from quantkit.archs.roles import FULL_WIDTH_QK_NORMS

ARCHITECTURE = Architecture(
    name="olmoe",
    model_types=("olmoe",),
    roles=FULL_WIDTH_QK_NORMS,
    optional={
        "attn.q_norm": ALWAYS,
        "attn.k_norm": ALWAYS,
    },
    notes="Every layer is a mixture; intermediate_size is the experts' width.",
)
