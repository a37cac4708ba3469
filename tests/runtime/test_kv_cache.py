"""Blocks, what they hold and attention over them, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import UsageError
from quantkit_runtime.attention import _SCORES, attend
from quantkit_runtime.kv_cache import KvCache, KvFormat, LayerSpec, Store

CPU = torch.device("cpu")
LAYERS = (LayerSpec(0, 2, 20, 10, 0), LayerSpec(3, 1, 7, 7, 16))


def fmt(keys: str = "float32", values: str = "float32", block: int = 4) -> KvFormat:
    return KvFormat.of(keys, values, torch.float32, block)


def test_formats_and_bytes() -> None:
    kv = KvFormat.of("int8", "auto", torch.bfloat16)
    assert (kv.keys, kv.values, kv.block) == (torch.int8, torch.bfloat16, 16)
    for kv in (fmt(), fmt("int8", "bf16"), fmt("int8", "int8"), fmt("bf16", "int8", 5)):
        assert KvCache(LAYERS, kv, 6, CPU).nbytes == 6 * sum(map(kv.block_bytes, LAYERS)) == kv.pool_bytes(LAYERS, 6, 5)
    # keys: 2 x 20 and 1 x 7 bytes and 3 scales; values: 2 x 10 and 1 x 7 of two bytes
    assert [fmt("int8", "bf16").block_bytes(spec) for spec in LAYERS] == [4 * (40 + 8 + 40), 4 * (7 + 4 + 14)]
    with pytest.raises(UsageError, match="choices: auto, bf16, float32, int8"):
        fmt("fp8")
    with pytest.raises(UsageError, match="--kv-block"):
        fmt(block=0)


def test_layers_with_a_window_count_what_they_keep() -> None:
    """A window of 16 in chunks of 5 touches up to 20 positions, unaligned in 6 blocks of 4."""
    kv = replace(fmt(), chunk=5)
    full, windowed = map(kv.block_bytes, LAYERS)
    for blocks, sequences in ((101, 1), (101, 3), (8, 1), (7, 1), (7, 4), (1, 1)):
        rings = min(blocks, 1 + 6 * sequences)
        cache = KvCache(LAYERS, kv, blocks, CPU, sequences)
        assert cache.nbytes == blocks * full + rings * windowed == kv.pool_bytes(LAYERS, blocks, sequences)
        assert kv.most_blocks(LAYERS, cache.nbytes, sequences, 200) == blocks
        assert kv.most_blocks(LAYERS, cache.nbytes - 1, sequences, 200) == blocks - 1
    assert kv.most_blocks(LAYERS, 1 << 40, 1, 50) == 50
    cache = KvCache(LAYERS, kv, 101, CPU, 1)
    assert cache.reserve(0, 60)
    with pytest.raises(UsageError, match="6 tokens of a sequence at once; the KV cache was made for 5"):
        cache.slots(0, 0, 6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=60))
def test_no_block_is_ever_lost_or_owned_twice(steps: list[tuple[int, int]]) -> None:
    """Random growth and release of up to three sequences: length 0 releases; a window of 4 keeps 3 blocks of each."""
    layers = [LayerSpec(0, 1, 4, 4, 0), LayerSpec(1, 1, 4, 4, 4)]
    cache = KvCache(layers, replace(fmt(), chunk=2), 12, CPU, 3)
    assert len(cache.rings) == 2
    for sequence, tokens in steps:
        if tokens == 0:
            cache.release(sequence)
            continue
        before, free = list(cache.tables.get(sequence, [[]])[0]), cache.free_blocks
        known = sequence in cache.tables or len(cache.tables) < 3
        missing = max(0, -(-tokens // 4) - len(before))
        fits = cache.reserve(sequence, tokens)
        assert fits == (known and missing <= free)
        if not fits:
            assert list(cache.tables.get(sequence, [[]])[0]) == before
            continue
        whole, ring = map(list, cache.tables[sequence])
        assert whole[: len(before)] == before
        assert len(whole) == len(ring) == len(before) + missing
        assert all(block == ring[at % 3] for at, block in enumerate(ring))
        for group, size in ((0, 12), (1, min(12, 1 + 3 * 3))):
            owned = [block for tables in cache.tables.values() for block in set(tables[group])]
            assert len(set(owned)) == len(owned)
            assert set(owned) <= set(range(1, size))
        assert sum(len(tables[0]) for tables in cache.tables.values()) == 11 - cache.free_blocks


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)])
def test_what_was_written_is_read(dtype: torch.dtype, limit: float) -> None:
    """INT8 is off by at most half a step of its token and head, as numpy rounds it."""
    x = torch.randn(9, 3, 7, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 50.0, 1e-3])[:, None]
    store, slots = Store(6, 3, 4, 7, dtype, CPU), torch.tensor([4, 5, 6, 7, 20, 21, 22, 23, 8])
    store.write(slots, x)
    got = store.read(torch.tensor([1, 5, 2]), torch.float32)[:, :9].transpose(0, 1)
    top = x.abs().amax(-1, keepdim=True)
    assert bool(((got - x).abs() <= limit * top * 1.0001).all())
    if dtype == torch.int8:
        scale = (np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
        assert np.array_equal(got.numpy(), np.clip(np.rint(x.numpy() / scale), -127, 127) * scale)


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float | None, sinks: Tensor | None
) -> np.ndarray:
    """Attention by its definition in float64, one query and head after the other."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // k.shape[0])
        for row in range(q.shape[1]):
            position = k.shape[1] - q.shape[1] + row
            first = max(0, position - window + 1) if window else 0
            scores = k[group, first : position + 1].double().numpy() @ q[head, row].double().numpy() * scale
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
            out[head, row] = weights @ v[group, first : position + 1].double().numpy() / total
    return out


@pytest.mark.parametrize(("t", "length"), [(1, 1), (1, 33), (5, 5), (33, 33), (7, 33)])
@pytest.mark.parametrize("window", [0, 1, 16, 40])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_attention_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch, t: int, length: int, window: int, softcap: float | None, sinks: bool
) -> None:
    monkeypatch.setattr("quantkit_runtime.attention._SCORES", 300)  # so that scores are formed in parts
    assert _SCORES > 300
    generator = torch.Generator().manual_seed(t)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((6, t, 12), (2, length, 12), (2, length, 5)))
    sink = torch.randn(6, generator=generator) if sinks else None
    got = attend(q, k, v, 0.3, window, softcap, sink)
    assert np.abs(got.numpy() - reference(q, k, v, 0.3, window, softcap, sink)).max() < 2e-6
