"""From a loaded model to an engine that fits the device: measure what a forward needs, then size the KV pool.

The largest forwards are run once before the pool exists, at the full context on a pool of one block, so that the
memory table holds what was measured and not an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from quantkit_runtime.engine import Engine
from quantkit_runtime.errors import OutOfMemory
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kernels import registry
from quantkit_runtime.kv_cache import CHUNK, KvCache, KvFormat
from quantkit_runtime.memory import MemoryTable, measured_peak, model_bytes
from quantkit_runtime.runner import PagedRunner, Runner, TransformersRunner
from quantkit_runtime.sampling import Sampling

RESERVE = 0.03
"""Share of the free memory that is left alone: for the driver, for libraries that load late, for fragmentation."""


@dataclass(frozen=True)
class Options:
    """What is asked of a session.

    Attributes:
        context: positions of the longest sequence, new tokens included.
        batch: sequences that run at once.
        chunk: tokens of a prefill forward.
        kv: how a position is kept.
        graphs: record decode steps as graphs.
        sampling, stop: see `Engine`.
    """

    context: int
    kv: KvFormat
    batch: int = 1
    chunk: int = CHUNK
    graphs: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()


def make_runner(loaded: LoadedModel, fmt: KvFormat, blocks: int, sequences: int | None = None) -> Runner:
    """The paged runner with a pool for so many blocks and sequences, see `KvCache`, or the other where the model needs
    it."""
    device = loaded.device.torch
    if isinstance(loaded.kv, str):
        return TransformersRunner(loaded.model, device, loaded.kv)
    decode, write = (registry.find(op, loaded.device.family) for op in ("paged_decode", "rope_write"))
    fused = write.run if write.name == "triton" else None  # torch's form of it waits for the device
    return PagedRunner(loaded.model, KvCache(loaded.kv, fmt, blocks, device, sequences), device, decode.run, fused)


def start(loaded: LoadedModel, options: Options) -> tuple[Engine, MemoryTable]:
    """An engine, and the memory table with everything in place.

    Raises:
        OutOfMemory: not even one sequence of the full context fits.
    """
    device, fmt, batch = loaded.device, replace(options.kv, chunk=options.chunk), options.batch
    weights, workspace = model_bytes(loaded.model), _workspace(loaded, options)
    free = device.free_memory()
    reserve, width = int(free * RESERVE), fmt.blocks(options.context)
    room = free - workspace - reserve
    (blocks,) = _most_blocks(loaded, fmt, room, (batch, width))
    if not isinstance(loaded.kv, str) and blocks < 1 + width:
        raise OutOfMemory(
            f"a sequence of {options.context} positions needs {width} KV blocks; {max(0, blocks - 1)} fit into "
            f"{max(0, room)} bytes",
            "give a smaller --context or --chunk, --kv-keys int8 --kv-values int8, or use more cards",
        )
    runner = make_runner(loaded, fmt, blocks, batch)
    before = device.free_memory()
    if isinstance(runner, PagedRunner) and options.graphs:
        runner.capture(batch, width)
    graphs = max(0, before - device.free_memory()) if runner.graphs else 0
    table = MemoryTable(
        weights=weights,
        # transformers' cache grows up to what was planned
        pool=runner.nbytes if isinstance(runner, PagedRunner) else loaded.memory.kv_cache * batch,
        workspace=workspace,
        graphs=graphs,
        reserve=reserve,
        free=device.free_memory(),
        fits=_fits(loaded, fmt, room - graphs),
    )
    return Engine(runner, batch, options.chunk, options.stop, options.sampling), table


def _most_blocks(loaded: LoadedModel, fmt: KvFormat, room: int, *asked: tuple[int, int]) -> list[int]:
    """Blocks of a pool, up to those for each asked (sequences, blocks of each), on the rank with least room: ranks that
    run out at different steps would part ways."""
    kv = loaded.kv
    own = [0 if isinstance(kv, str) else fmt.most_blocks(kv, room, count, 1 + count * width) for count, width in asked]
    return [min(found) for found in zip(*loaded.files.ranks.world.objects(own), strict=True)]


def _fits(loaded: LoadedModel, fmt: KvFormat, room: int) -> tuple[tuple[int, int], ...]:
    """(sequences at once, longest context of each) of the pools that would fit into the room."""
    longest, batches = loaded.files.dims.max_positions or 1 << 30, [1 << power for power in range(9)]
    found = _most_blocks(loaded, fmt, room, *((batch, fmt.blocks(longest)) for batch in batches))
    rows = [
        (batch, min((blocks - 1) // batch * fmt.block, longest)) for batch, blocks in zip(batches, found, strict=True)
    ]
    return tuple(row for row in rows if row[1] > 0)


def _workspace(loaded: LoadedModel, options: Options) -> int:
    """Bytes that the largest prefill and the largest decode step hold for a while, measured."""
    runner, device = make_runner(loaded, options.kv, 1), loaded.device.torch
    if isinstance(runner, TransformersRunner):
        ids = torch.zeros((1, min(options.chunk, options.context)), dtype=torch.long, device=device)
        with torch.no_grad():
            return measured_peak(device, lambda: loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1))
    context, width = options.context, options.kv.blocks(options.context)
    tokens = min(options.chunk, context * options.batch)
    counts = [min(context, tokens - first) for first in range(0, tokens, context)]
    packed = torch.zeros((3, sum(counts)), dtype=torch.long, device=device)
    packed[0] = torch.arange(sum(counts)) % loaded.files.dims.vocab  # equal tokens would all go to the same experts
    packed[1] = torch.cat([torch.arange(context - count, context) for count in counts])
    table = torch.zeros((len(counts), 1, width), dtype=torch.int32, device=device)
    rows = torch.zeros((options.batch, runner.row_width(width)), dtype=torch.int32, device=device)
    rows[:, 1] = context - 1
    return max(
        measured_peak(device, lambda: runner.prefill(packed, table, tuple((count, context) for count in counts))),
        measured_peak(device, lambda: runner.decode_rows(rows)),
    )
