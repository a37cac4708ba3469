"""The model as it is and as it will be, side by side on held-out text, one layer in memory at a time.

Every batch has one stream of hidden states for the float model and one for each variant; a variant's stream carries
its own error from layer to layer. Groups of GEMMs are also run alone: the layer gets the float stream, one group is
quantized, and what it adds to the output is that group's error. At the end the output head turns a subset of the
positions into distributions, whose divergence is what everything is judged by.

What enters a layer is spooled (it is little text), so that a killed run goes on after its last finished layer. Peak
memory: the layer twice, the batches that run side by side, and at the end the output head.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.activations import ActivationStore, LayerInput
from quantkit.calibrate.data import Batch
from quantkit.calibrate.experts import is_fused_experts
from quantkit.calibrate.fake_quant import FakeQuantizer, Rounded, Schemes, round_to_nearest
from quantkit.calibrate.groups import Group
from quantkit.calibrate.parallel import in_order
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.writer import write_atomic
from quantkit.spec.decisions import HeldOut
from quantkit.spec.scheme import Scheme

POSITIONS = 64
"""Positions of a sample whose predictions are compared, evenly spaced."""


@dataclass(frozen=True)
class Variant:
    """A quantized model.

    Attributes:
        name: in results.
        schemes: layer -> schemes of its roles.
    """

    name: str
    schemes: Callable[[int], Schemes]


@dataclass(frozen=True)
class Alone:
    """A group that is quantized alone, under each of `schemes`."""

    group: Group
    schemes: tuple[Scheme, ...]


@dataclass
class LayerTrial:
    """Results of one layer; sums over tokens by kind of text.

    Attributes:
        tokens: kind -> tokens.
        errors: name -> kind -> sum of relative squared errors of what leaves the layer; names are those of variants,
            and `GROUP SCHEME`.
        agreed: variant -> choices of experts that equal the source's.
        choices: the source's choices.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    errors: dict[str, dict[int, float]] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)
    choices: int = 0

    def add(self, other: LayerTrial) -> None:
        """Add the next batch, in the order of the batches."""
        for kind, count in other.tokens.items():
            self.tokens[kind] = self.tokens.get(kind, 0) + count
        for name, by_kind in other.errors.items():
            mine = self.errors.setdefault(name, {})
            for kind, value in by_kind.items():
                mine[kind] = mine.get(kind, 0.0) + value
        for name, agreed in other.agreed.items():
            self.agreed[name] = self.agreed.get(name, 0) + agreed
        self.choices += other.choices

    def mean_error(self, name: str, kind: int) -> float:
        return self.errors[name][kind] / self.tokens[kind]

    def overall(self, name: str) -> float:
        return sum(self.errors[name].values()) / sum(self.tokens.values())


def alone_name(group: str, scheme: str) -> str:
    return f"{group} {scheme}"


