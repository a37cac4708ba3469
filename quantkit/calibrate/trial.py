"""The model as it is and as it will be, side by side on held-out text, one layer in memory at a time.

Every batch has one stream of hidden states for the float model and one for each variant; a variant's stream carries
its own error from layer to layer. Groups of GEMMs are also run alone: the layer gets the float stream, one group is
quantized, and what it adds to the output is that group's error. At the end the output head turns a subset of the
positions into distributions, whose divergence is what everything is judged by.

Peak memory: the layer twice, the batches that run side by side, and at the end the output head.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate import experts
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.data import Batch, Samples
from quantkit.calibrate.experts import is_fused_experts
from quantkit.calibrate.fake_quant import BF16, FakeQuantizer, Rounding, Schemes, narrow
from quantkit.calibrate.groups import Group
from quantkit.calibrate.passes import LayerRun, Pass, Streams
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.rounding import rounds_to_nearest
from quantkit.calibrate.scores import HeldOutScores, spaced
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import write_sealed
from quantkit.spec.decisions import HeldOut
from quantkit.spec.scheme import Scheme
from quantkit.spec.tensorfile import read_header, read_tensor
from quantkit.threads import one_thread_per_operation


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
        ends: of one batch at the last layer: hidden states of `scores.POSITIONS` tokens, one for each stream.
    """

    tokens: dict[int, int] = field(default_factory=dict)
    errors: dict[str, dict[int, float]] = field(default_factory=dict)
    agreed: dict[str, int] = field(default_factory=dict)
    choices: int = 0
    ends: list[Tensor] = field(default_factory=list)

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


