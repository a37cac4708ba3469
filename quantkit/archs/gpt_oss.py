"""gpt-oss: stacked experts with biases, transposed and with gate and up interleaved; attention sinks."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS

ARCHITECTURE = Architecture(
    name="gpt_oss",
    model_types=("gpt_oss",),
    layer_rules={"mlp.router": "router"},
    optional={
        "attn.sinks": ALWAYS,
        "router:bias": ALWAYS,
        **{f"expert.{part}:bias": ALWAYS for part in ("gate", "up", "down")},
    },
    window_pattern=2,
    experts_transposed=True,
    gate_up_interleaved=True,
    gate_is_linear_in_up=False,  # (up + 1), after clamps
    notes="Every layer is a mixture; intermediate_size is the experts' width.",
)