class Trial:
    """One trial of a model.

    Args:
        folder: for spooled streams and results of layers.
        batches: held-out text.
        kinds: names of its kinds; `Batch.kind` counts these.
        variants: quantized models.
        alone: groups to run alone.
        rounded: layer -> how its weights are rounded.
        device: where activations are.
    """

    def __init__(
        self,
        folder: Path,
        batches: Sequence[Batch],
        kinds: Sequence[str],
        variants: Sequence[Variant],
        alone: Sequence[Alone] = (),
        *,
        device: torch.device,
        rounded: Callable[[int], Rounded] = lambda _layer: round_to_nearest,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._batches, self._kinds, self._rounded = folder, batches, kinds, rounded
        self._variants, self._streams = variants, 1 + len(variants)
        self._alone: dict[int, list[Alone]] = defaultdict(list)
        for each in alone:
            self._alone[each.group.layer].append(each)
        self._store = ActivationStore(folder, len(batches) * self._streams, spool=True, device=device)

    @property
    def ids(self) -> list[Tensor]:
        """Token ids of all batches, flat."""
        return [batch.ids.flatten() for batch in self._batches]

    @property
    def tokens(self) -> int:
        return sum(batch.ids.numel() for batch in self._batches)

    def close(self) -> None:
        self._store.close()

    # ------------------------------------------------------------------------------------------------- streams

    def embed(self, stream: LayerStream) -> None:
        """What enters layer 0, inside `LayerStream.embeddings`; all streams begin alike."""
        for index, batch in enumerate(self._batches):
            value = stream.embed(batch.ids)
            for slot in range(self._streams):
                self._store.put(0, index * self._streams + slot, value)
        self._store.commit(0)

    def layer(self, stream: LayerStream, layer: int, module: nn.Module, pool: Executor, jobs: int) -> None:
        """Run one materialized layer; its result is on disk afterwards, and what enters the next one."""
        self._store.start(layer)
        total = LayerTrial()
        roles = {role for variant in self._variants for role in variant.schemes(layer)}
        roles |= {role for each in self._alone[layer] for role in each.group.roles}
        quantizer = FakeQuantizer(stream.source.arch, f"{stream.prefix}.{layer}", self._rounded(layer))

        def work(index: int) -> tuple[list[LayerInput], LayerTrial]:
            return self._batch(stream, layer, index, quantizer, routing)

        with quantizer.attached(module, roles), _Routing().attached(module) as routing:
            with closing(in_order(pool, work, len(self._batches), ahead=jobs)) as results:
                for index, (outputs, found) in enumerate(results):
                    total.add(found)
                    for slot, output in enumerate(outputs):
                        self._store.put(layer + 1, index * self._streams + slot, output)
        self._store.commit(layer + 1)
        write_atomic(self._path(layer), [json.dumps(vars(total), sort_keys=True).encode()])

    def forget(self, layer: int) -> None:
        """What entered a layer is needed no more."""
        self._store.forget(layer)

    def _batch(
        self, stream: LayerStream, layer: int, index: int, quantizer: FakeQuantizer, routing: _Routing
    ) -> tuple[list[LayerInput], LayerTrial]:
        batch, first = self._batches[index], index * self._streams
        entering = self._store.get(first)
        reference = stream.run_layer(layer, entering)
        chosen = routing.take()
        found = LayerTrial({batch.kind: batch.ids.numel()}, choices=0 if chosen is None else chosen.numel())
        outputs = [reference]
        for slot, variant in enumerate(self._variants, 1):
            with quantizer.running(variant.schemes(layer)):
                outputs.append(stream.run_layer(layer, self._store.get(first + slot)))
            found.errors[variant.name] = {batch.kind: relative_error(outputs[-1].hidden, reference.hidden)}
            other = routing.take()
            if chosen is not None and other is not None:
                found.agreed[variant.name] = agreement(chosen, other)
        for each in self._alone[layer]:
            for scheme in each.schemes:
                with quantizer.running(dict.fromkeys(each.group.roles, scheme)):
                    output = stream.run_layer(layer, entering)
                error = relative_error(output.hidden, reference.hidden)
                found.errors[alone_name(each.group.name, scheme.name)] = {batch.kind: error}
        return outputs, found

    def _path(self, layer: int) -> Path:
        return self._folder / f"trial-{layer:05d}.json"

    def results(self, layers: int) -> list[LayerTrial]:
        """Results of all layers."""
        return [_from_json(json.loads(self._path(layer).read_bytes())) for layer in range(layers)]

    # --------------------------------------------------------------------------------------------------- logits

    def finish(self, stream: LayerStream) -> HeldOut:
        """The output head on what left the last layer, and everything that was measured."""
        names = [variant.name for variant in self._variants]
        scores = {(name, batch.kind): Scores() for batch in self._batches for name in names}
        self._store.start(len(stream))
        with stream.head():
            for index, batch in enumerate(self._batches):
                for log_p, others in self._distributions(stream, index):
                    for name, log_q in zip(names, others, strict=True):
                        scores[name, batch.kind].add(log_p, log_q)

        def table(value: Callable[[Scores], float]) -> dict[str, dict[str, float]]:
            found: dict[str, dict[str, float]] = {name: {} for name in names}
            for (name, kind), score in scores.items():
                found[name][self._kinds[kind]] = value(score)
            return found

        results = self.results(len(stream))
        return HeldOut(
            samples=sum(len(batch.ids) for batch in self._batches),
            tokens=self.tokens,
            positions={self._kinds[kind]: row.positions for (name, kind), row in scores.items() if name == names[0]},
            kl=table(lambda score: score.mean),
            kl_error=table(lambda score: score.error),
            top1=table(lambda score: score.same / score.positions),
            layer_error={name: tuple(layer.overall(name) for layer in results) for name in names},
            routing={
                name: {i: row.agreed[name] / row.choices for i, row in enumerate(results) if name in row.agreed}
                for name in names
            },
        )

    def _distributions(self, stream: LayerStream, index: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """For each sample of a batch: log probabilities `[positions, V]` of the source, and of the variants."""
        streams = [self._store.get(index * self._streams + slot).hidden for slot in range(self._streams)]
        tokens = streams[0].shape[1]
        where = torch.linspace(0, tokens - 1, min(POSITIONS, tokens), device=streams[0].device).round().long()
        for sample in range(len(streams[0])):
            log_p, *others = [
                stream.head_logits(LayerInput(hidden[sample : sample + 1, where]))[0].float().log_softmax(-1)
                for hidden in streams
            ]
            yield log_p, others


@dataclass
class Scores:
    """Divergence of a variant on one kind of text.

    Attributes:
        samples: mean KL divergence of each sample.
        same: positions with the same likeliest token.
        positions: all of them.
    """

    samples: list[float] = field(default_factory=list)
    same: int = 0
    positions: int = 0

    def add(self, log_p: Tensor, log_q: Tensor) -> None:
        """Log probabilities `[positions, V]` of one sample."""
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).double()
        self.samples.append(float(divergence.mean()))
        self.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        self.positions += len(log_p)

    @property
    def mean(self) -> float:
        return math.fsum(self.samples) / len(self.samples)

    @property
    def error(self) -> float:
        """Standard error of the mean over samples."""
        count = len(self.samples)
        square = math.fsum((value - self.mean) ** 2 for value in self.samples)
        return math.sqrt(square / (count - 1) / count) if count > 1 else 0.0


def relative_error(hidden: Tensor, reference: Tensor) -> float:
    """Sum over tokens of ||h - h'||^2 / ||h||^2; `[batch, tokens, ...]`."""
    difference = (hidden.double() - reference.double()).flatten(2).square().sum(-1)
    return float((difference / reference.double().flatten(2).square().sum(-1).clamp_min(1e-30)).sum())


def agreement(chosen: Tensor, other: Tensor) -> int:
    """How many choices `[T, top_k]` of experts are made in `other` as well."""
    return int((chosen.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).sum())


class _Routing:
    """Experts that a layer's router chose in the last pass of this thread."""

    def __init__(self) -> None:
        self._last = threading.local()

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[_Routing]:
        handles = [
            module.register_forward_pre_hook(self._keep, with_kwargs=True)
            for module in layer.modules()
            if is_fused_experts(module)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        index = next(value for value in tensors if not value.is_floating_point())
        self._last.chosen = index.reshape(-1, index.shape[-1])

    def take(self) -> Tensor | None:
        """`[T, top_k]` of the pass that just ended, None where the layer has no router."""
        chosen: Tensor | None = getattr(self._last, "chosen", None)
        self._last.chosen = None
        return chosen


def _from_json(raw: dict[str, Any]) -> LayerTrial:
    """A layer's result; JSON has made strings of the kinds."""
    errors = {name: {int(kind): value for kind, value in row.items()} for name, row in raw["errors"].items()}
    tokens = {int(kind): count for kind, count in raw["tokens"].items()}
    return LayerTrial(tokens, errors, raw["agreed"], raw["choices"])
