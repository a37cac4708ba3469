"""The memory table: planned from headers before anything is read, measured afterwards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantkit.archs import Dims
from quantkit.arithmetic import EXACT_F32_K
from quantkit_runtime.errors import OutOfMemory


@dataclass(frozen=True)
class MemoryTable:
    """What a session holds, in bytes, with everything in place; `workspace` is held only during a forward.

    Attributes:
        weights: parameters and buffers.
        pool: the KV pool.
        workspace: measured on the largest prefill and decode step.
        graphs: recorded forwards.
        reserve: left alone.
        free: what could still be allocated.
        fits: (sequences at once, longest context of each) that there is room for instead of the pool.
    """

    weights: int
    pool: int
    workspace: int
    graphs: int
    reserve: int
    free: int
    fits: tuple[tuple[int, int], ...] = ()

    @property
    def peak(self) -> int:
        return self.weights + self.pool + self.workspace + self.graphs

    def rows(self) -> list[tuple[str, int]]:
        names = ("weights", "pool", "workspace", "graphs", "peak", "reserve", "free")
        return [("KV pool" if name == "pool" else name, getattr(self, name)) for name in names]


class _Allocations(TorchDispatchMode):
    """Bytes that operations hold at once: what a card's allocator counts, for hosts, where nothing counts it.

    What an operation allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, which mypy does not see behind super()
        self.now: int = 0
        self.peak: int = 0
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage._cdata not in before and storage._cdata not in self._held:
                self._held[storage._cdata] = weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._held.pop(key, None)
        self.now -= nbytes


def measured_peak(device: torch.device, run: Callable[[], object]) -> int:
    """Most bytes that `run` holds on the device on top of what is held before it."""
    if device.type == "cuda":
        run()  # what the first call keeps (handles, workspaces of libraries) is no workspace of later ones
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        peak = int(torch.cuda.max_memory_allocated(device)) - before
        torch.cuda.empty_cache()  # what is free must count as free
        return peak
    allocations = _Allocations()
    with allocations:
        run()
    return allocations.peak


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, those that share memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes.

    Attributes:
        weights: memory column of the role -> bytes, scales counted apart.
        scales: of INT8 weights.
        kv_cache: keys and values of all layers for the planned tokens, as the cache in use keeps them.
        workspace: estimate of the largest temporary tensors of a forward.
        tokens: positions that the cache was planned for.
        free: bytes that could be allocated when the plan was made.
    """

    weights: Mapping[str, int]
    scales: int
    kv_cache: int
    workspace: int
    tokens: int
    free: int

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.scales + self.kv_cache + self.workspace

    def rows(self) -> list[tuple[str, int]]:
        weights = [(f"weights: {column}", size) for column, size in sorted(self.weights.items())]
        rest = [("weights: scales", self.scales), (f"KV cache ({self.tokens} tokens)", self.kv_cache)]
        return [*weights, *rest, ("workspace (estimate)", self.workspace)]


def on_meta(skeleton: Any, dims: Dims) -> Any:
    """A copy without data, for runs in which only shapes matter."""
    probe = copy.deepcopy(skeleton).to("meta")
    if dims.experts:
        probe.set_experts_implementation("batched_mm")  # has no operation that depends on values
    return probe


def transformers_kv_bytes(probe: Any, dims: Dims, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `tokens` positions as transformers' cache will keep them.

    The model's own code decides what is cached (latents or expanded heads, windows), and that differs between versions
    of transformers. So it is run once on `meta`, where tensors have shapes and no data, and the cache is measured.
    Where an operation has no `meta` form the largest possibility counts: layers x tokens x heads x (key + value).

    Args:
        probe: from `on_meta`.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=probe.config)
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            probe(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except RuntimeError:  # no `meta` form: NotImplementedError is one of them
        heads = dims.heads if dims.is_mla else dims.kv_heads
        return dims.layers * tokens * heads * (dims.head_dim + dims.v_head_dim) * dtype.itemsize
    return cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors of a transformers cache; one that serves as keys and as values counts once."""
    leaves = tree_leaves([list(vars(layer).values()) for layer in cache.layers])
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def workspace_bytes(dims: Dims, prompt_tokens: int, dtype: torch.dtype, *, on_cpu: bool) -> int:
    """Estimate of a forward's temporaries: logits in the compute dtype and float32, four copies of the widest
    activation, and on the CPU one chunk of the widest weight as float32 (see `kernels.reference`)."""
    width = max(dims.intermediate, 2 * dims.moe_intermediate, dims.shared_intermediate, dims.heads * dims.head_dim)
    logits = prompt_tokens * dims.vocab * (dtype.itemsize + 4)
    activations = 4 * prompt_tokens * max(width, dims.hidden) * 4
    chunk = width * min(EXACT_F32_K, max(width, dims.hidden)) * 4 if on_cpu else 0
    return logits + activations + chunk


def require(plan: MemoryPlan) -> None:
    """Refuse before reading what cannot fit.

    Raises:
        OutOfMemory: the plan exceeds what is free.
    """
    if plan.total > plan.free:
        raise _error(plan, f"{_gib(plan.total)} are needed and {_gib(plan.free)} are free")


@contextmanager
def out_of_memory_as_error(plan: MemoryPlan) -> Iterator[None]:
    """Turn an allocation failure of Python or torch into an `OutOfMemory` that shows what was planned."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _error(plan, "an allocation failed") from error
    except RuntimeError as error:
        # torch's CPU allocator has no exception class of its own
        if "can't allocate memory" not in str(error):
            raise
        raise _error(plan, "an allocation failed") from error


def _error(plan: MemoryPlan, what: str) -> OutOfMemory:
    return OutOfMemory(
        f"not enough memory: {what}",
        "free memory, shorten the prompt or --max-new-tokens, use more cards (`quantkit plan`), or --device cpu",
        items=[f"{name}: {_gib(size)}" for name, size in plan.rows()],
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