class TrialPass(Pass):
    """Runs the float model and the variants beside one another.

    Args:
        plan: of the calibration; its held-out text is used.
        source: weights.
        name: of the records.
        variants: quantized models.
        alone: groups to run alone.
        rounded: layer -> how its weights are rounded.
    """

    title = "held-out text"

    def __init__(
        self,
        plan: Plan,
        source: Source,
        name: str,
        variants: Sequence[Variant],
        alone: Sequence[Alone] = (),
        *,
        rounded: Callable[[int], Rounding] = rounds_to_nearest,
    ) -> None:
        super().__init__(plan, source)
        self.name, self.streams = name, 1 + len(variants)
        self._variants, self._rounded = variants, rounded
        self._alone: dict[int, list[Alone]] = defaultdict(list)
        for each in alone:
            self._alone[each.group.layer].append(each)

    @property
    def samples(self) -> Samples:
        return self.plan.held_out

    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        return self._run(run, self._alone[run.index])

    def replay(self, run: LayerRun, record: Path) -> None:
        """What the streams hand on depends on the rounding, so it is done again."""
        self._run(run, ())

    def _run(self, run: LayerRun, alone: Sequence[Alone]) -> Callable[[Path], None]:
        roles = {role for variant in self._variants for role in variant.schemes(run.index) if role}
        roles |= {role for each in alone for role in each.group.roles}
        quantizer = FakeQuantizer(self.source.arch, run.prefix, self._rounded(run.index))
        total = LayerTrial()
        ends: dict[str, Tensor] = {}

        def work(index: int, inputs: Streams) -> tuple[Streams, LayerTrial]:
            return self._batch(run, index, inputs, alone, quantizer, routing)

        with (
            run.stream.materialized(run.index) as module,
            quantizer.attached(module, roles),
            _Routing().attached(module) as routing,
        ):
            for index, found in run.hand_on(work):
                total.add(found)
                ends |= {f"{index}/{stream}": hidden for stream, hidden in enumerate(found.ends)}
        return lambda path: _save(path, total, ends)

    def _batch(
        self,
        run: LayerRun,
        index: int,
        inputs: Streams,
        alone: Sequence[Alone],
        quantizer: FakeQuantizer,
        routing: _Routing,
    ) -> tuple[Streams, LayerTrial]:
        batch, layer = run.batches[index], run.index
        reference = run.stream.run_layer(layer, inputs[0])
        chosen = routing.take()
        found = LayerTrial({batch.kind: batch.ids.numel()}, choices=0 if chosen is None else chosen.numel())
        outputs = [reference]
        errors: dict[str, Tensor] = {}
        agreed: dict[str, Tensor] = {}
        for variant, entering in zip(self._variants, inputs[1:], strict=True):
            with quantizer.running(variant.schemes(layer)):
                output = run.stream.run_layer(layer, entering)
            if variant.schemes(layer) is BF16:
                output = replace(output, hidden=narrow(output.hidden))
            outputs.append(output)
            errors[variant.name] = relative_error(output.hidden, reference.hidden)
            other = routing.take()
            if chosen is not None and other is not None:
                agreed[variant.name] = agreement(chosen, other)
        for each in alone:
            for scheme in each.schemes:
                with quantizer.running(dict.fromkeys(each.group.roles, scheme)):
                    output = run.stream.run_layer(layer, inputs[0])
                errors[alone_name(each.group.name, scheme.name)] = relative_error(output.hidden, reference.hidden)
        found.errors = {name: {batch.kind: value} for name, value in _values(errors).items()}
        found.agreed = _values(agreed)
        if run.is_last:
            found.ends = [output.hidden[:, spaced(output.hidden.shape[1])].contiguous() for output in outputs]
        return outputs, found

    # ------------------------------------------------------------------------------------------------- results

    def results(self, records: Sequence[Path]) -> list[LayerTrial]:
        """Results of all layers."""
        return [_load(path) for path in records]

    def held_out(self, records: Sequence[Path]) -> HeldOut:
        """The output head on what left the last layer, and everything that was measured."""
        names = [variant.name for variant in self._variants]
        results, scores = self.results(records), HeldOutScores(self.samples)
        for batch, row, log_p, others in self._distributions(records[-1]):
            for name, log_q in zip(names, others, strict=True):
                scores.add(name, batch, row, log_p, log_q)
        return HeldOut(
            samples=len(self.samples.samples),
            tokens=self.samples.tokens,
            positions=scores.table(lambda score: score.positions)[names[0]],
            kl=scores.table(lambda score: score.mean),
            kl_error=scores.table(lambda score: score.error),
            kl_by_position=scores.by_position(),
            top1=scores.table(lambda score: score.same / score.positions),
            perplexity_source=scores.table(lambda score: score.perplexity_source)[names[0]],
            perplexity=scores.table(lambda score: score.perplexity),
            layer_error={name: tuple(layer.overall(name) for layer in results) for name in names},
            routing={
                name: {i: row.agreed[name] / row.choices for i, row in enumerate(results) if name in row.agreed}
                for name in names
            },
        )

    def _distributions(self, record: Path) -> Iterator[tuple[Batch, int, Tensor, list[Tensor]]]:
        """For each sample: its batch and row, log probabilities `[positions, V]` of the source and of the variants."""
        header, plan = read_header(record), self.plan
        stream = LayerStream(self.source, dtype=plan.dtype, device=plan.device, experts=experts.IMPLEMENTATION)
        with one_thread_per_operation(), record.open("rb") as file, stream.head():
            for index, batch in enumerate(plan.batches_of(self.samples)):
                infos = [header.tensors[f"{index}/{stream_}"] for stream_ in range(self.streams)]
                hidden = [read_tensor(file.fileno(), info, path=record).to(plan.device) for info in infos]
                for sample in range(len(hidden[0])):
                    log_p, *others = [
                        stream.logits(LayerInput(each[sample : sample + 1]))[0].float().log_softmax(-1)
                        for each in hidden
                    ]
                    yield batch, sample, log_p, others


def _values(figures: Mapping[str, Tensor]) -> dict[str, Any]:
    """Figures without dimensions as numbers, all of them at once: an accelerator is waited for only here."""
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True)) if figures else {}


def relative_error(hidden: Tensor, reference: Tensor) -> Tensor:
    """Sum over tokens of ||h - h'||^2 / ||h||^2, float64 without dimensions; `[batch, tokens, ...]`."""
    difference = (hidden.double() - reference.double()).flatten(2).square().sum(-1)
    return (difference / reference.double().flatten(2).square().sum(-1).clamp_min(1e-30)).sum()


def agreement(chosen: Tensor, other: Tensor) -> Tensor:
    """How many choices `[T, top_k]` of experts are made in `other` as well."""
    return (chosen.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).sum()


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


def _save(path: Path, found: LayerTrial, ends: Mapping[str, Tensor]) -> None:
    """Write a layer's result atomically."""
    values = {name: getattr(found, name) for name in ("tokens", "errors", "agreed", "choices")}
    write_sealed(path, ends, {"trial": json.dumps(values)})


def _load(path: Path) -> LayerTrial:
    """A layer's result; JSON has made strings of the kinds."""
    raw: dict[str, Any] = json.loads(read_header(path).metadata["trial"])
    errors = {name: {int(kind): value for kind, value in row.items()} for name, row in raw["errors"].items()}
    tokens = {int(kind): count for kind, count in raw["tokens"].items()}
    return LayerTrial(tokens, errors, raw["agreed"], raw["choices"])
