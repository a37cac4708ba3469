"""DeepSeek-V2/V3 and Kimi-K2: latent attention, group-limited router, shared experts, first layers dense."""

from quantkit.archs.base import Architecture

ARCHITECTURE = Architecture(
    name="deepseek_v3",
    model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
    layer_rules={
        # the multi-token-prediction layer, present only in layers beyond num_hidden_layers
        "eh_proj": "mtp",
        "enorm": "mtp",
        "hnorm": "mtp",
        "embed_tokens": "mtp",
        "shared_head.**": "mtp",
    },
)
