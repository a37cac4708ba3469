"""`quantkit calibrate`: plan, check everything, then layer by layer, then the artifact.

A layer's weights are read once. What a finished layer gave lies in one file of the work folder, so a killed run goes
on after the last finished layer: from the spooled hidden states where there are some, else by forward passes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.archs import Key
from quantkit.archs.modeling import load_config
from quantkit.calibrate import experts
from quantkit.calibrate.activations import MEMORY_BUDGET, ActivationStore
from quantkit.calibrate.artifact import write_artifact
from quantkit.calibrate.data import Batch, Samples, draw_samples, load_tokenizer
from quantkit.calibrate.methods import view_of
from quantkit.calibrate.observe import LayerObserver, missing_gemms
from quantkit.calibrate.state import GemmRecord, LayerRecord, finished_layers, gemm_name, layer_path, save_layer
from quantkit.calibrate.stream import LayerStream
from quantkit.calibrate.weights import GemmWeight, WeightRecorder, expected_gemms, not_finite, require_sound
from quantkit.checkpoint.reader import Source
from quantkit.console import Progress
from quantkit.errors import InputError, QuantkitError, UsageError
from quantkit.outdir import check_place, exclusive, prepare_output
from quantkit.recipe import Recipe
from quantkit.spec.calibration import ARTIFACT_NAMES, SUMMARY_NAME, CalibrationSummary, read_summary
from quantkit.spec.tensorfile import torch_dtype

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the first layer runs.

    Attributes:
        source: checkpoint.
        recipe: as resolved.
        samples: frozen list.
        gemms: GEMMs that must be observed.
        device: where layers run.
        dtype: of weights and activations there.
        memory_budget: bytes of hidden states kept in memory.
    """

    source: Source
    recipe: Recipe
    samples: Samples
    gemms: Mapping[Key, GemmWeight]
    device: torch.device
    dtype: torch.dtype
    memory_budget: int

    @cached_property
    def batches(self) -> list[Batch]:
        return self.samples.batches(self.recipe.calibration.batch_tokens)

    @property
    def hidden_bytes(self) -> int:
        """Size of the hidden states between two layers."""
        return self.samples.tokens * self.source.dims.hidden * self.dtype.itemsize

    @property
    def spools(self) -> bool:
        return self.hidden_bytes > self.memory_budget

    @cached_property
    def options(self) -> dict[str, Any]:
        """What decides the artifact's bytes; work done with other options is refused."""
        return {
            "command": "calibrate",
            "tool_version": __version__,
            "recipe": self.recipe.model_dump(mode="json"),
            "source_digest": self.source.digest(),
            "config_sha256": hashlib.sha256((self.source.root / "config.json").read_bytes()).hexdigest(),
            "samples_sha256": self.samples.digest,
            "compute": f"{self.dtype} on {self.device.type}".removeprefix("torch."),
        }

    def describe(self) -> dict[str, Any]:
        """Sizes for a dry run, bytes as integers."""
        layer, outside = _layer_bytes(self.source, self.dtype)
        return {
            "architecture": self.source.arch.name,
            "layers": self.source.dims.layers,
            "gemms": len(self.gemms),
            "samples": len(self.samples.samples),
            "kinds": list(self.samples.kinds),
            "tokens": self.samples.tokens,
            "batches": len(self.batches),
            "compute": self.options["compute"],
            "read_bytes": sum(entry.nbytes for entry in self.source.entries.values()),
            "memory_bytes": outside + 2 * layer + (0 if self.spools else self.hidden_bytes),
            "spool_bytes": 2 * self.hidden_bytes if self.spools else 0,
            "warnings": list(self.samples.warnings),
        }


def _layer_bytes(source: Source, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the largest decoder layer and of everything outside the layers, in the compute dtype."""
    sizes: dict[int | None, int] = {}
    for key, entry in source.entries.items():
        inside = key.layer is None or key.layer < source.dims.layers
        if inside and source.arch.role(key.role).kind != "opaque":
            width = max(dtype.itemsize, torch_dtype(entry.dtype).itemsize)
            sizes[key.layer] = sizes.get(key.layer, 0) + width * _numel(entry.shape)
    return max((size for layer, size in sizes.items() if layer is not None), default=0), sizes.get(None, 0)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def make_plan(root: Path, recipe: Recipe, *, device: str = "auto", memory_budget: int = MEMORY_BUDGET) -> Plan:
    """Check source, recipe, tokenizer, texts and device; nothing is written.

    Raises:
        InputError: the source or a text cannot be used.
        UsageError: the recipe or the device cannot.
    """
    stored = Source(root, extra_roles=recipe.roles)
    stored.require_classified()
    require_sound(stored)
    source = view_of(stored, recipe.methods, without_drafts=recipe.mtp == "drop")
    load_config(root)
    gemms = expected_gemms(source, recipe)
    place, dtype = _device(device)
    longest = source.dims.max_positions
    if 0 < longest < recipe.calibration.seq_len:
        raise UsageError(f"--seq-len {recipe.calibration.seq_len}: this model has {longest} positions", "choose less")
    samples = draw_samples(load_tokenizer(root), recipe.calibration)
    return Plan(source, recipe, samples, gemms, place, dtype, memory_budget)


def _device(name: str) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype: float32 on the CPU (bfloat16 is emulated on many), bfloat16 on an accelerator."""
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}", choices=DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA or HIP device is visible", "check the driver, or pass --device cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def calibrate(
    root: Path, out: Path, recipe: Recipe, *, device: str = "auto", memory_budget: int = MEMORY_BUDGET
) -> CalibrationSummary:
    """Calibrate the checkpoint `root` into the folder `out`; see `run_plan`."""
    check_place(out, root)
    return run_plan(make_plan(root, recipe, device=device, memory_budget=memory_budget), out).summary


