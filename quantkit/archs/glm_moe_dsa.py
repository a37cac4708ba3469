"""GLM-5: DeepSeek-V3.2's latent attention and indexer, but a layer may reuse the selection of the one before."""

from dataclasses import replace

from quantkit.archs.deepseek_v3 import ARCHITECTURE as DEEPSEEK
from quantkit.archs.optional import MTP_COPIES, NEVER

ARCHITECTURE = replace(
    DEEPSEEK,
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    class_of={},
    opaque_prefixes={},
    optional={**DEEPSEEK.optional, MTP_COPIES: NEVER},  # the draft layer uses the model's own tables
    carried_state={"prev_topk_indices": 1},
    notes="Layers whose indexer_types entry is `shared` have no indexer and read the previous layer's selection.",
)
