"""The pass of a method that learns from text: a sample of rows of every GEMM input, layer by layer.

What the method finds of a layer, vectors or codes, is the layer's record; see `Search` in `methods/base.py`.
Peak memory: the layer, the sampled rows of its inputs, and the method's temporaries for each of the jobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.data import Samples
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.methods.base import Found, LayerView, Learns, MethodOptions
from quantkit.calibrate.observe import LayerObserver
from quantkit.calibrate.passes import LayerRun, Pass
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.rounding import layer_codes
from quantkit.calibrate.rows import BatchRows, Rows, joined, spread
from quantkit.calibrate.weights import WeightRecorder
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import write_sealed
from quantkit.spec.calibration import MethodRow
from quantkit.spec.tensorfile import read_header


class SearchPass(Pass):
    """Shows rows of a layer's inputs to one method.

    Args:
        plan: of the calibration.
        source: weights as the methods before left them.
        options: the recipe's entry.
        learns: what the method does with a layer.
        codes: artifact in which a method before has left how it rounded the weights.
    """

    def __init__(
        self, plan: Plan, source: Source, options: MethodOptions, learns: Learns, codes: Path | None = None
    ) -> None:
        super().__init__(plan, source)
        self.name = self.title = options.name
        self._options, self._learns, self._codes = options, learns, codes

    @cached_property
    def _samples(self) -> Samples:
        return self.plan.samples.thinned(self._learns.tokens(self._options))

    @property
    def samples(self) -> Samples:
        return self._samples

    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        source, plan = self.source, self.plan
        observer = LayerObserver(source.arch, source.dims, run.index, run.prefix, kinds=1, device=plan.device)
        wanted = self._learns.rows(self._options)

        def work(index: int, inputs: list[LayerInput]) -> tuple[list[LayerInput], dict[str, Rows]]:
            tokens = run.batches[index].ids.numel()
            rows = BatchRows(source.arch, spread(tokens, wanted, self.samples.tokens, plan.device), tokens)
            with observer.collecting(rows):
                return [run.stream.run_layer(run.index, inputs[0])], rows.rows

        weights = WeightRecorder(source, plan.gemms)
        with run.stream.materialized(run.index, weights.get) as module:
            with observer.attached(module):
                parts = [rows for _, rows in run.hand_on(work)]
            view = LayerView(
                run.index,
                source,
                LayerWeights(source.arch, source.dims, run.prefix, module),
                joined(parts),
                self.plan.schemes_of(run.index),
                layer_codes(self._codes, run.index) if self._codes else {},
                run.map,
            )
            with torch.inference_mode():
                found = self._learns.layer(view, self._options)
        return lambda path: save_found(path, found)

    def finish(self, records: Sequence[Path], out: Path) -> None:
        self._learns.finish(records, out)


def save_found(path: Path, found: Found) -> None:
    """Write what a method found of a layer, atomically."""
    notes = json.dumps([row.model_dump() for row in found.rows])
    write_sealed(path, dict(sorted(found.tensors.items())), {"rows": notes})


def rows_found(path: Path) -> list[MethodRow]:
    """What a method reports of a layer."""
    return [MethodRow(**row) for row in json.loads(read_header(path).metadata["rows"])]
