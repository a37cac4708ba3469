"""The engine and both caches against transformers: every family, chunks, batches, a pool that is too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.archs.modeling import load_tokenizer
from quantkit.errors import InputError, UsageError
from quantkit_instruments.tokenizer import encode, stop_tokens, vocab_size
from quantkit_runtime import packing
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kernels import reference
from quantkit_runtime.kernels.tuning import Prefill, Tuning
from quantkit_runtime.kv_cache import KvCache, KvFormat
from quantkit_runtime.runner import Chunk, PagedRunner, TransformersRunner, prefill_facts
from quantkit_runtime.session import make_runner
from tests.families import FAMILY_NAMES, VOCAB, make_tiny
from tests.reference import transformers_model
from tests.runtime import outputs
from tests.runtime.conftest import TINY
from tests.runtime.recorded import Replayed, record

FLOAT = KvFormat(torch.float32, torch.float32)
UNPAGED = {
    "qwen3_next": "LinearAttentionLayer",
    "qwen3_5": "LinearAttentionLayer",
    "qwen3_5_moe": "LinearAttentionLayer",
    "deepseek_v32": "DynamicIndexedLayer",
    "deepseek_v4": "DeepseekV4CSACache",
    "glm_moe_dsa": "DynamicIndexedLayer",
    "minimax_m3": "MiniMaxM3VLSparseCacheLayer",
}
"""Families whose layers keep more than keys and values, with the class that transformers keeps it in."""

Load = Callable[..., LoadedModel]


def prompts(*lengths: int, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def whole(model: Any, ids: list[int]) -> Tensor:
    """Logits `[T, V]` of one forward without any cache."""
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return out


def close(got: Tensor, want: Tensor, limit: float = 1e-5) -> None:
    assert float((got - want).abs().max() / want.abs().max()) < limit


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_packed_chunked_and_decoded_equals_one_forward(load: Load, tmp_path: Path, family: str) -> None:
    """Prompts of different lengths, past every window of 16, in chunks that end within blocks."""
    # an indexer scores with relu: with few heads many positions tie at 0, and which of them topk takes is anybody's
    heads = {"index_n_heads": 32} if UNPAGED.get(family) == "DynamicIndexedLayer" else {}
    loaded = load(make_tiny(family, tmp_path, **heads))
    runner = make_runner(loaded, FLOAT, 20)
    assert (isinstance(runner, TransformersRunner) and UNPAGED[family] in runner.kind) == (family in UNPAGED)
    texts = prompts(37, 5, 20)
    want = [whole(loaded.model, ids) for ids in texts]
    for name, ids in enumerate(texts):
        assert runner.reserve(name, len(ids))
    first = runner.forward([Chunk(0, 0, texts[0][:21]), Chunk(1, 0, texts[1][:4]), Chunk(2, 0, texts[2][:1])])
    close(first, torch.stack([want[0][20], want[1][3], want[2][0]]))
    second = runner.forward([Chunk(0, 21, texts[0][21:36]), Chunk(2, 1, texts[2][1:19])])
    close(second, torch.stack([want[0][35], want[2][18]]))
    third = runner.forward([Chunk(0, 36, texts[0][36:]), Chunk(1, 4, texts[1][4:]), Chunk(2, 19, texts[2][19:])])
    close(third, torch.stack([row[-1] for row in want]))


@pytest.mark.parametrize("keys", [torch.float32, torch.int8])
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3"])
def test_what_no_later_token_sees_is_written_over(
    tiny: Callable[[str], Path], load: Load, family: str, keys: torch.dtype
) -> None:
    """Windows of 16, texts several times as long in chunks of 7 and less, one beside the other: every step's logits
    are those of a cache that keeps all, and with float keys those of one forward."""
    loaded, texts = load(tiny(family)), prompts(83, 70)
    runners = [
        make_runner(loaded, KvFormat(keys, torch.float32, block, chunk), 80, 2)
        for block, chunk in ((4, 7), (3, 7), (4, 512))
    ]
    pools = []
    for runner in runners:
        assert isinstance(runner, PagedRunner)
        assert all(runner.reserve(name, len(ids)) for name, ids in enumerate(texts))
        pools.append({len(layer.keys.data) for layer in runner.cache.layers.values() if layer.spec.window})
    # 15 positions that a chunk of 7 sees before it: at most 7 blocks of 4 or 9 of 3 are touched, for two sequences
    assert pools == [{1 + 2 * 7}, {1 + 2 * 9}, {80}]
    want = [whole(loaded.model, ids) for ids in texts]
    at = [0, 0]
    for sizes in [(7, 7), (7, 3), (2, 7)] * 3 + [(7, 2)] + [(1, 1)] * 9:
        chunks = [Chunk(i, at[i], texts[i][at[i] : at[i] + sizes[i]]) for i in range(2)]
        got = [runner.forward(chunks) for runner in runners]
        at = [chunk.stop for chunk in chunks]
        close(got[0], got[2])
        close(got[1], got[2])
        if keys == torch.float32:
            close(got[0], torch.stack([rows[stop - 1] for rows, stop in zip(want, at, strict=True)]))
    assert min(at) > 3 * 16


# --------------------------------------------------------------------------------------------- engine


def engine(loaded: LoadedModel, blocks: int, **options: Any) -> Engine:
    return Engine(make_runner(loaded, FLOAT, blocks), **options)


@pytest.mark.parametrize("model", TINY)
def test_greedy_equals_transformers_generate(load: Load, model: str) -> None:
    """A batch of different lengths in small chunks, against transformers one by one."""
    folder = outputs.MODELS / model
    tokenizer = load_tokenizer(folder)
    vocab = vocab_size(folder)
    texts = [encode(tokenizer, text, vocab) for text in ("The king said to", "Once", "def main(): return 1 + 2 * (3")]
    drive = engine(load(folder), 20, batch=3, chunk=5, stop=stop_tokens(folder))
    got = drive.generate(texts, 20)
    reference = transformers_model(folder, torch.float32)
    for ids, one in zip(texts, got, strict=True):
        want = reference.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
        assert list(one.tokens) == want[0, len(ids) :].tolist()
    assert drive.counts.preemptions == 0
    assert isinstance(drive.runner, PagedRunner)
    assert drive.runner.cache.free_blocks == 19


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_batches_and_chunks_change_nothing(tiny: Callable[[str], Path], load: Load, family: str) -> None:
    loaded, texts = load(tiny(family)), prompts(30, 1, 17, 9)
    alone = [engine(loaded, 6, chunk=64).generate([ids], 12)[0] for ids in texts]
    for batch, chunk in ((4, 64), (4, 7), (3, 13), (1, 7)):
        assert engine(loaded, 24, batch=batch, chunk=chunk).generate(texts, 12) == alone


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_small_pool_preempts_and_changes_nothing(tiny: Callable[[str], Path], load: Load, family: str) -> None:
    """Also where half of the layers see a window and keep rings of three blocks."""
    loaded, texts = load(tiny(family)), prompts(15, 14, 13)
    roomy = engine(loaded, 24, batch=3).generate(texts, 40)
    runner = make_runner(loaded, replace(FLOAT, chunk=8), 8, sequences=3)
    assert isinstance(runner, PagedRunner)
    assert len(runner.cache.rings) == (2 if family == "gpt_oss" else 1)
    drive = Engine(runner, batch=3, chunk=8)
    assert drive.generate(texts, 40) == roomy
    assert drive.counts.preemptions > 0
    assert runner.cache.free_blocks == 7
    assert drive.counts.positions <= runner.cache.capacity


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_decode_from_fixed_rows_is_that_of_fitting_ones(
    tiny: Callable[[str], Path], load: Load, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 2 and 4 sequences with tables for the longest context: 3 sequences run in those of 4, padded."""
    loaded, texts = load(tiny(family)), prompts(30, 4, 17)
    want = engine(loaded, 13, batch=3).generate(texts, 9)
    runner = make_runner(loaded, replace(FLOAT, chunk=8), 13)
    assert isinstance(runner, PagedRunner)
    assert len(runner.cache.rings) == (2 if family == "gpt_oss" else 1)
    drive = Engine(runner, batch=3, chunk=8)
    graphs = {size: Replayed(runner, size, 6) for size in (4, 2)}
    recorded = {size: (graph, graph.rows, graph.logits) for size, graph in graphs.items()}
    monkeypatch.setattr(runner, "graphs", recorded)
    assert drive.generate(texts[:1], 9) == want[:1]
    assert drive.generate(texts, 9) == want
    assert graphs[2].replays == graphs[4].replays == 8


