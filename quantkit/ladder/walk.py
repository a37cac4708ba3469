"""One rung's walk over the layers: the model with its arithmetic, whole, on all of the text.

What a rung keeps is in the compute dtype; transformed tensors outside the layers are not rounded to the source's dtype,
as they will be in a checkpoint.

Peak memory: one layer in the compute dtype, and its rounded weights beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from quantkit.archs.structure import layers_of
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.fake_quant import FakeQuantizer, RoundedTokens, Rounding, round_tokens
from quantkit.calibrate.passes import LayerRun, Pass
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.rounding import rounds_to_nearest
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import write_sealed
from quantkit.errors import UsageError
from quantkit.ladder.arithmetic import Arithmetic
from quantkit.ladder.cache import RoundingCache, rounding_attention
from quantkit.ladder.rungs import Rung
from quantkit.spec.scheme import Scheme, group_size_for

FP8_GROUP = 128
"""Inputs that share a scale in DeepSeek-V3's FP8 activations (arXiv 2412.19437, section 3.3.2)."""


def round_tokens_fp8(x: Tensor, _scheme: Scheme) -> Tensor:
    """Activations `[..., K]` in E4M3 with a float32 scale per token and group: the largest magnitude becomes 448."""
    grouped = x.float().unflatten(-1, (-1, group_size_for(x.shape[-1], FP8_GROUP)))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (grouped.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    rounded: Tensor = (grouped / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(x.dtype)


def as_stored(_name: str, w_NK: Tensor) -> Tensor:
    return w_NK


def left_alone(x: Tensor, _scheme: Scheme) -> Tensor:
    return x


_ACTIVATIONS: Mapping[str, RoundedTokens] = {"recipe": round_tokens, "float": left_alone, "fp8": round_tokens_fp8}


class RungPass(Pass):
    """The model of one rung, or the source itself (`rung` None); keeps what leaves the last layer.

    The records of the last layer hold `BATCH` -> hidden states `[batch, tokens, H]` in the compute dtype.
    """

    def __init__(self, plan: Plan, source: Source, rung: Rung | None, arithmetic: Arithmetic | None) -> None:
        super().__init__(plan, source)
        self.rung = rung or Rung(name="source", change="nothing")
        self.name = f"rung-{rung.name}" if rung else "source"
        self.title = rung.name if rung else "source"
        self._schemes = arithmetic.schemes(source) if arithmetic else {}
        self._rounded = arithmetic.rounded(source) if arithmetic else rounds_to_nearest

    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        ends: dict[str, Tensor] = {}
        with ExitStack() as stack:
            layer = stack.enter_context(run.stream.materialized(run.index))
            schemes = self._schemes.get(run.index, {})
            rung = self.rung
            rounding = Rounding(as_stored) if rung.weights == "stored" else self._rounded(run.index)
            if rung.activations != "recipe":  # biases are corrected for what really runs
                rounding = Rounding(rounding.weights)
            quantizer = FakeQuantizer(self.source.arch, run.prefix, rounding, _ACTIVATIONS[rung.activations])
            stack.enter_context(quantizer.attached(layer, schemes))
            if "int8" in (rung.keys, rung.values):
                latent = self.source.dims.kv_lora_rank
                cache = RoundingCache(keys=rung.keys == "int8", values=rung.values == "int8", latent=latent)
                self._require_attention(run.index, stack.enter_context(rounding_attention(layer, cache)))

            def work(_index: int, inputs: list[LayerInput]) -> tuple[list[LayerInput], Tensor | None]:
                with quantizer.running(schemes):
                    output = run.stream.run_layer(run.index, inputs[0])
                return [output], output.hidden if run.is_last else None

            for index, hidden in run.hand_on(work):
                if hidden is not None:
                    ends[f"{index}"] = hidden.cpu()

        def save(path: Path) -> None:
            write_sealed(path, ends)

        return save

    def replay(self, run: LayerRun, record: Path) -> None:
        """What a layer hands on depends on its rounding, so it is done again."""
        self.visit(run)

    def _require_attention(self, layer: int, modules: int) -> None:
        """Rounding that reaches no attention would be a rung that claims what it does not do."""
        source = self.source
        kind = layers_of(source.arch, source.dims, source.config)[layer].attention
        if kind != "linear" and not modules:
            raise UsageError(
                f"{self.title}: the attention of layer {layer} does not ask a cache for its keys and values",
                "leave out the rungs with `keys` or `values` for this model (--rung NAME)",
            )
