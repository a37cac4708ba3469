"""What a candidate answers and does on a baseline's inputs: distributions, routing, each layer by itself.

A layer is judged by itself: it gets exactly what entered the source's layer, so an error of a layer before it cannot
hide or fake one here. That takes one forward: a hook before every layer puts the source's hidden states in the place of
the candidate's own. A second, undisturbed forward shows how errors add up.

Weights whose residual stream was rotated (`manifest.transforms`) get rotated hidden states; their operators and weights
have other values by design and are not compared. Neither are corrected biases; the outputs that they are part of are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Architecture
from quantkit.archs.modeling import decoder_layers
from quantkit.compare.distributions import Kept, at_same_tokens, keep
from quantkit.compare.fingerprint import weight_fingerprints
from quantkit.compare.taps import LayerTaps, Record, run_each_expert
from quantkit.errors import InputError
from quantkit.rotation import Rotation
from quantkit.spec.baseline import Baseline, read_layer
from quantkit.spec.baseline import Sequence as Tokens
from quantkit.spec.transform import CorrectBias, RotateResidual, Step

Layers = Sequence[Mapping[str, Tensor]]
"""Tensors of each layer's file."""


@dataclass(frozen=True)
class Answer:
    """The candidate's distributions at the scored positions of one sequence.

    Attributes:
        kept: log-probabilities of the source's likeliest tokens.
        first: int64 `[P]`, its own likeliest token.
        margin: nats between its two likeliest tokens.
    """

    kept: Kept
    first: Tensor
    margin: Tensor


@dataclass(frozen=True)
class LayerSeen:
    """One layer of the candidate.

    Attributes:
        output: `[T, H]` on the source's input; `own_output` on its own.
        probe: operators and routing on the source's input.
        own_routing: int64 `[all tokens of the texts, k]`.
        long: operators on the long text.
        weights: fingerprints; empty when they are not comparable.
        experts: `[E, R, WIDTH]` of every expert on the source's rows.
    """

    output: Tensor
    own_output: Tensor
    probe: Record
    own_routing: Tensor | None = None
    long: Record | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None


@dataclass(frozen=True)
class Subject:
    """A candidate that is ready to run.

    Attributes:
        model: transformers' causal language model, INT8 modules or not.
        arch: the family's record.
        device: of its inputs.
        dtype: that it computes in where it does not in INT8.
        transforms: changes of its weights before they were rounded, from the manifest.
    """

    model: nn.Module
    arch: Architecture
    device: torch.device
    dtype: torch.dtype
    transforms: tuple[Step, ...] = ()

    @property
    def transformed(self) -> bool:
        """Whether its weights have other values by design."""
        return any(not isinstance(step, CorrectBias) for step in self.transforms)

    @property
    def corrected(self) -> bool:
        """Whether biases make up for what rounding does."""
        return any(isinstance(step, CorrectBias) for step in self.transforms)

    def basis(self, hidden: Tensor) -> Tensor:
        """The source's hidden states in the candidate's basis."""
        for step in self.transforms:
            if isinstance(step, RotateResidual):
                hidden = Rotation(hidden.shape[-1], step.seed)(hidden.double()).float()
        return hidden


def read_layers(folder: Path, baseline: Baseline) -> Layers:
    """All layers of a baseline."""
    return [read_layer(folder, baseline, layer) for layer in range(baseline.layers)]