def test_decode_behind_recorded_tables_runs_eagerly(
    tiny: Callable[[str], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool for several sequences takes one that is longer than the tables of graphs, which are for two blocks."""
    loaded, texts = load(tiny("gpt_oss")), prompts(27, 4)
    want = engine(loaded, 13, batch=2).generate(texts, 9)
    runner = make_runner(loaded, replace(FLOAT, chunk=8), 13)
    assert isinstance(runner, PagedRunner)
    graph = Replayed(runner, 2, 2)
    monkeypatch.setattr(runner, "graphs", {2: (graph, graph.rows, graph.logits)})
    assert Engine(runner, batch=2, chunk=8).generate(texts, 9) == want
    assert graph.replays == 5  # up to position 31; the first token is of prefill


@pytest.fixture
def short_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 24, 12 and 6, in tiles of 4."""
    monkeypatch.setattr(packing, "SMALLEST", 6)
    monkeypatch.setattr(Tuning, "prefill_shape", lambda self, tokens, heads: Prefill(4, 16, 4, 2))


@pytest.mark.usefixtures("short_forms")
@pytest.mark.parametrize("keys", [torch.float32, torch.int8])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "qwen3_moe"])
def test_prefill_of_a_fixed_form_is_that_of_fitting_ones(
    tiny: Callable[[str], Path], load: Load, family: str, keys: torch.dtype
) -> None:
    """Attention by tiles in forwards of 24, 12 and 6 tokens for up to 3 sequences with tables for the longest: what is
    missing is padding. Against attention in torch, sequence by sequence; windows, softcaps, sinks, wide keys."""
    loaded, texts, fmt = load(tiny(family)), prompts(61, 23, 9), KvFormat(keys, torch.float32, 4, 24)
    plain, fitting, fixed = (make_runner(loaded, fmt, 60, 3) for _ in range(3))
    for runner in (plain, fitting, fixed):
        assert isinstance(runner, PagedRunner)
        assert all(runner.reserve(name, len(ids)) for name, ids in enumerate(texts))
        if runner is not plain:
            runner.attend = reference.paged_prefill
    assert isinstance(fixed, PagedRunner)
    assert len(fixed.cache.rings) == (2 if family in ("gpt_oss", "gemma2") else 1)
    record(fixed, 24, 3, 16)
    assert [form.tokens for form in fixed.prefill_graphs] == [24, 12, 6]
    at = [0, 0, 0]
    for counts in [(5, 0, 1), (0, 7, 0), (17, 3, 4), (24, 0, 0), (2, 0, 3), (13, 8, 1), (0, 5, 0)]:
        chunks = [Chunk(i, at[i], texts[i][at[i] : at[i] + size]) for i, size in enumerate(counts) if size]
        want, *got = (runner.forward(chunks) for runner in (plain, fitting, fixed))
        at = [start + size for start, size in zip(at, counts, strict=True)]
        assert all(one.shape == want.shape for one in got)
        for one in got:
            close(one, want)
    assert at == [61, 23, 9]
    assert fixed.replays == {"prefill": 7, "decode": 0}
    assert prefill_facts(fitting)["eager"] == prefill_facts(plain)["eager"] == 7
    assert prefill_facts(fixed)["eager"] == 0


