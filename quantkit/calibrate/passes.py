"""Passes: walks over the decoder layers, each of which reads the weights once and leaves one record for each layer.

A pass carries one or more hidden streams from layer to layer (that of the float model; that of the model as it is
quantized so far) through an `ActivationStore` each. Records are files of the work folder, written when a layer is done:
a killed run goes on after the last sound one, from the spooled hidden states where there are some, else by forward
passes alone (`Pass.replay`). Batches run side by side and are taken in their order, so results depend neither on how
many at a time (`parallel.py`) nor on how many processes share them (`ranks.py`). Memory: a layer (for two streams as
many as the pass materializes) and the batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from quantkit.calibrate import experts
from quantkit.calibrate.activations import ActivationStore, LayerInput
from quantkit.calibrate.data import Batch, Samples
from quantkit.calibrate.parallel import in_order
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.ranks import ALONE, Ranks
from quantkit.calibrate.stream import LayerStream
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import is_sealed
from quantkit.console import Progress
from quantkit.errors import QuantkitError
from quantkit.threads import one_thread_per_operation

Item = TypeVar("Item")
Result = TypeVar("Result")

Streams = list[LayerInput]
"""What one batch brings to a layer, or hands on, one entry for each stream."""


class LayerRun:
    """One layer in the hands of a pass.

    Attributes:
        stream: the model; `stream.materialized(index)` gives the layer its weights.
        index: of the layer.
        prefix: of its parameter names, `model.layers.3`.
        batches: what runs through it.
    """

    def __init__(
        self,
        stream: LayerStream,
        index: int,
        batches: Sequence[Batch],
        stores: Sequence[ActivationStore],
        pool: Executor,
        ahead: int,
        advance: Callable[[int], None],
        ranks: Ranks,
    ) -> None:
        self.stream, self.index, self.batches = stream, index, batches
        self._stores, self._pool, self._ahead, self._advance, self._ranks = stores, pool, ahead, advance, ranks
        self._own = [number for number in range(len(batches)) if ranks.mine(number)]

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` on every item, side by side, results in the order of the items."""
        with closing(in_order(self._pool, lambda index: work(items[index]), len(items), self._ahead)) as results:
            return list(results)

    @property
    def prefix(self) -> str:
        return f"{self.stream.prefix}.{self.index}"

    @property
    def is_last(self) -> bool:
        return self.index + 1 == len(self.stream)

    def look(self, work: Callable[[int, Streams], Result]) -> Iterator[tuple[int, Result]]:
        """`work(batch index, what enters the layer)` on every batch, results in order; nothing is handed on."""
        with closing(self._run(lambda index: work(index, self._get(index, keep=True)))) as results:
            yield from self._of_all(results)

    def hand_on(self, work: Callable[[int, Streams], tuple[Streams, Result]]) -> Iterator[tuple[int, Result]]:
        """As `look`, once for a layer: `work` also returns what each stream hands to the next layer."""

        def kept(results: Iterator[tuple[Streams, Result]]) -> Iterator[Result]:
            for index, (outputs, result) in zip(self._own, results, strict=True):
                for store, output in zip(self._stores, outputs, strict=True):
                    if self.is_last:
                        require_finite(output, self.batches[index])
                    else:
                        store.put(self.index + 1, index, output)
                yield result

        with closing(self._run(lambda index: work(index, self._get(index, keep=False)))) as results:
            for index, result in self._of_all(kept(results)):
                yield index, result
                self._advance(self.batches[index].ids.numel())

    def _run(self, work: Callable[[int], Result]) -> Generator[Result, None, None]:
        """Results of this process's batches."""
        return in_order(self._pool, lambda position: work(self._own[position]), len(self._own), self._ahead)

    def _of_all(self, results: Iterator[Result]) -> Iterator[tuple[int, Result]]:
        """Results of all processes in the order of the batches; what one refuses, all refuse."""
        for first in range(0, len(self.batches), self._ranks.size):
            mine = [_next(results)] if first + self._ranks.rank < len(self.batches) else []
            for offset, result in enumerate(self._ranks.shared(mine)):
                if isinstance(result, QuantkitError):
                    raise result
                yield first + offset, result

    def forward(self) -> None:
        """Run the materialized layer on all streams alike, and no more."""
        for _ in self.hand_on(lambda _, inputs: ([self.stream.run_layer(self.index, each) for each in inputs], None)):
            pass

    def _get(self, batch: int, *, keep: bool) -> Streams:
        return [store.get(batch, keep=keep) for store in self._stores]


def _next(results: Iterator[Result]) -> Result | QuantkitError:
    """The next result, or why there is none."""
    try:
        return next(results)
    except QuantkitError as error:
        return error


