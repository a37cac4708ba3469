"""Gemma 2 and 3: norms on both sides of attention and feed-forward, each multiplying by (1 + weight)."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS, When
from quantkit.archs.rules import SANDWICH_NORM_RULES

ARCHITECTURE = Architecture(
    name="gemma",
    model_types=("gemma2", "gemma3", "gemma3_text"),
    layer_rules=SANDWICH_NORM_RULES,
    optional={
        "norm.post_attn": ALWAYS,
        "norm.post_mlp": ALWAYS,
        "attn.q_norm": (When(types=("gemma3", "gemma3_text")),),
        "attn.k_norm": (When(types=("gemma3", "gemma3_text")),),
    },
    window_pattern=2,  # Gemma 2; configs of Gemma 3 give their own
    norm_offset=1.0,
    tied_by_default=True,
    notes="Published configs leave tie_word_embeddings out and mean true.",
)
