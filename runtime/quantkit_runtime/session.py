"""From a loaded model to an engine that fits the device: measure what a forward needs, then size the KV pool.

The largest forwards are run once before the pool exists, at the full context on a pool of one block, so that the
memory table holds what was measured and not an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import first_line
from quantkit_runtime.engine import Engine
from quantkit_runtime.errors import OutOfMemory
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.reference import Tiles
from quantkit_runtime.kernels.tuning import tuning
from quantkit_runtime.kv_cache import CHUNK, KvCache, KvFormat, LayerSpec
from quantkit_runtime.memory import MemoryTable, measured_peak, model_bytes
from quantkit_runtime.parallel import Team
from quantkit_runtime.runner import PagedRunner, Runner, TransformersRunner, records
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
        graphs: record forwards as graphs.
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
    cache = KvCache(loaded.kv, fmt, blocks, device, sequences)
    return PagedRunner(loaded.model, cache, device, decode.run, fused, *_prefill(loaded, fmt))


def _prefill(loaded: LoadedModel, fmt: KvFormat) -> tuple[Callable[..., Tensor] | None, str]:
    """The kernel of prefill attention, or None and why attention in torch must serve."""
    found = registry.find("paged_prefill", loaded.device.family)
    if found.name != "triton":  # the reference is no faster than torch's own attention, and waits for the device
        why = [line for line in registry.skipped(loaded.device.family) if line.startswith("paged_prefill ")]
        return None, next(iter(why), f"no other kernel on {loaded.device.family}")
    kinds = {spec._replace(layer=0, window=0) for spec in loaded.kv if isinstance(spec, LayerSpec)}
    for spec in kinds:  # heads may be too wide for a card: its compiler says so when it has compiled for them
        _, keys, values, _ = KvCache([spec], fmt, 2, loaded.device.torch).layers[0]
        q = torch.zeros((1, spec.heads, spec.key_dim), dtype=loaded.dtype, device=keys.data.device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
        for shape in dict.fromkeys(shape for _, shape in tuning().prefill):
            tiles = Tiles(table.new_tensor([[0, 0, 1, 0]]), shape.queries)
            try:
                found.run(q, keys.data, keys.scale, values.data, values.scale, table, tiles, 1.0, config=shape)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler's own errors have no common class
                return None, f"paged_prefill for heads of {spec.key_dim} and {spec.value_dim}: {first_line(error)}"
    return found.run, ""


def start(loaded: LoadedModel, options: Options) -> tuple[Engine, MemoryTable]:
    """An engine, and the memory table with everything in place.

    Raises:
        OutOfMemory: not even one sequence of the full context fits.
    """
    device, fmt, batch = loaded.device, replace(options.kv, chunk=options.chunk), options.batch
    weights, workspace = model_bytes(loaded.model), _workspace(loaded, options)
    free = device.free_memory()
    reserve, width = int(free * RESERVE), fmt.blocks(options.context)
    # all sequences together have no more tokens, and the workspace was measured for no more
    room, chunk = free - workspace - reserve, min(options.chunk, options.context * batch)
    recording = options.graphs and records(device.torch)
    kept = workspace if recording else 0  # a recorded prefill holds its workspace for good
    (blocks,) = _most_blocks(loaded, fmt, room - kept, (batch, width))
    if recording and blocks < 1 + width:  # no rank has it then: all of them count the least
        (blocks,), chunk = _most_blocks(loaded, fmt, room, (batch, width)), 0
    if not isinstance(loaded.kv, str) and blocks < 1 + width:
        raise OutOfMemory(
            f"a sequence of {options.context} positions needs {width} KV blocks; {max(0, blocks - 1)} fit into "
            f"{max(0, room)} bytes",
            "give a smaller --context or --chunk, --kv-keys int8 --kv-values int8, or use more cards",
        )
    runner = make_runner(loaded, fmt, blocks, batch)
    before = device.free_memory()
    if isinstance(runner, PagedRunner) and options.graphs:
        runner.capture(batch, width, chunk, partial(_anyones, loaded.files.ranks.world))
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


def _anyones(world: Team, why: str) -> str:
    """Why some rank cannot, or nothing."""
    said = world.objects(why)
    return next((why if world.size == 1 else f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")


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
    packed = np.zeros((3, sum(counts)), dtype=np.int32)
    packed[0] = np.arange(sum(counts)) % loaded.files.dims.vocab  # equal tokens would all go to the same experts
    packed[1] = np.concatenate([np.arange(context - count, context) for count in counts])
    table, shapes = np.zeros((len(counts), 1, width), dtype=np.int32), [(count, context) for count in counts]
    rows = torch.zeros((options.batch, runner.row_width(width)), dtype=torch.int32, device=device)
    rows[:, 1] = context - 1
    return max(
        measured_peak(device, lambda: runner.prefill(packed, table, shapes)),
        measured_peak(device, lambda: runner.decode_rows(rows)),
    )