class Pass(ABC):
    """What is done at every layer.

    Attributes:
        name: of its records in the work folder, `NAME-00003.safetensors`.
        title: for the progress.
        streams: number of hidden streams; all begin with the embeddings.
        source: weights, as the passes before left them.
        samples: text; by default all of the plan's.
    """

    name: str
    title: str
    streams = 1

    def __init__(self, plan: Plan, source: Source) -> None:
        self.plan, self.source = plan, source

    @property
    def samples(self) -> Samples:
        return self.plan.samples

    @abstractmethod
    def visit(self, run: LayerRun) -> Callable[[Path], None]:
        """Materialize the layer, run all batches and hand on what they return.

        Returns:
            What writes the layer's record; it is called once the outputs of the layer are safe.
        """

    def replay(self, run: LayerRun, record: Path) -> None:
        """As `visit` for a layer whose record is there: only hand on what it handed on then."""
        with run.stream.materialized(run.index):
            run.forward()

    def finish(self, records: Sequence[Path], out: Path) -> None:
        """All layers are done: write what the next passes and the artifact need into the folder `out`."""
        del records, out  # nothing, unless a pass says otherwise


class Walk:
    """Carries a pass through all layers, from wherever the work folder says.

    Args:
        job: the pass.
        work: folder of records and spooled hidden states.
        jobs: batches at a time.
        ranks: processes that share the batches.
        checks: what stands outside the layers is read and checked first; another pass has not done so.
    """

    def __init__(self, job: Pass, work: Path, jobs: int, ranks: Ranks = ALONE, *, checks: bool = True) -> None:
        self._pass, self._work, self._jobs, self._ranks = job, ranks.folder(work), jobs, ranks
        self._checks = checks

    @property
    def records(self) -> list[Path]:
        return [self._record(layer) for layer in range(self._pass.source.dims.layers)]

    def _record(self, layer: int) -> Path:
        return record_path(self._work, self._pass.name, layer)

    @cached_property
    def _batches(self) -> list[Batch]:
        return self._pass.plan.batches_of(self._pass.samples)

    def _store(self, index: int) -> ActivationStore:
        plan, name = self._pass.plan, self._pass.name
        spool = plan.spools_with(self._pass.samples.tokens, self._pass.streams)
        label = "hidden" if self._pass.streams == 1 else f"hidden{index}"
        return ActivationStore(self._work, len(self._batches), spool=spool, device=plan.device, name=f"{name}-{label}")

    def run(self) -> None:
        total = len(self.records)
        here = next((layer for layer, path in enumerate(self.records) if not is_sealed(path)), total)
        finished = min(self._ranks.shared([here]))
        if finished == total:
            return
        plan = self._pass.plan
        experts.register()
        with ExitStack() as stack:
            stack.enter_context(one_thread_per_operation())
            stores = [stack.enter_context(closing(self._store(index))) for index in range(self._pass.streams)]
            start = min(self._ranks.shared([store.last_boundary(finished) for store in stores]))
            tokens = (total - start) * self._pass.samples.tokens
            progress = stack.enter_context(
                Progress(self._pass.title, tokens, "tokens", silent=not self._ranks.is_first)
            )
            stream = LayerStream(
                self._pass.source, dtype=plan.dtype, device=plan.device, experts=experts.IMPLEMENTATION
            )
            if self._checks:
                stream.check_outside()
            if start == 0:
                self._embed(stream, stores)
            pool = stack.enter_context(ThreadPoolExecutor(self._jobs, thread_name_prefix="batch"))
            for layer in range(start, total):
                progress.describe(f"{self._pass.title}: layer {layer + 1} of {total}")
                run = LayerRun(
                    stream, layer, self._batches, stores, pool, 2 * self._jobs, progress.advance, self._ranks
                )
                self._layer(run, stores, done=layer < finished)

    def _embed(self, stream: LayerStream, stores: Sequence[ActivationStore]) -> None:
        """What enters layer 0, the same for all streams."""
        with stream.embeddings(torch.cat([batch.ids.flatten() for batch in self._batches])):
            for index, batch in enumerate(self._batches):
                if not self._ranks.mine(index):
                    continue
                value = stream.embed(batch.ids)
                for store in stores:
                    store.put(0, index, value)
        for store in stores:
            store.commit(0)

    def _layer(self, run: LayerRun, stores: Sequence[ActivationStore], *, done: bool) -> None:
        for store in stores:
            store.start(run.index)
        save = None
        if done:
            self._pass.replay(run, self._record(run.index))
        else:
            save = self._pass.visit(run)
        if not run.is_last:
            for store in stores:
                store.commit(run.index + 1)
        if save is not None:
            save(self._record(run.index))
        for store in stores:
            store.forget(run.index)


def record_path(work: Path, name: str, layer: int) -> Path:
    """File of what the pass `name` left of a layer."""
    return work / f"{name}-{layer:05d}.safetensors"


def require_finite(output: LayerInput, batch: Batch) -> None:
    """Refuse an output of the last layer that is not finite; the sample is named."""
    finite = torch.isfinite(output.hidden).flatten(2).all(-1).flatten()
    if not bool(finite.all()):
        token = int((~finite).nonzero()[0])
        raise QuantkitError(
            f"the output of the last layer is not finite on {batch.describe(token)}",
            "leave that sample out, or check the weights with `quantkit inspect`",
        )