@pytest.mark.usefixtures("short_forms")
def test_what_no_recorded_form_holds_runs_eagerly(tiny: Callable[[str], Path], load: Load) -> None:
    """More tokens, more sequences, longer tables, logits of every token."""
    runner = make_runner(load(tiny("llama")), FLOAT, 40)
    assert isinstance(runner, PagedRunner)
    runner.attend = reference.paged_prefill
    texts = prompts(31, 3, 3, 100)
    for name, ids in enumerate(texts):
        assert runner.reserve(name, len(ids))
    record(runner, 24, 2, 2)
    want = [whole(runner.model, ids) for ids in texts]
    close(runner.forward([Chunk(0, 0, texts[0])]), want[0][-1:])
    close(runner.forward([Chunk(i, 0, texts[i][:2]) for i in range(3)]), torch.stack([rows[1] for rows in want[:3]]))
    close(runner.forward([Chunk(3, 0, texts[3][:9])]), want[3][8:9])
    close(runner.forward([Chunk(0, 0, texts[0][:9])], every_token=True), want[0][:9])
    assert runner.replays["prefill"] == 0
    close(runner.forward([Chunk(0, 0, texts[0][:9])]), want[0][8:9])
    assert runner.replays["prefill"] == 1


@pytest.mark.usefixtures("short_forms")
def test_the_engine_fills_recorded_forms(tiny: Callable[[str], Path], load: Load) -> None:
    loaded, texts = load(tiny("gpt_oss")), prompts(61, 4, 37)
    want = engine(loaded, 40, batch=3, chunk=24).generate(texts, 9)
    runner = make_runner(loaded, replace(FLOAT, chunk=24), 40)
    assert isinstance(runner, PagedRunner)
    runner.attend = reference.paged_prefill
    record(runner, 24, 3, 8)
    drive = Engine(runner, batch=3, chunk=24)
    assert drive.generate(texts, 9) == want
    assert runner.replays["prefill"] == drive.counts.prefills == 5  # 102 tokens by 24


