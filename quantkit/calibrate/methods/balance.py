"""`balance`: even out the inputs of the down projections from the weights alone.

The input of a down projection is f(gate) * up, whose channel j grows with the row norms of both. Dividing row j of up
by s_j and multiplying column j of down by it, with s_j = (|up_j| |gate_j|)^exponent over their geometric mean and the
norm's weight counted in, brings the channels closer together. It costs nothing and needs no text.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate.methods.base import Built, Method, MethodOptions
from quantkit.checkpoint.effects import matrix
from quantkit.checkpoint.reader import Source
from quantkit.spec.transform import RESIDUAL_NORMS, ScalePair

_SET = "balance"
_GATES = {"mlp.up": "mlp.gate", "shared.up": "shared.gate", "expert.up": "expert.gate"}


class BalanceOptions(MethodOptions):
    """Options of `balance`.

    Attributes:
        exponent: strength, 0 does nothing.
    """

    name: Literal["balance"] = "balance"
    exponent: Annotated[float, Field(ge=0, le=1)] = 0.5


def build(source: Source, options: BalanceOptions, _artifact: Path | None) -> Built:
    present = {key.role for key in source.entries}
    producers = [
        up
        for up in _GATES
        if up in present or source.arch.role(up).fuse in present  # stored apart or fused
    ]
    steps = tuple(ScalePair(producer=up, vectors=_SET) for up in producers)

    @lru_cache(maxsize=1024)
    def vector(key: Key) -> Tensor:
        return balance_vector(source, key, options.exponent)

    return Built(steps, lambda name, key: vector(key) if name == _SET and key.role in producers else None)


def balance_vector(source: Source, up: Key, exponent: float) -> Tensor:
    """s of one feed-forward, float32 `[width]`, of geometric mean 1.

    Rounded to bf16: any positive s is exact, and the order of summation in the norms must not show.
    """
    norm = source.arch.role(up.role).fed_by
    offset = source.arch.norm_offset if norm in RESIDUAL_NORMS else 0.0
    own = Key(up.layer, norm)
    weight_K = source.fetch(own).double() + offset if source.has(own) else None
    logs = torch.zeros((), dtype=torch.float64)
    for key in (up, up._replace(role=_GATES[up.role])):
        w_NK = matrix(source, key).double()
        norms_N = torch.linalg.vector_norm(w_NK if weight_K is None else w_NK * weight_K, dim=1)
        logs = logs + norms_N.clamp_min(torch.finfo(torch.float32).tiny).log()
    scale = ((logs - logs.mean()) * exponent).exp()
    return scale.clamp(2**-10, 2**10).bfloat16().float()


METHOD = Method(BalanceOptions, build)
