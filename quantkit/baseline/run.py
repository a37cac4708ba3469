"""`quantkit baseline`: every input through the source model, layer by layer; prompts again for each new token.

The first pass records what layers do: a file for each layer, in its final form, so a killed run goes on after the last
sound one. Every later pass appends one token to each prompt and reads all weights again, unless all layers fit in
memory: no keys and values are kept, since reading the weights takes far longer than computing some hundred positions
anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.baseline.finish import write_baseline
from quantkit.baseline.plan import Plan
from quantkit.calibrate.activations import ActivationStore, LayerInput
from quantkit.calibrate.parallel import in_order
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.sealed import is_sealed, write_sealed
from quantkit.compare.distributions import Kept, join, keep
from quantkit.compare.fingerprint import weight_fingerprints
from quantkit.compare.taps import EXPERT_ROWS, LayerTaps, Record, run_each_expert, spread
from quantkit.console import Progress
from quantkit.errors import QuantkitError
from quantkit.outdir import exclusive, prepare_output
from quantkit.spec.baseline import (
    BASELINE_NAME,
    LAYERS_FOLDER,
    OUTSIDE_NAME,
    Baseline,
    Sequence,
    layer_name,
    read_baseline,
)
from quantkit.spec.tensorfile import read_tensors
from quantkit.threads import one_thread_per_operation

LOGIT_BYTES = 64 * 2**20
"""Of logits that are computed at once."""


@dataclass(frozen=True)
class Result:
    """The finished baseline; `already`: the folder held it before, nothing was done."""

    baseline: Baseline
    already: bool


def run_plan(plan: Plan, out: Path, jobs: int = 0) -> Result:
    """Run a plan to its end, or continue it, or read the result of a finished one.

    Args:
        jobs: inputs at a time, which changes no byte of the result; 0 means `Plan.default_jobs`.

    Raises:
        UsageError: `out` is not usable, or holds the work of other options.
        InputError: weights or hidden states are not finite.
    """
    folder = prepare_output(
        out, plan.record, sources=[plan.source.root], final=BASELINE_NAME, command="quantkit baseline"
    )
    with exclusive(folder):
        if not folder.finished:
            (out / LAYERS_FOLDER).mkdir(exist_ok=True)
            kept, sequences = _Run(plan, out, folder.work, jobs or plan.default_jobs).all_passes()
            write_baseline(out, plan, sequences, kept)
        found = read_baseline(out)
        folder.clear_work()
    return Result(found, folder.finished)


class _Run:
    """The passes of one plan, from wherever the folder says."""

    def __init__(self, plan: Plan, out: Path, work: Path, jobs: int) -> None:
        self._plan, self._out, self._work, self._jobs = plan, out, work, jobs
        self._sequences = list(plan.sequences)
        self._ids = [torch.tensor([sequence.ids]) for sequence in self._sequences]
        self._stop = frozenset(plan.tokenizer.stop_tokens)
        self._step = max(1, LOGIT_BYTES // (4 * plan.source.dims.vocab))

    def all_passes(self) -> tuple[list[Kept], tuple[Sequence, ...]]:
        """Rows kept of every sequence, and the sequences with prompts continued."""
        plan = self._plan
        tokens = plan.source.dims.layers * (plan.tokens + (plan.passes - 1) * self._prompt_tokens())
        with ExitStack() as stack:
            stack.enter_context(one_thread_per_operation())
            progress = stack.enter_context(Progress("baseline", tokens, "tokens"))
            pool = stack.enter_context(ThreadPoolExecutor(self._jobs, thread_name_prefix="input"))
            stream = LayerStream(plan.source, dtype=plan.dtype, device=plan.device)
            stream.check_outside()
            if plan.resident:
                for layer in range(len(stream)):
                    stack.enter_context(stream.materialized(layer))
            kept = self._first_pass(stream, pool, progress)
            for number in range(1, plan.passes):
                self._next_token(number, stream, kept, pool, progress)
        return kept, tuple(self._sequences)

    def _prompt_tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self._sequences if sequence.use == "prompt")

    # ---------------------------------------------------------------------------------------------- the first pass

    def _first_pass(self, stream: LayerStream, pool: Executor, progress: Progress) -> list[Kept]:
        path = self._work / "pass-00000.safetensors"
        layers = (self._out / layer_name(layer) for layer in range(len(stream)))
        if not all(map(is_sealed, (path, self._out / OUTSIDE_NAME, *layers))):
            hidden = self._layers(stream, pool, progress)
            self._save_outside(stream)
            write_sealed(path, join(self._distributions(stream, hidden)).tensors())
        rows = Kept(**read_tensors(path))
        counts = [len(self._first_scored(sequence)) for sequence in self._sequences]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        kept = [rows.rows(start, start + count) for start, count in zip(starts, counts, strict=True)]
        for index, sequence in enumerate(self._sequences):
            if sequence.use == "prompt":
                self._append(index, kept)
        return kept

    @staticmethod
    def _first_scored(sequence: Sequence) -> tuple[int, ...]:
        return (len(sequence.ids) - 1,) if sequence.use == "prompt" else sequence.scored

    def _layers(self, stream: LayerStream, pool: Executor, progress: Progress) -> list[Tensor]:
        """Output `[1, P, H]` of the last layer at the positions of `_first_scored`; writes the layers' files."""
        plan, total = self._plan, len(stream)
        done = next((layer for layer in range(total) if not is_sealed(self._out / layer_name(layer))), total)
        store = ActivationStore(self._work, len(self._ids), spool=plan.spools, device=plan.device)
        start = store.last_boundary(min(done, total - 1))
        last: list[Tensor] = []
        with closing(store):
            if start == 0:
                with stream.embeddings(torch.cat([ids.flatten() for ids in self._ids])):
                    for index, ids in enumerate(self._ids):
                        store.put(0, index, stream.embed(ids))
                store.commit(0)
            for layer in range(start, total):
                progress.describe(f"layer {layer + 1} of {total}")
                store.start(layer)
                with self._ready(stream, layer) as module:
                    last = self._one_layer(stream, layer, module, store, pool, progress, record=layer >= done)
                if layer + 1 < total:
                    store.commit(layer + 1)
                store.forget(layer)
        return last

    @contextmanager
    def _ready(self, stream: LayerStream, layer: int) -> Iterator[nn.Module]:
        if self._plan.resident:
            yield stream.layers[layer]
        else:
            with stream.materialized(layer) as module:
                yield module

    def _one_layer(
        self,
        stream: LayerStream,
        layer: int,
        module: nn.Module,
        store: ActivationStore,
        pool: Executor,
        progress: Progress,
        *,
        record: bool,
    ) -> list[Tensor]:
        prefix, final = f"{stream.prefix}.{layer}", layer + 1 == len(stream)
        taps = LayerTaps(self._plan.source.arch, prefix, module)
        keeper = _LayerKeeper(self._plan, taps)

        def work(index: int) -> tuple[LayerInput, LayerInput, Record]:
            value = store.get(index)
            with taps.recording(Record.of(self._sequences[index])) as found:
                return value, stream.run_layer(layer, value), found

        last: list[Tensor] = []
        with taps.attached(), closing(in_order(pool, work, len(self._ids), ahead=self._jobs)) as results:
            for index, (entered, output, found) in enumerate(results):
                sequence = self._sequences[index]
                _check_finite(output.hidden, layer, sequence)
                if record:
                    keeper.add(sequence, entered, output, found)
                if final:
                    last.append(output.hidden[:, list(self._first_scored(sequence))])
                else:
                    store.put(layer + 1, index, output)
                progress.advance(len(sequence.ids))
        if record:
            tensors = {**keeper.finish(), **weight_fingerprints(self._plan.source.arch, prefix, module)}
            write_sealed(self._out / layer_name(layer), tensors)
        return last

    def _save_outside(self, stream: LayerStream) -> None:
        """Fingerprints of the final norm and the head; the embeddings are seen in what enters the first layer."""
        with stream.head():
            found = weight_fingerprints(self._plan.source.arch, "", stream.model, without=f"{stream.prefix}.")
        write_sealed(self._out / OUTSIDE_NAME, found)

    # ------------------------------------------------------------------------------------------- distributions

    def _distributions(self, stream: LayerStream, hidden: list[Tensor]) -> list[Kept]:
        """Distributions after the positions of `_first_scored`, from the last layer's output there."""
        found = []
        with stream.head():
            for index, sequence in enumerate(self._sequences):
                following = torch.cat((self._ids[index][0], torch.zeros(1, dtype=torch.int64)))
                places = torch.tensor(self._first_scored(sequence), dtype=torch.int64)
                pairs = zip(hidden[index].split(self._step, 1), places.split(self._step), strict=True)
                found.append(join([self._kept(stream, part, following[where + 1]) for part, where in pairs]))
        return found

    def _kept(self, stream: LayerStream, hidden: Tensor, following: Tensor) -> Kept:
        logits = stream.logits(LayerInput(hidden))[0].float().log_softmax(-1).cpu()
        return keep(logits, following, self._plan.source.dims.vocab if self._plan.options.full else self._plan.top_k)

    # ------------------------------------------------------------------------------------------- greedy passes

    def _append(self, index: int, kept: list[Kept]) -> None:
        """Continue a prompt by the likeliest token after its last position."""
        rows, sequence = kept[index], self._sequences[index]
        token = int(rows.top_ids[-1, 0])
        rows.next_logprob[-1] = rows.top_logprobs[-1, 0]
        ids = (*sequence.ids, token)
        scored = tuple(range(sequence.prompt_tokens - 1, len(ids) - 1))
        self._sequences[index] = sequence.model_copy(update={"ids": ids, "scored": scored})
        self._ids[index] = torch.tensor([ids])

    def _next_token(
        self, number: int, stream: LayerStream, kept: list[Kept], pool: Executor, progress: Progress
    ) -> None:
        """One more token for every prompt that has not ended."""
        going = [
            index
            for index, sequence in enumerate(self._sequences)
            if sequence.use == "prompt" and sequence.ids[-1] not in self._stop
        ]
        if not going:
            return
        path = self._work / f"pass-{number:05d}.safetensors"
        if not is_sealed(path):
            progress.describe(f"new token {number + 1} of {self._plan.passes}")
            write_sealed(path, join(self._last_rows(stream, going, pool, progress)).tensors())
        rows = Kept(**read_tensors(path))
        for place, index in enumerate(going):
            kept[index] = join([kept[index], rows.rows(place, place + 1)])
            self._append(index, kept)

    def _last_rows(self, stream: LayerStream, going: list[int], pool: Executor, progress: Progress) -> list[Kept]:
        with stream.embeddings(torch.cat([self._ids[index].flatten() for index in going])):
            values = [stream.embed(self._ids[index]) for index in going]
        for layer in range(len(stream)):
            with self._ready(stream, layer):

                def work(place: int, layer: int = layer, values: list[LayerInput] = values) -> LayerInput:
                    return stream.run_layer(layer, values[place])

                values = list(in_order(pool, work, len(going), ahead=self._jobs))
            progress.advance(sum(self._ids[index].numel() for index in going))
        ends = torch.cat([value.hidden[:, -1:] for value in values], 1)
        with stream.head():
            pieces = ends.split(self._step, 1)
            parts = [self._kept(stream, part, torch.zeros(part.shape[1], dtype=torch.int64)) for part in pieces]
        joined = join(parts)
        return [joined.rows(place, place + 1) for place in range(len(going))]