def test_countsof_recorded_forms() -> None:
    assert packing.sizes(512) == [512, 256, 128, 64]
    assert packing.sizes(100) == [100]
    assert packing.sizes(20) == [20]
    assert packing.sizes(1) == [1]


@pytest.mark.parametrize("keys", [torch.float32, torch.int8])
def test_keys_and_values_written_by_one_kernel_are_the_same(
    tiny: Callable[[str], Path], load: Load, keys: torch.dtype
) -> None:
    loaded, texts, fmt = load(tiny("llama")), prompts(30, 4, 17), KvFormat(keys, torch.float32)
    runner = make_runner(loaded, fmt, 13)
    assert isinstance(runner, PagedRunner)
    fused = PagedRunner(loaded.model, make_cache(runner), runner.device, runner.decode, reference.rope_write)
    want, got = (Engine(one, batch=3, chunk=20).generate(texts, 9) for one in (runner, fused))
    assert got == want
    for layer, other in zip(runner.cache.layers.values(), fused.cache.layers.values(), strict=True):
        assert torch.equal(layer.keys.data, other.keys.data)
        assert torch.equal(layer.values.data, other.values.data)


def make_cache(like: PagedRunner) -> KvCache:
    layers = [layer.spec for layer in like.cache.layers.values()]
    return KvCache(layers, like.cache.format, like.cache.free_blocks + 1, like.device)


def test_what_can_never_fit_is_refused(tiny: Callable[[str], Path], load: Load) -> None:
    drive = engine(load(tiny("llama")), 3)
    with pytest.raises(UsageError, match=r"30 tokens and 10 new ones need 39 positions; the KV pool holds 32"):
        drive.generate(prompts(30), 10)
    with pytest.raises(UsageError, match="no tokens"):
        drive.generate([[]], 1)
    assert len(drive.generate(prompts(30), 3)[0].tokens) == 3


def test_a_stop_token_ends_one_text_and_frees_its_blocks(tiny: Callable[[str], Path], load: Load) -> None:
    loaded, texts = load(tiny("llama")), prompts(20, 6)
    free = engine(loaded, 9, batch=2).generate(texts, 10)
    stop = next(token for token in free[0].tokens[1:] if token not in free[1].tokens)
    drive = engine(loaded, 9, batch=2, stop=frozenset({stop}))
    got = drive.generate(texts, 10)
    assert got[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert got[0].stopped
    assert not got[1].stopped
    assert got[1] == free[1]


def test_logits_that_are_not_finite_are_an_error(tiny: Callable[[str], Path], load: Load) -> None:
    loaded = load(tiny("llama"))
    model: Any = loaded.model
    model.model.norm.weight = torch.nn.Parameter(torch.full_like(model.model.norm.weight, torch.nan))
    with pytest.raises(InputError, match="not finite"):
        engine(loaded, 3).generate(prompts(4), 2)
