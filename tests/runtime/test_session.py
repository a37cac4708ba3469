"""The memory table: what it says is what the allocator sees, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quantkit_runtime import session
from quantkit_runtime.device import Device
from quantkit_runtime.errors import OutOfMemory
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kernels import reference, registry
from quantkit_runtime.kernels.tuning import Prefill, tuning
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.memory import MemoryTable
from quantkit_runtime.runner import PagedRunner, prefill_facts
from tests.runtime.conftest import TINY

Load = Callable[..., LoadedModel]


def kv(keys: str = "int8", values: str = "float32") -> KvFormat:
    return KvFormat.of(keys, values, torch.float32)


def most_allocated(profiler: Any) -> int:
    """Most bytes held at once by what was allocated meanwhile, from torch's own memory events."""
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("keys", ["int8", "float32"])
@pytest.mark.parametrize("model", TINY)
def test_the_table_is_what_the_allocator_sees(
    converted: Callable[..., Path], load: Load, model: str, keys: str
) -> None:
    """A full batch of full contexts: pool + workspace within 5 % of the peak that torch's profiler counts."""
    loaded = load(converted(model))
    options = session.Options(context=160, kv=kv(keys), batch=3, chunk=128)
    session.start(loaded, options)  # what a first call leaves behind is not looked for here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine, table = session.start(loaded, options)
        engine.generate([list(range(3, 153)), list(range(3, 143)), list(range(3, 100))], 10)
    peak = most_allocated(profiler)
    assert table.pool + table.workspace == pytest.approx(peak, rel=0.05)
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.state_dict().values()}
    assert table.weights == pytest.approx(sum(stored.values()), rel=1e-4)  # rotary frequencies are in no state_dict


