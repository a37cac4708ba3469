"""`quantkit calibrate`: plan, check everything, then layer by layer, then the artifact.

A layer's weights are read once, and batches run through it side by side: results do not depend on how many at a time
(`parallel.py`). What a finished layer gave lies in one file of the work folder, so a killed run goes
on after the last finished layer: from the spooled hidden states where there are some, else by forward passes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
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
from quantkit.calibrate.activations import MEMORY_BUDGET, ActivationStore, LayerInput
from quantkit.calibrate.artifact import write_artifact
from quantkit.calibrate.data import Batch, Samples, draw_samples, load_tokenizer
from quantkit.calibrate.measure import BatchMeasurement
from quantkit.calibrate.methods import view_of
from quantkit.calibrate.observe import LayerObserver, missing_gemms
from quantkit.calibrate.parallel import in_order
from quantkit.calibrate.state import GemmRecord, LayerRecord, finished_layers, gemm_name, layer_path, save_layer
from quantkit.calibrate.stream import LayerStream
from quantkit.calibrate.weights import GemmWeight, WeightRecorder, expected_gemms, require_sound
from quantkit.checkpoint.reader import Source
from quantkit.console import Progress
from quantkit.errors import InputError, QuantkitError, UsageError
from quantkit.outdir import check_place, exclusive, prepare_output
from quantkit.recipe import Recipe
from quantkit.spec.calibration import ARTIFACT_NAMES, SUMMARY_NAME, CalibrationSummary, read_summary
from quantkit.spec.tensorfile import torch_dtype
from quantkit.threads import available_cores, one_thread_per_operation

DEVICES = ("auto", "cpu", "cuda")

BATCH_BYTES = 128 * 2**20
"""Bytes for the activations of a batch inside a layer, or 1/32 of the layer if that is more."""

MAX_JOBS = 32
"""Batches at a time by default: their activations take no more than the layer, or 4 GiB."""


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
        """Batches of at most the recipe's `batch_tokens`, of fewer where their activations would be too large."""
        budget = max(BATCH_BYTES, _layer_bytes(self.source, self.dtype)[0] // 32)
        return self.samples.batches(min(self.recipe.calibration.batch_tokens, budget // self._token_bytes))

    @property
    def hidden_bytes(self) -> int:
        """Size of what is handed from one layer to the next.

        Carried states count as much as hidden states; GLM-5's 2,048 indices of 8 bytes are two thirds of that.
        """
        states = 1 + len(self.source.arch.carried_state)
        return self.samples.tokens * self.source.dims.hidden * self.dtype.itemsize * states

    @property
    def _token_bytes(self) -> int:
        """Estimate of one token's activations inside a layer, attention scores left out."""
        dims = self.source.dims
        routed = dims.experts_per_token * (2 * dims.hidden + 3 * dims.moe_intermediate)
        width = 8 * dims.hidden + max(4 * dims.intermediate, routed + 3 * dims.shared_intermediate)
        return width * self.dtype.itemsize

    @property
    def batch_bytes(self) -> int:
        """Estimate of the activations of the largest batch inside a layer."""
        return max(batch.ids.numel() for batch in self.batches) * self._token_bytes

    @property
    def default_jobs(self) -> int:
        """Batches at a time: one for each core; one on an accelerator."""
        return min(available_cores(), len(self.batches), MAX_JOBS) if self.device.type == "cpu" else 1

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
        jobs = self.default_jobs
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
            "jobs": jobs,
            "memory_bytes": max(outside, layer + jobs * self.batch_bytes) + (0 if self.spools else self.hidden_bytes),
            "spool_bytes": 2 * self.hidden_bytes if self.spools else 0,
            "warnings": list(self.samples.warnings),
        }


def _layer_bytes(source: Source, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the largest decoder layer and of the embedding table, in the compute dtype."""
    sizes: dict[int | None, int] = {}
    for key, entry in source.entries.items():
        inside = key.role == "embed" if key.layer is None else key.layer < source.dims.layers
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
    root: Path, out: Path, recipe: Recipe, *, device: str = "auto", memory_budget: int = MEMORY_BUDGET, jobs: int = 0
) -> CalibrationSummary:
    """Calibrate the checkpoint `root` into the folder `out`; see `run_plan`."""
    check_place(out, root)
    return run_plan(make_plan(root, recipe, device=device, memory_budget=memory_budget), out, jobs).summary


@dataclass(frozen=True)
class Result:
    """The artifact's summary; `already`: the folder held it before, nothing was done."""

    summary: CalibrationSummary
    already: bool


def run_plan(plan: Plan, out: Path, jobs: int = 0) -> Result:
    """Run a plan to its end, or continue it, or read the result of a finished one.

    Args:
        jobs: batches at a time, which changes no byte of the result; 0 means `Plan.default_jobs`.

    Raises:
        UsageError: `out` is not usable, or holds the work of other options.
        InputError: something is not finite, or a GEMM was not observed; all of them are named.
    """
    folder = prepare_output(
        out, plan.options, sources=[plan.source.root], final=SUMMARY_NAME, command="quantkit calibrate"
    )
    with exclusive(folder):
        if not folder.finished:
            _Run(plan, folder.work, jobs or plan.default_jobs).layers()
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

    def __init__(self, plan: Plan, work: Path, jobs: int) -> None:
        self._plan, self._work, self._jobs = plan, work, jobs
        self._store = ActivationStore(work, len(plan.batches), spool=plan.spools, device=plan.device)

    def layers(self) -> None:
        total = self._plan.source.dims.layers
        finished = finished_layers(self._work, total)
        if finished == total:
            return
        experts.register()
        start = self._store.last_boundary(finished)
        tokens = (total - start) * self._plan.samples.tokens
        with one_thread_per_operation(), closing(self._store), Progress("calibrate", tokens, "tokens") as progress:
            stream = LayerStream(
                self._plan.source, dtype=self._plan.dtype, device=self._plan.device, experts=experts.IMPLEMENTATION
            )
            stream.check_outside()
            if start == 0:
                self._embed(stream)
            with ThreadPoolExecutor(self._jobs, thread_name_prefix="batch") as pool:
                for layer in range(start, total):
                    progress.describe(f"layer {layer + 1} of {total}")
                    self._layer(stream, layer, pool, progress, observe=layer >= finished)

    def _embed(self, stream: LayerStream) -> None:
        """What enters layer 0."""
        with stream.embeddings(torch.cat([batch.ids.flatten() for batch in self._plan.batches])):
            for index, batch in enumerate(self._plan.batches):
                self._store.put(0, index, stream.embed(batch.ids))
        self._store.commit(0)

    def _layer(self, stream: LayerStream, layer: int, pool: Executor, progress: Progress, *, observe: bool) -> None:
        plan = self._plan
        weights = WeightRecorder(plan.source, plan.gemms)
        prefix = f"{stream.prefix}.{layer}"
        kinds = len(plan.samples.kinds)
        observer = LayerObserver(plan.source.arch, plan.source.dims, layer, prefix, kinds=kinds, device=plan.device)
        self._store.start(layer)
        with stream.materialized(layer, weights.get if observe else None) as module:
            if observe:
                with observer.attached(module):
                    self._batches(stream, layer, pool, progress, observer)
            else:
                self._batches(stream, layer, pool, progress, None)
        if layer + 1 < len(stream):
            self._store.commit(layer + 1)
        if observe:
            save_layer(layer_path(self._work, layer), self._record(layer, observer, weights))
        self._store.forget(layer)

    def _batches(
        self, stream: LayerStream, layer: int, pool: Executor, progress: Progress, observer: LayerObserver | None
    ) -> None:
        batches = self._plan.batches

        def work(index: int) -> tuple[LayerInput, BatchMeasurement | None]:
            value = self._store.get(index)
            if observer is None:
                return stream.run_layer(layer, value), None
            with observer.measuring(batches[index]) as measured:
                return stream.run_layer(layer, value), measured

        with closing(in_order(pool, work, len(batches), ahead=2 * self._jobs)) as results:
            for index, (output, measured) in enumerate(results):
                if observer is not None and measured is not None:
                    observer.merge(measured)
                if layer + 1 < len(stream):
                    self._store.put(layer + 1, index, output)
                else:
                    _check_output(output.hidden, batches[index])
                progress.advance(batches[index].ids.numel())

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


def _check_output(hidden: Tensor, batch: Batch) -> None:
    finite = torch.isfinite(hidden).flatten(2).all(-1).flatten()
    if not bool(finite.all()):
        token = int((~finite).nonzero()[0])
        raise QuantkitError(
            f"the output of the last layer is not finite on {batch.describe(token)}",
            "leave that sample out, or check the weights with `quantkit inspect`",
        )