class _LayerKeeper:
    """Collects the tensors of one layer's file."""

    def __init__(self, plan: Plan, taps: LayerTaps) -> None:
        self._plan, self._taps = plan, taps
        self._tensors: dict[str, Tensor] = {}
        self._routing: list[Tensor] = []

    def add(self, sequence: Sequence, entered: LayerInput, output: LayerInput, found: Record) -> None:
        tensors = self._tensors
        if sequence.use == "text" and found.routing is not None:
            self._routing.append(found.routing)
        if sequence.use not in ("probe", "long"):
            return
        tensors |= {f"{sequence.use}.{name}": value for name, value in found.events.items()}
        hidden = output.hidden[0].float().cpu()
        if sequence.use == "long":
            tensors["long"] = hidden[list(sequence.sampled)]
            return
        tensors["input"], tensors["output"] = entered.hidden[0].float().cpu(), hidden
        tensors |= {f"input.{name}": value.cpu() for name, value in entered.carried.items()}
        if found.routing is not None:
            tensors["probe.routing"] = found.routing.to(torch.int16)
        if found.router is not None:
            tensors["probe.router"] = found.router.float().cpu()
        if found.experts_input is not None:
            rows = found.experts_input[spread(len(found.experts_input), EXPERT_ROWS).to(found.experts_input.device)]
            with torch.inference_mode():
                tensors["experts.output"] = run_each_expert(self._taps.experts_module, rows)
            tensors["experts.input"] = rows.float().cpu()

    def finish(self) -> dict[str, Tensor]:
        if self._routing:
            self._tensors["routing"] = torch.cat(self._routing).to(torch.int16)
        return self._tensors


def _check_finite(hidden: Tensor, layer: int, sequence: Sequence) -> None:
    if not bool(torch.isfinite(hidden).all()):
        raise QuantkitError(
            f"the output of layer {layer} is not finite on {sequence.name}",
            "check the weights with `quantkit inspect`; a baseline of such a model proves nothing",
        )