class Measurement:
    """Runs a candidate on a baseline's inputs.

    Args:
        subject: the candidate.
        baseline: what the source was.
        rows: its `logprobs.safetensors`.
        layers: its layers.
        advance: told the tokens of every sequence that was run.
    """

    def __init__(
        self, subject: Subject, baseline: Baseline, rows: Kept, layers: Layers, advance: Callable[[int], None]
    ) -> None:
        self._subject, self._baseline, self._rows, self._source, self._advance = (
            subject,
            baseline,
            rows,
            layers,
            advance,
        )
        self._prefix, self._layers = decoder_layers(subject.arch, subject.model)
        self._taps = [
            LayerTaps(subject.arch, f"{self._prefix}.{index}", layer) for index, layer in enumerate(self._layers)
        ]

    # ---------------------------------------------------------------------------------------------- the answers

    def answers(self) -> tuple[dict[str, Answer], list[Tensor | None], list[Record]]:
        """Answers by sequence; chosen experts on the texts, by layer; records of the long text, by layer."""
        answers: dict[str, Answer] = {}
        routing: list[list[Tensor]] = [[] for _ in self._layers]
        long: list[Record] = []
        spans = self._baseline.rows()
        for sequence in self._baseline.sequences:
            records = [Record.of(sequence) for _ in self._layers]
            with self._recording(records) if sequence.use in ("text", "long") else nullcontext():
                logits = self._forward(sequence, sequence.scored)
            answers[sequence.name] = _answer(logits, self._rows.rows(*spans[sequence.name]), sequence)
            if sequence.use == "text":
                for found, record in zip(routing, records, strict=True):
                    found += [] if record.routing is None else [record.routing]
            elif sequence.use == "long":
                long = records
            self._advance(len(sequence.ids))
        return answers, [torch.cat(found) if found else None for found in routing], long

    @contextmanager
    def _recording(self, records: Sequence[Record]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, taps, record in zip(self._layers, self._taps, records, strict=True):
                stack.enter_context(taps.attached())
                stack.enter_context(taps.recording(record))
                if record.positions is not None:
                    stack.callback(layer.register_forward_hook(_keep_output(record)).remove)
            yield

    def _forward(self, sequence: Tokens, positions: Sequence[int]) -> Tensor:
        """Log-probabilities float32 `[P, V]` on the host."""
        ids = torch.tensor([sequence.ids], device=self._subject.device)
        places = torch.tensor(positions, dtype=torch.int64, device=self._subject.device)
        with torch.inference_mode():
            logits = self._subject.model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
        found: Tensor = logits.float().log_softmax(-1).cpu()
        return found

    # ----------------------------------------------------------------------------------------------- the layers

    def layers(
        self, routing: Sequence[Tensor | None], long: Sequence[Record]
    ) -> tuple[list[LayerSeen], Tensor, Answer]:
        """Every layer, what the embeddings gave (in the place of layer 0's input), and the head's answer on the probe.

        Args:
            routing, long: from `answers`.
        """
        (probe,) = self._baseline.of_use("probe")
        own, _ = self._probe_forward(probe, None)
        records = [Record.of(probe) for _ in self._layers]
        with self._recording(records):
            outputs, embedded = self._probe_forward(probe, self._source)
        head = _answer(self._head_logits(probe), self._rows.rows(*self._baseline.rows()[probe.name]), probe)
        seen = []
        for index, layer in enumerate(self._layers):
            seen.append(
                LayerSeen(
                    output=outputs[index],
                    own_output=own[index],
                    probe=records[index],
                    own_routing=routing[index],
                    long=long[index] if long else None,
                    weights=self._weights(index, layer),
                    experts=self._experts(index),
                )
            )
        return seen, embedded, head

    def _probe_forward(self, probe: Tokens, forced: Layers | None) -> tuple[list[Tensor], Tensor]:
        """Outputs of the layers on their own inputs, or on the source's; and what the first layer was given."""
        outputs: list[Tensor] = []
        embedded: list[Tensor] = []
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                if forced is not None:
                    hook = self._put(forced[index], embedded)
                    stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)
                stack.callback(layer.register_forward_hook(_take(outputs)).remove)
            self._forward(probe, [0])
        return outputs, embedded[0] if embedded else torch.empty(0)

    def _put(self, source: Mapping[str, Tensor], embedded: list[Tensor]) -> Any:
        """A hook that gives a layer what entered the source's, and keeps what the first one would have been given."""
        subject = self._subject
        hidden = subject.basis(source["input"])[None].to(subject.device, subject.dtype)
        carried = {name.removeprefix("input."): value for name, value in source.items() if name.startswith("input.")}

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = args[0] if args else kwargs["hidden_states"]
            if not embedded:
                embedded.append(own[0].float().cpu())
            named = {**kwargs, **_fitting(carried, kwargs, subject.device)}
            if args:
                return (hidden, *args[1:]), named
            return args, {**named, "hidden_states": hidden}

        return hook

    def _head_logits(self, probe: Tokens) -> Tensor:
        """Log-probabilities on the probe, the final norm given what the source's last layer returned."""
        hidden = self._subject.basis(self._source[-1]["output"])[None].to(self._subject.device, self._subject.dtype)
        name = next(
            name.rpartition(".")[0]
            for name, _ in self._subject.model.named_parameters()
            if (key := self._subject.arch.parse(name)) is not None and key.role == "norm.final"
        )
        norm = self._subject.model.get_submodule(name)
        handle = norm.register_forward_pre_hook(lambda _module, args: (hidden, *args[1:]))
        try:
            return self._forward(probe, probe.scored)
        finally:
            handle.remove()

    def _weights(self, index: int, layer: nn.Module) -> dict[str, Tensor]:
        if self._subject.transformed:
            return {}
        return weight_fingerprints(self._subject.arch, f"{self._prefix}.{index}", layer)

    def outside(self) -> dict[str, Tensor]:
        """Fingerprints of the weights outside the layers."""
        if self._subject.transformed:
            return {}
        return weight_fingerprints(self._subject.arch, "", self._subject.model, without=f"{self._prefix}.")

    def _experts(self, index: int) -> Tensor | None:
        rows, module = self._source[index].get("experts.input"), self._taps[index].experts_module
        if rows is None or module is None or self._subject.transformed:
            return None
        with torch.inference_mode():
            return run_each_expert(module, rows.to(self._subject.device, self._subject.dtype))


def _fitting(carried: Mapping[str, Tensor], arguments: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """What the source's layer was handed on, in the place of what this one is.

    Raises:
        InputError: it is handed on something else.
    """
    odd = [name for name, value in carried.items() if getattr(arguments.get(name), "shape", None) != value.shape]
    if odd:
        raise InputError(
            f"the baseline hands on to a layer what the candidate's layers do not take: {', '.join(odd)}",
            "compare a candidate with a baseline of its own source",
        )
    return {name: value.to(device) for name, value in carried.items()}


def _take(outputs: list[Tensor]) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden[0].float().cpu())

    return hook


def _keep_output(record: Record) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        assert record.positions is not None
        record.output = hidden[0][record.positions.to(hidden.device)].float().cpu()

    return hook


def _answer(logprobs: Tensor, source: Kept, sequence: Tokens) -> Answer:
    ids = torch.tensor(sequence.ids)
    following = ids[torch.tensor(sequence.scored, dtype=torch.int64) + 1]
    own = keep(logprobs, following, 2)
    return Answer(at_same_tokens(logprobs, source, following), own.top_ids[:, 0].long(), own.margin)
