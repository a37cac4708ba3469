"""What a calibration will do, known and checked before anything runs: source, text, GEMMs, device, sizes."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.archs import Key
from quantkit.archs.modeling import load_config, load_tokenizer, require_embedded
from quantkit.calibrate.activations import MEMORY_BUDGET
from quantkit.calibrate.data import Batch, Samples, draw
from quantkit.calibrate.methods import method, view_of
from quantkit.calibrate.round_weights import MOMENTS_BYTES
from quantkit.calibrate.rows import input_name
from quantkit.calibrate.statistics import STATS_BYTES
from quantkit.calibrate.weights import GemmWeight, expected_gemms, gemm_keys, require_sound
from quantkit.checkpoint.effects import matrix_shape
from quantkit.checkpoint.reader import Source
from quantkit.errors import UsageError
from quantkit.recipe import GROUPED, Recipe
from quantkit.spec.files import is_file
from quantkit.spec.scheme import SCHEMES, Scheme
from quantkit.spec.tensorfile import torch_dtype
from quantkit.spec.transform import VECTORS_NAME, MethodOptions
from quantkit.threads import available_cores

DEVICES = ("auto", "cpu", "cuda")

BATCH_BYTES = 128 * 2**20
"""Bytes for the activations of a batch inside a layer, or 1/32 of the layer if that is more."""

ACCELERATOR_BATCH_BYTES = 1 << 30
"""The same on an accelerator, which pays for each operation."""

ACCELERATOR_MEMORY_BUDGET = 4 << 30
"""Bytes of hidden states that stay in an accelerator's memory, at least: going through a disk means waiting for it."""

FLOAT32_LAYER = 2 << 30
"""Bytes of a layer in float32 up to which an accelerator computes in float32 too, some ten times slower. In BF16 a
layer's own rounding is as large as the errors that methods and decisions are to tell apart, and what methods see of
weights would have to be read a second time."""

