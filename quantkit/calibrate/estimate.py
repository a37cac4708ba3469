"""How long a calibration will take, from one layer and one batch: reading, and running."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from quantkit.calibrate import experts
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.methods import method
from quantkit.calibrate.plan import Plan, layer_bytes
from quantkit.calibrate.stream import LayerStream
from quantkit.host import free_bytes
from quantkit.memory import human_bytes
from quantkit.threads import one_thread_per_operation

STATISTICS = 1.15
"""A forward that measures takes this many times one that does not."""

_ROUNDING = 2.0
"""Layers' worth of reading that rounding a layer's weights takes beside reading them."""

_TOKENS = 512
"""Of the batch that is tried."""


def why_untried(plan: Plan) -> str:
    """Why no layer can be tried here; "" if one can."""
    if plan.source.arch.carried_state or plan.source.arch.layer_arguments:
        return "its layers cannot run alone"
    layer, free = layer_bytes(plan.source, plan.dtype)[0], free_bytes(plan.device)
    if layer > free:
        return f"a layer takes {human_bytes(layer)} in {plan.options['compute']}, and {human_bytes(free)} are free"
    return ""


def estimated_seconds(plan: Plan) -> float | None:
    """Seconds of the whole calibration, from a trial of the middle layer; None where that cannot be: `why_untried`.

    Batches that run side by side are counted as if they did not disturb one another. Of methods that learn from text
    their passes are counted, and not what they search in between.
    """
    if why_untried(plan):
        return None
    with one_thread_per_operation():
        stream = LayerStream(plan.source, dtype=plan.dtype, device=plan.device, experts=_implementation())
        start = time.monotonic()
        with stream.materialized(len(stream) // 2):
            read = time.monotonic() - start
            tokens = min(_TOKENS, plan.recipe.calibration.seq_len)
            hidden = torch.randn(1, tokens, plan.source.dims.hidden, generator=torch.Generator().manual_seed(0))
            start = time.monotonic()
            stream.run_layer(len(stream) // 2, LayerInput(hidden.to(plan.device, plan.dtype)))
            each = (time.monotonic() - start) / tokens
    run = each / plan.default_jobs
    statistics = read + STATISTICS * run * plan.samples.tokens
    methods = sum(read + run * tokens for tokens in _learned_tokens(plan))
    streams = 3 if plan.dtype == torch.float32 else 2  # the source, what will be written, the source in BF16
    check = read * (1 + _ROUNDING) + streams * run * plan.held_out.tokens if plan.held_out.samples else 0.0
    decide = read * (1 + _ROUNDING) + _decision_passes(plan) * run * plan.held_out.tokens if plan.recipe.decides else 0
    return len(stream) * (statistics + methods + check + decide)


def _learned_tokens(plan: Plan) -> Iterator[int]:
    """Tokens of the pass of each method that learns from text."""
    for options in plan.recipe.methods:
        if learns := method(options.name).learns:
            yield plan.samples.thinned(learns.tokens(options)).tokens


def _decision_passes(plan: Plan) -> int:
    """How often a batch passes through a layer while decisions are taken: streams, and groups under each scheme."""
    from quantkit.calibrate.decisions import to_run_alone
    from quantkit.calibrate.groups import groups_of

    alone = to_run_alone(plan.recipe, groups_of(plan.source, plan.recipe))
    return 3 + sum(len(each.schemes) for each in alone) // max(1, plan.source.dims.layers)


def _implementation() -> str:
    experts.register()
    return experts.IMPLEMENTATION