@dataclass(frozen=True)
class Result:
    """The artifact's summary; `already`: the folder held it before, nothing was done."""

    summary: CalibrationSummary
    already: bool


def run_plan(plan: Plan, out: Path) -> Result:
    """Run a plan to its end, or continue it, or read the result of a finished one.

    Raises:
        UsageError: `out` is not usable, or holds the work of other options.
        InputError: something is not finite, or a GEMM was not observed; all of them are named.
    """
    folder = prepare_output(
        out, plan.options, sources=[plan.source.root], final=SUMMARY_NAME, command="quantkit calibrate"
    )
    with exclusive(folder):
        if not folder.finished:
            _Run(plan, folder.work).layers()
            write_artifact(out, folder.work, plan.source, plan.recipe, plan.samples)
        _check_complete(out)
        folder.clear_work()
    return Result(read_summary(out), folder.finished)


def _check_complete(out: Path) -> None:
    """All four files are there, also when they were written by an earlier run."""
    lost = [name for name in ARTIFACT_NAMES if not (out / name).is_file()]
    if lost:
        raise UsageError(
            f"files of the finished calibration {out} were removed", "calibrate into a new folder", items=lost
        )


class _Run:
    """The layers of one plan, from wherever the work folder says."""

    def __init__(self, plan: Plan, work: Path) -> None:
        self._plan, self._work = plan, work
        shapes = [(batch.ids.shape[0], batch.ids.shape[1]) for batch in plan.batches]
        self._store = ActivationStore(work, shapes, spool=plan.spools, device=plan.device)

    def layers(self) -> None:
        total = self._plan.source.dims.layers
        finished = finished_layers(self._work, total)
        if finished == total:
            return
        experts.register()
        start = self._store.last_boundary(finished)
        stream = LayerStream(
            self._plan.source, dtype=self._plan.dtype, device=self._plan.device, experts=experts.IMPLEMENTATION
        )
        _check_outside(stream)
        try:
            with Progress("calibrate", (total - start) * self._plan.samples.tokens, "tokens") as progress:
                for layer in range(start, total):
                    progress.describe(f"layer {layer + 1} of {total}")
                    self._layer(stream, layer, progress, observe=layer >= finished)
        finally:
            self._store.close()

    def _layer(self, stream: LayerStream, layer: int, progress: Progress, *, observe: bool) -> None:
        plan = self._plan
        weights = WeightRecorder(plan.source, plan.gemms)
        prefix = f"{stream.prefix}.{layer}"
        kinds = len(plan.samples.kinds)
        observer = LayerObserver(plan.source.arch, plan.source.dims, layer, prefix, kinds=kinds, device=plan.device)
        self._store.start(layer)
        with stream.materialized(layer, weights.get if observe else None) as module:
            if observe:
                with observer.attached(module):
                    self._batches(stream, layer, progress, observer)
            else:
                self._batches(stream, layer, progress, None)
        if layer + 1 < len(stream):
            self._store.commit(layer + 1)
        if observe:
            save_layer(layer_path(self._work, layer), self._record(layer, observer, weights))
        self._store.forget(layer)

    def _batches(self, stream: LayerStream, layer: int, progress: Progress, observer: LayerObserver | None) -> None:
        for index, batch in enumerate(self._plan.batches):
            if observer is not None:
                observer.begin(batch)
            hidden = self._store.get(index) if layer else None
            output = stream.run_layer(layer, batch.ids, hidden)
            if layer + 1 < len(stream):
                self._store.put(layer + 1, index, output)
            else:
                _check_output(output, batch)
            progress.advance(batch.ids.numel())

    def _record(self, layer: int, observer: LayerObserver, weights: WeightRecorder) -> LayerRecord:
        plan = self._plan
        expected = [key for key in plan.gemms if key.layer == layer]
        missing = missing_gemms(expected, observer, plan.source.dims.experts_per_token)
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


def _check_outside(stream: LayerStream) -> None:
    """Embeddings, norm and head are finite."""
    for name, parameter in stream.model.named_parameters():
        if parameter.device.type != "meta" and not bool(torch.isfinite(parameter).all()):
            raise not_finite(name)


def _check_output(hidden: Tensor, batch: Batch) -> None:
    finite = torch.isfinite(hidden).flatten(2).all(-1).flatten()
    if not bool(finite.all()):
        token = int((~finite).nonzero()[0])
        raise QuantkitError(
            f"the output of the last layer is not finite on {batch.describe(token)}",
            "leave that sample out, or check the weights with `quantkit inspect`",
        )
