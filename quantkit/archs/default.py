"""The default record: common Hugging Face names and nothing else (Llama, Mistral, Phi-3, Qwen, Mixtral, Qwen-MoE)."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import When

_QK_NORMS = (When(types=("qwen3", "qwen3_moe")),)
_QKV_BIAS = (When("attention_bias"), When("qkv_bias", default=True, types=("qwen2", "qwen2_moe")))

ARCHITECTURE = Architecture(
    name="default",
    optional={
        "attn.q_norm": _QK_NORMS,
        "attn.k_norm": _QK_NORMS,
        **{f"attn.{part}:bias": _QKV_BIAS for part in "qkv"},
        "shared.router": (When(types=("qwen2_moe",)),),
    },
)