MAX_JOBS = 32
"""Batches at a time by default: their activations take no more than the layer, or 4 GiB."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the first layer runs.

    Attributes:
        stored: checkpoint as it is.
        source: as the recipe's methods transform it; what methods find in text is missing in it until it was found.
        recipe: as resolved.
        samples: frozen list.
        held_out: text that no statistic sees.
        gemms: GEMMs that must be observed.
        device: where layers run.
        dtype: of weights and activations there.
        memory_budget: bytes of hidden states kept in memory.
        places: what methods count, for a dry run.
    """

    stored: Source
    source: Source
    recipe: Recipe
    samples: Samples
    held_out: Samples
    gemms: Mapping[Key, GemmWeight]
    device: torch.device
    dtype: torch.dtype
    memory_budget: int
    places: Mapping[str, int]

    def view(self, methods: int, artifact: Path) -> Source:
        """The checkpoint after the first `methods` methods, with what was found for them in text so far."""
        found = artifact if is_file(artifact / VECTORS_NAME) else None
        chosen = self.recipe.methods[:methods]
        without_drafts = self.recipe.mtp == "drop"
        return view_of(
            self.stored,
            chosen,
            artifact=found,
            without_drafts=without_drafts,
            planning=True,
            threads=available_cores(),
            device=str(self.device),
        )

    def schemes_of(self, layer: int) -> dict[Key, tuple[Scheme, ...]]:
        """GEMMs of a layer that the recipe converts -> its scheme, and what `auto_group` may make of it.

        Decisions differ between the forms of output, so they are left out here.
        """
        found = {}
        for key, gemm in self.gemms.items():
            if key.layer == layer and gemm.quantized:
                first = self.recipe.scheme_for(self.source.arch, key, gemm.disk_name)
                found[key] = tuple(dict.fromkeys([first, *([SCHEMES[GROUPED]] if self.recipe.auto_group else [])]))
        return found

    @cached_property
    def batches(self) -> list[Batch]:
        """Batches of at most the recipe's `batch_tokens`, of fewer where their activations would be too large."""
        return self.batches_of(self.samples)

    def batches_of(self, samples: Samples) -> list[Batch]:
        """Batches of other samples than the plan's, of the same sizes."""
        least = BATCH_BYTES if self.device.type == "cpu" else ACCELERATOR_BATCH_BYTES
        budget = max(least, layer_bytes(self.source, self.dtype)[0] // 32)
        return samples.batches(min(self.recipe.calibration.batch_tokens, budget // self._token_bytes))

    @property
    def hidden_bytes(self) -> int:
        """Size of what is handed from one layer to the next."""
        return self._hidden_bytes(self.samples.tokens)

    def _hidden_bytes(self, tokens: int) -> int:
        """Carried states count as much as hidden states; GLM-5's 2,048 indices of 8 bytes are two thirds of that."""
        states = 1 + len(self.source.arch.carried_state)
        return tokens * self.source.dims.stream_width * self.dtype.itemsize * states

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
        return self.spools_with(self.samples.tokens)

    def spools_with(self, tokens: int, streams: int = 1) -> bool:
        """Whether the hidden states of so many tokens and streams go to disk."""
        return streams * self._hidden_bytes(tokens) > self.memory_budget

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
            "held_out_sha256": self.held_out.digest,
            "compute": f"{self.dtype} on {self.device.type}".removeprefix("torch."),
        }

    @property
    def memory_bytes(self) -> int:
        """Estimate of the peak: a layer, its batches, and what the pass that needs most has beside them."""
        layer, outside = layer_bytes(self.source, self.dtype)
        trial = layer // self.dtype.itemsize if self.held_out.samples else 0  # the codes of its weights
        beside = max([trial, *map(self._search_bytes, self.recipe.methods)])
        peak = max(outside, layer + self.default_jobs * self.batch_bytes + beside)
        return peak + (0 if self.spools else self.hidden_bytes)

    def _search_bytes(self, options: MethodOptions) -> int:
        """Sampled rows of a layer, twice while they are joined, and for as many inputs as jobs their second moments,
        and what is computed of their GEMMs' weights and outputs."""
        row = method(options.name)
        if row.learns is None:
            return 0
        rows = min(row.learns.rows(options), self.samples.tokens)
        sampled = max(sum(k * times for k, times in layer) for layer in self._inputs)
        widest = max(k for layer in self._inputs for k, _ in layer)
        moments = self.default_jobs * MOMENTS_BYTES * widest**2 if row.rounds else 0
        each = row.learns.weight_bytes, row.learns.output_bytes * rows
        here = [sorted((n * (each[0] * k + each[1]) for k, n in layer), reverse=True) for layer in self._gemm_sizes]
        at_once = max(sum(layer[: self.default_jobs]) for layer in here)
        return 2 * rows * sampled * self.dtype.itemsize + moments + at_once

    @cached_property
    def _inputs(self) -> list[list[tuple[int, int]]]:
        """Layer -> what enters its GEMMs: channels, and how many experts a token goes to there."""
        arch, dims = self.source.arch, self.source.dims
        layers: defaultdict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
        for stored in self.source.entries:
            if stored.layer is not None and (keys := gemm_keys(arch, dims, stored)):
                fed_by = arch.role(keys[0].role).fed_by
                times = dims.experts_per_token if fed_by and arch.role(fed_by).per_expert else 1
                layers[stored.layer][input_name(arch, keys[0])] = matrix_shape(self.source, stored)[-1], times
        return [list(inputs.values()) for inputs in layers.values()]

    @cached_property
    def _gemm_sizes(self) -> list[list[tuple[int, int]]]:
        """Layer -> GEMMs that read the same rows, expert by expert: their inputs, and outputs together."""
        arch, dims = self.source.arch, self.source.dims
        layers: defaultdict[int, dict[tuple[str, int | None], tuple[int, int]]] = defaultdict(dict)
        for stored in self.source.entries:
            if stored.layer is not None and (keys := gemm_keys(arch, dims, stored)):
                n, k = matrix_shape(self.source, stored)
                for expert in dict.fromkeys(key.expert for key in keys):
                    place = input_name(arch, keys[0]), expert
                    layers[stored.layer][place] = k, layers[stored.layer].get(place, (k, 0))[1] + n
        return [list(sizes.values()) for sizes in layers.values()]

    @property
    def artifact_bytes(self) -> int:
        """Size of the artifact, nearly: scales, statistics, and the codes of a method that rounds."""
        arch, dims, kinds = self.source.arch, self.source.dims, len(self.samples.kinds)
        rounds = any(method(options.name).rounds for options in self.recipe.methods)
        total = 0
        for stored in self.source.entries:
            keys = [key for key in gemm_keys(arch, dims, stored) if key in self.gemms]
            if any(self.gemms[key].quantized for key in keys):
                shape = self.source.canonical_shape(stored)
                rows = math.prod(shape[:-1])
                total += 4 * rows + (rows * (shape[-1] + 4) if rounds else 0)
        for layer in self._gemm_sizes:
            total += sum(4 * k + STATS_BYTES for k, _ in layer)
        return total + sum(4 * k * kinds for layer in self._inputs for k, _ in layer)

    def describe(self) -> dict[str, Any]:
        """Sizes for a dry run, bytes as integers."""
        return {
            "architecture": self.source.arch.name,
            "layers": self.source.dims.layers,
            "gemms": len(self.gemms),
            **self.places,
            "samples": len(self.samples.samples),
            "kinds": list(self.samples.kinds),
            "tokens": self.samples.tokens,
            "held_out_tokens": self.held_out.tokens,
            "batches": len(self.batches),
            "compute": self.options["compute"],
            "read_bytes": sum(entry.nbytes for entry in self.source.entries.values()),
            "jobs": self.default_jobs,
            "memory_bytes": self.memory_bytes,
            "artifact_bytes": self.artifact_bytes,
            "spool_bytes": 2 * self.hidden_bytes if self.spools else 0,
            "warnings": list(self.samples.warnings),
        }


def layer_bytes(source: Source, dtype: torch.dtype) -> tuple[int, int]:
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
    source = view_of(stored, recipe.methods, without_drafts=recipe.mtp == "drop", planning=True)
    load_config(root)
    gemms = expected_gemms(source, recipe)
    place, dtype = choose_device(device)
    if layer_bytes(source, torch.float32)[0] <= FLOAT32_LAYER:
        dtype = torch.float32
    if place.type != "cpu":
        memory_budget = max(memory_budget, ACCELERATOR_MEMORY_BUDGET)
    longest = source.dims.max_positions
    if 0 < longest < recipe.calibration.seq_len:
        raise UsageError(f"--seq-len {recipe.calibration.seq_len}: this model has {longest} positions", "choose less")
    if recipe.kv_cache and (source.dims.is_mla or source.arch.keys_are_values):
        raise UsageError(
            f"{recipe.name}: this family caches latents, or one tensor as both, not keys and values by head; "
            "engines scale those otherwise",
            "leave kv_cache out of the recipe",
        )
    places = _places(source, recipe, gemms)
    samples, held_out = draw(load_tokenizer(root), recipe.calibration)
    for sample in (*samples.samples, *held_out.samples):
        require_embedded((int(sample.ids.max()),), source.dims.vocab)
    if recipe.decides and not held_out.samples:
        raise UsageError(
            "auto_group and auto_keep decide on held-out text, and there is none",
            "give more text, and calibration.held_out more than 0",
        )
    return Plan(stored, source, recipe, samples, held_out, gemms, place, dtype, memory_budget, places)


def _places(source: Source, recipe: Recipe, gemms: Mapping[Key, GemmWeight]) -> dict[str, int]:
    """What the methods that learn from text count, and refuse where they have nothing to do."""
    found: dict[str, int] = {}
    for options in recipe.methods:
        if learns := method(options.name).learns:
            found |= learns.places(source, [key for key, gemm in gemms.items() if gemm.quantized])
    return found


def choose_device(name: str) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for large models: float32 on the CPU (bfloat16 is emulated on many), else bfloat16."""
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}", choices=DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA or HIP device is visible", "check the driver, or pass --device cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32