def test_the_pool_shrinks_to_the_card_and_says_what_fits(
    converted: Callable[..., Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(converted(TINY[0]))
    options = session.Options(context=160, kv=kv(), batch=8, chunk=64)
    assert isinstance(loaded.kv, tuple)
    block = sum(map(options.kv.block_bytes, loaded.kv))
    _, roomy = session.start(loaded, options)
    assert roomy.pool == (1 + 8 * 10) * block

    def with_free(blocks: float) -> None:
        free = int((roomy.workspace + blocks * block) / (1 - session.RESERVE)) + 2
        monkeypatch.setattr(Device, "free_memory", lambda self: free)

    with_free(31)
    engine, table = session.start(loaded, options)
    assert isinstance(engine.runner, PagedRunner)
    assert table.pool == 31 * block
    assert table.fits == ((1, 480), (2, 240), (4, 112), (8, 48), (16, 16))
    prompts = [list(range(3, 100 + length)) for length in range(8)]
    got = engine.generate(prompts, 20)
    assert engine.counts.preemptions > 0
    monkeypatch.undo()
    assert session.start(loaded, options)[0].generate(prompts, 20) == got
    with_free(10)
    with pytest.raises(OutOfMemory, match="a sequence of 160 positions needs 10 KV blocks"):
        session.start(loaded, options)


def test_recorded_prefill_gives_way_to_one_sequence(
    tiny: Callable[[str], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of prefill holds its workspace beside that of other forwards. Where a sequence fits without it and not
    with it there is none, and the pool has what that leaves."""
    loaded, asked = load(tiny("llama")), []
    assert isinstance(loaded.kv, tuple)
    options = session.Options(context=160, kv=kv(), batch=1, chunk=64)
    block, (_, roomy) = sum(map(options.kv.block_bytes, loaded.kv)), session.start(loaded, options)
    monkeypatch.setattr(session, "records", lambda device: True)
    monkeypatch.setattr(PagedRunner, "capture", lambda self, batch, width, chunk, agree: asked.append(chunk))
    for workspaces in (2, 1):
        free = int((workspaces * roomy.workspace + 11 * block) / (1 - session.RESERVE)) + 2
        monkeypatch.setattr(Device, "free_memory", lambda self, free=free: free)
        assert session.start(loaded, options)[1].pool == 11 * block
    assert asked == [64, 0]


def test_no_more_is_recorded_than_the_workspace_was_measured_for(
    tiny: Callable[[str], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences of 30 never have 512 tokens."""
    asked: list[int] = []
    monkeypatch.setattr(session, "records", lambda device: True)
    monkeypatch.setattr(PagedRunner, "capture", lambda self, batch, width, chunk, *_: asked.append(chunk))
    session.start(load(tiny("llama")), session.Options(context=30, kv=kv(), batch=2))
    assert asked == [60]


def test_layers_with_a_window_leave_room_for_longer_texts(
    tiny: Callable[[str], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of a model whose layers half see a window, and the longest context in what they leave free."""
    loaded = load(tiny("gpt_oss"))
    assert isinstance(loaded.kv, tuple)
    options = session.Options(context=400, kv=kv(), batch=2, chunk=32)
    engine, table = session.start(loaded, options)
    by_window = dict.fromkeys((0, 16), 0)
    for spec in loaded.kv:
        by_window[spec.window] += options.kv.block_bytes(spec)
    assert all(by_window.values())
    ring = 4  # blocks of 16 that 15 positions and a chunk of 32 touch
    assert table.pool == (1 + 2 * 25) * by_window[0] + (1 + 2 * ring) * by_window[16]
    assert engine.runner.nbytes == table.pool
    room = 41 * by_window[0] + (1 + ring) * by_window[16]
    free = int((table.workspace + room) / (1 - session.RESERVE)) + 2
    monkeypatch.setattr(Device, "free_memory", lambda self: free)
    assert session.start(loaded, options)[1].fits[0] == (1, min(640, loaded.files.dims.max_positions))


def test_a_model_with_transformers_cache_counts_it(tiny: Callable[[str], Path], load: Load) -> None:
    """What the table plans for two sequences is what their caches hold at the end."""
    loaded = load(tiny("qwen3_next"), cache_tokens=29)
    engine, table = session.start(loaded, session.Options(context=29, kv=kv(), batch=2))
    assert "not paged" in engine.runner.kind
    assert table.fits == ()
    engine.generate([list(range(3, 23))] * 2, 10)
    assert table.pool == 2 * loaded.memory.kv_cache == engine.runner.nbytes


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_prefill_attention_falls_back_to_torch_and_says_why(
    tiny: Callable[[str], Path], load: Load, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is tried on the heads of the model in every shape of the table; where one is refused, texts are
    the same."""
    loaded, prompts, tried = load(tiny(family)), [list(range(3, 33)), list(range(9, 14))], []
    want = session.start(loaded, session.Options(context=40, kv=kv(), batch=2))[0].generate(prompts, 5)
    find = registry.find

    def refused(q: torch.Tensor, keys: torch.Tensor, *_: Any, config: Prefill | None = None) -> torch.Tensor:
        tried.append((q.shape[2], keys.shape[3]))
        raise ValueError("out of shared memory\nmore")

    def wide(*arguments: Any, config: Prefill | None = None) -> torch.Tensor:
        if config and config.bn == 128:
            raise ValueError("too many keys")
        return served(*arguments)

    def served(*arguments: Any, config: Prefill | None = None) -> torch.Tensor:
        return reference.paged_prefill(*arguments)

    def full(*_: Any, config: Prefill | None = None) -> torch.Tensor:
        raise torch.OutOfMemoryError

    rows = ((2048, Prefill(16, 64, 4, 2)), (1 << 30, Prefill(128, 128, 8, 2)))
    monkeypatch.setattr(session, "tuning", lambda: replace(tuning(), prefill=rows))
    cases = ((refused, "out of shared memory"), (wide, "too many keys"), (served, ""), (full, None))
    for run, why in cases:
        kernel = registry.Kernel("triton", run)
        monkeypatch.setattr(registry, "find", lambda op, *a, k=kernel: k if op == "paged_prefill" else find(op, *a))
        if why is None:
            with pytest.raises(torch.OutOfMemoryError):
                session.make_runner(loaded, kv(), 8)
            continue
        engine, _ = session.start(loaded, session.Options(context=40, kv=kv(), batch=2))
        assert engine.generate(prompts, 5) == want
        runner = engine.runner
        assert isinstance(runner, PagedRunner)
        assert runner.attend is (None if why else served)
        spec = next(iter(runner.cache.layers.values())).spec
        said = f"torch (paged_prefill for heads of {spec.key_dim} and {spec.value_dim}: {why})" if why else "one kernel"
        assert prefill_facts(runner)["attention"] == said
        assert set(tried) == {(spec.key_dim, spec.key_dim)}


def test_rows_add_up() -> None:
    table = MemoryTable(100, 50, 20, 5, 3, 7)
    assert dict(table.rows()) == {
        "weights": 100,
        "KV pool": 50,
        "workspace": 20,
        "graphs": 5,
        "peak": 175,
        "reserve": 3,
        "free": 7,
    }
