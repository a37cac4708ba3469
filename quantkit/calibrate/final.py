"""The last pass: statistics of what enters every GEMM, and scales of the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate import kv
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.measure import BatchMeasurement
from quantkit.calibrate.observe import LayerObserver, missing_gemms
from quantkit.calibrate.passes import LayerRun, Pass
from quantkit.calibrate.state import LAYER_NAME, GemmRecord, LayerRecord, gemm_name, save_layer
from quantkit.calibrate.weights import WeightRecorder
from quantkit.errors import InputError

SAMPLE_ROWS = 512
"""Rows of a layer that go through experts that starve."""


class StatisticsPass(Pass):
    """Observes the float model on all of the text."""

    name, title = LAYER_NAME, "calibrate"

    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        plan = self.plan
        weights = WeightRecorder(self.source, plan.gemms)
        kinds = len(plan.samples.kinds)
        options = plan.recipe.calibration
        feeds = options.starving_experts == "all_tokens"
        observer = LayerObserver(
            self.source.arch,
            self.source.dims,
            run.index,
            run.prefix,
            kinds=kinds,
            device=plan.device,
            sample_rows=-(-SAMPLE_ROWS // len(run.batches)) if feeds else 0,
        )

        def work(
            index: int, inputs: list[LayerInput]
        ) -> tuple[list[LayerInput], tuple[BatchMeasurement, kv.KvMoments | None]]:
            with observer.measuring(run.batches[index]) as measured:
                outputs = [run.stream.run_layer(run.index, inputs[0])]
            return outputs, (measured, kv.take())

        caches = kv.observed(run.stream.model) if plan.recipe.kv_cache else nullcontext()
        moments: kv.KvMoments | None = None
        with caches, run.stream.materialized(run.index, weights.get) as module, observer.attached(module):
            for _, (measured, cached) in run.hand_on(work):
                observer.merge(measured)
                moments = moments.merge(cached) if moments and cached else moments or cached
            with torch.inference_mode():
                observer.feed_starving(module, options.min_tokens_per_expert)

        def save(path: Path) -> None:
            cache = None if moments is None else kv.require_finite(moments, run.index).summary(run.index)
            save_layer(path, replace(self._record(run.index, observer, weights), cache=cache))

        return save

    def _record(self, layer: int, observer: LayerObserver, weights: WeightRecorder) -> LayerRecord:
        plan = self.plan
        expected = [key for key in plan.gemms if key.layer == layer]
        missing = missing_gemms(expected, observer, self.source.dims.experts_per_token)
        if missing:
            raise InputError(
                f"{len(missing)} of {len(expected)} GEMMs of layer {layer} were not observed: transformers' module "
                "does not run them as nn.Linear or through its experts interface",
                "scales without statistics would be silent; add the family to quantkit/archs, or report this model",
                items=[gemm_name(key) for key in missing],
            )
        gemms = tuple(
            GemmRecord(
                gemm_name(key),
                key.role,
                key.expert,
                weights.shapes[key],
                plan.gemms[key].quantized,
                observer.rows[key],
                observer.input_of[key],
            )
            for key in expected
        )
        scales: dict[str, Tensor] = {gemm_name(key): weights.scales[key] for key in expected if key in weights.scales}
        return LayerRecord(gemms, dict(sorted(observer.inputs.items())), scales)
