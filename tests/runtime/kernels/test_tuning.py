"""Tables of tile sizes: the user's goes first, others stay, a broken one is named; the command without a card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantkit.errors import InputError
from quantkit_instruments.cli import main
from quantkit_runtime.kernels import registry, tuning


@pytest.fixture(autouse=True)
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tables" / "tuning.json"))
    tuning.tuning.cache_clear()
    yield tmp_path / "tables" / "tuning.json"
    tuning.tuning.cache_clear()


@pytest.mark.parametrize("arch", ["sm_90", "gfx928", "x86_64"])
def test_every_card_has_a_table_that_fits_any_size(arch: str) -> None:
    table = tuning.table(arch)
    for grouped in (False, True):
        for rows in (1, 16, 17, 4096, 1 << 20):
            tile = table.gemm_tile(rows, grouped_activations=grouped)
            assert all(size & (size - 1) == 0 for size in (tile.bm, tile.bn, tile.bk, tile.warps))
        for slots in (1, 512, 1 << 20):
            block = table.expert_block(slots, 8)
            assert table.grouped_tile(block, grouped_activations=grouped).bm == block
    for tokens in (1, 64, 65, 512, 1 << 20):
        shape = table.prefill_shape(tokens, 32)
        assert all(size & (size - 1) == 0 for size in (shape.queries, shape.bn, shape.warps))
        assert min(shape.queries, shape.bn) >= 16
    assert table.gemv_rows <= 8
    assert all(table.quantize_warps(1 << size) for size in range(20))


def test_shares_of_a_sequence_are_a_power_of_two_and_no_more_than_steps() -> None:
    attention = tuning.Attention(bn=64, warps=4, stages=3, programs=528)
    assert [attention.shares(8, length) for length in (1, 64, 65, 512, 1 << 20)] == [1, 1, 2, 8, 64]
    assert attention.shares(1000, 1 << 20) == 1
    assert [attention.stages_of(length, 8) for length in (64, 1024, 1 << 20)] == [1, 2, 3]


def test_steps_of_prefill_attention_shrink_with_wide_heads() -> None:
    """Bytes of a key and a value: 64 + 64, 128 + 128, 256 + 128 and 256 + 256 of bfloat16; 256 + 256 of float32."""
    shape = tuning.Prefill(queries=64, bn=64, warps=4, stages=3)
    assert [shape.fitted(row) for row in (256, 512, 768, 1024, 2048)] == [(64, 3), (64, 3), (32, 2), (32, 2), (16, 2)]


@pytest.mark.parametrize("arch", ["sm_90", "gfx928"])
def test_a_table_from_before_prefill_attention_stays_good(user_file: Path, arch: str) -> None:
    mine = replace(tuning.table(arch), gemv_rows=1)
    tuning.write(user_file, arch, mine)
    tables = json.loads(user_file.read_text())
    del tables[arch]["prefill"]
    user_file.write_text(json.dumps(tables))
    assert tuning.table(arch) == mine


def test_a_written_table_goes_first_and_leaves_other_cards_alone(user_file: Path) -> None:
    mine = replace(tuning.table("gfx928"), gemv_rows=1)
    tuning.write(user_file, "gfx906", tuning.table("gfx906"))
    tuning.write(user_file, "gfx928", mine)
    assert tuning.table("gfx928") == mine
    assert tuning.table("gfx936") == tuning.table("gfx999")
    assert sorted(json.loads(user_file.read_text())) == ["gfx906", "gfx928"]
    assert [path.name for path in user_file.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"gfx928": {}}', '{"gfx928": {"gemm": 3}}', '{"gfx928": 3}'])
def test_a_broken_table_is_named(user_file: Path, text: str) -> None:
    user_file.parent.mkdir()
    user_file.write_text(text)
    with pytest.raises(InputError, match="is no tuning table"):
        tuning.table("gfx928")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "prefill has no rows"),
        ([[64, {"queries": 0, "bn": 64, "warps": 4, "stages": 2}]], "queries is 0"),
        ([[64, {"queries": 16, "bn": "64", "warps": 4, "stages": 2}]], "bn is '64'"),
    ],
)
def test_a_shape_that_no_kernel_has_is_named(user_file: Path, rows: list[object], complaint: str) -> None:
    """Any of them would end the start-up self-test with a traceback."""
    tuning.write(user_file, "gfx928", tuning.table("gfx928"))
    tables = json.loads(user_file.read_text())
    tables["gfx928"]["prefill"] = rows
    user_file.write_text(json.dumps(tables))
    with pytest.raises(InputError, match=complaint):
        tuning.table("gfx928")


def test_tune_without_a_card_says_so(user_file: Path) -> None:
    done = CliRunner().invoke(main, ["tune"])
    assert done.exit_code == 2
    assert "no card to tune for" in done.output
    assert not user_file.exists()


def test_kernels_of_triton_and_the_compiler_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "torch")
    registry._usable.cache_clear()
    try:
        assert registry.names("w8a8_gemm", "hip") == ["torch._int_mm"]
        assert registry.names("norm_quantize", "hip") == ["torch"]
        assert not registry.has("grouped_gemm", "hip")
        assert f"w8a8_gemm by triton: {registry.VARIABLE}=torch" in registry.skipped("hip")
    finally:
        registry._usable.cache_clear()
        registry._skipped.clear()
