"""`convert --layout`: packed shards against plain ones, element by element, and their way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from quantkit.archs import Key
from quantkit.checkpoint.reader import OpenFiles
from quantkit.cli import main
from quantkit.convert import packing
from quantkit.convert.merge import merge
from quantkit.convert.packing import packed, stored_rows
from quantkit.convert.run import convert
from quantkit.convert.units import How, PlannedTensor
from quantkit.convert.verify import verify
from quantkit.errors import QuantkitError
from quantkit.recipe import Recipe
from quantkit.spec.layout import LAYOUTS
from quantkit.spec.manifest import Manifest, TensorRecord
from quantkit.spec.mesh import Mesh
from tests.convert.helpers import tensors, tree
from tests.families import make_tiny
from tests.spec.test_layout import ADDRESSES, ref_pack

PACKED = ("aiter_16x16", "marlin_k64")
MESH = Mesh(tp=2, pp=2, ep=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts and widths that every layout can tile after a split over two ranks."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_local_experts": 3}
    return make_tiny("mixtral", tmp_path_factory.mktemp("tiles") / "model", **sizes)


def sharded(model: Path, out: Path, recipe: Recipe, layout: str, **options: object) -> Manifest:
    return convert(model, out, recipe, **{"form": "sharded", "mesh": MESH, "jobs": 1, "layout": layout, **options})  # type: ignore[arg-type]


def by_file(folder: Path, record: TensorRecord) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(folder / record.file, "pt") as file:
        found: torch.Tensor = file.get_tensor(record.name)
        return found


@pytest.mark.parametrize("layout", PACKED)
def test_every_int8_weight_is_packed_and_nothing_else(layout: str, model: Path, tmp_path: Path, w8a8: Recipe) -> None:
    plain = sharded(model, tmp_path / "plain", w8a8, "plain")
    found = sharded(model, tmp_path / layout, w8a8, layout)
    assert [(r.name, r.file, r.nbytes) for r in found.tensors] == [(r.name, r.file, r.nbytes) for r in plain.tensors]
    assert {record.layout for record in found.tensors if record.dtype == "I8"} == {layout}
    for before, after in zip(plain.tensors, found.tensors, strict=True):
        ours, theirs = by_file(tmp_path / layout, after), by_file(tmp_path / "plain", before)
        if before.dtype != "I8":
            assert torch.equal(ours, theirs)
            assert (after.layout, after.target, after.shape) == ("plain", "", before.shape)
            continue
        assert after.target == LAYOUTS[layout].target
        matrices = theirs if theirs.dim() == 3 else theirs[None]
        slots = ours if theirs.dim() == 3 else ours[None]
        for slot, matrix in zip(slots, matrices, strict=True):
            assert slot.flatten().tolist() == ref_pack(matrix.numpy(), ADDRESSES[layout]).tolist()


@pytest.mark.parametrize("layout", PACKED)
def test_back_to_a_checkpoint_and_to_another_mesh(layout: str, model: Path, tmp_path: Path, w8a8: Recipe) -> None:
    folder = tmp_path / layout
    sharded(model, folder, w8a8, layout)
    report = verify(folder, source=model)
    assert report.passed, report.failures
    direct = convert(model, tmp_path / "direct", w8a8, jobs=1)
    merge(folder, tmp_path / "merged", jobs=1)
    names = [file.name for file in direct.files]
    assert {n: d for n, d in tree(tmp_path / "merged").items() if n in names} == {
        n: d for n, d in tree(tmp_path / "direct").items() if n in names
    }
    one = {"mesh": Mesh()}
    other = next(name for name in PACKED if name != layout)
    sharded(folder, tmp_path / "again", w8a8, other, **one)
    sharded(model, tmp_path / "at once", w8a8, other, **one)
    again, at_once = tensors(tmp_path / "again"), tensors(tmp_path / "at once")
    assert again.keys() == at_once.keys()
    assert all(torch.equal(again[name], at_once[name]) for name in again)


def test_verify_finds_a_wrong_packing(
    model: Path, tmp_path: Path, w8a8: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows packed as if nothing were to be done: every checksum is right, only the source tells."""
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.convert.execute.packed", lambda _, rows: rows)
        sharded(model, tmp_path / "out", w8a8, "aiter_16x16")
    assert verify(tmp_path / "out").passed
    failures = verify(tmp_path / "out", source=model).failures
    assert any("expert.down.weight" in failure and "row" in failure for failure in failures)


def test_all_misfits_before_the_first_byte(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    """Hidden size 160 and experts of 96 / 2 columns: no multiples of 64."""
    with pytest.raises(QuantkitError) as caught:
        sharded(minimax, tmp_path / "out", w8a8, "marlin_k64", mesh=Mesh(tp=2))
    assert caught.value.exit_code == 2
    for name, shape, k in (
        ("attn.qkv", "[128, 160]", "K = 160 is no multiple of 64; nearest legal K: 128, 192"),
        ("expert.gate_up", "[96, 160]", "K = 160"),
        ("expert.down", "[160, 48]", "K = 48 is no multiple of 64; nearest legal K: 64"),
    ):
        assert any(
            f"layers.0.{name}.weight and 5 like it, {shape}" in line and k in line for line in caught.value.items
        ), caught.value.items
    assert len(caught.value.items) == 3
    assert not (tmp_path / "out").exists()


def test_what_has_no_layout(minimax: Path, tmp_path: Path, w8a8: Recipe, bf16: Recipe) -> None:
    for options, found in (
        ({"form": "checkpoint", "mesh": None}, "layout aiter_16x16 needs --format sharded"),
        ({"layout": "tiles"}, "no layout is called 'tiles'"),
        ({"recipe": bf16, "mesh": None}, "this recipe quantizes nothing"),
    ):
        given = {"recipe": w8a8, "form": "sharded", "mesh": Mesh(), "layout": "aiter_16x16", **options}
        with pytest.raises(QuantkitError) as caught:
            convert(minimax, tmp_path / "out", jobs=1, **given)
        assert caught.value.exit_code == 2
        assert found in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_on_the_command_line(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    common = ["convert", str(model), "-o", out, "--format", "sharded", "--jobs", "1"]
    assert CliRunner().invoke(main, [*common, "--layout", "marlin_k64"]).exit_code == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert {row["layout"] for row in manifest["tensors"]} == {"plain", "marlin_k64"}
    other = CliRunner().invoke(main, common)
    assert other.exit_code == 2
    assert 'layout: "marlin_k64" there, "plain" now' in other.output
    shown = CliRunner().invoke(main, ["convert", "--help"]).output
    assert all(name in shown for name in LAYOUTS), "the help names every row of the table"


# ------------------------------------------------------------------------------------------------- streams


def planned(layout: str, shape: tuple[int, ...]) -> PlannedTensor:
    return PlannedTensor("w", Key(0, "expert.down"), How.INT8, "I8", shape, (), layout=layout)


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("step", [1, 7, 16, 50, 1000])
def test_a_stream_of_any_pieces(layout: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_EMIT_BYTES", 5000)
    w = torch.randint(-128, 128, (3, 48, 192), dtype=torch.int8, generator=torch.Generator().manual_seed(step))
    rows = w.flatten(0, 1)
    pieces = list(packed(planned(layout, (3, 48, 192)), iter(rows.split(step))))
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), LAYOUTS[layout].pack(w).flatten())


@pytest.mark.parametrize(("layout", "bound"), [("aiter_16x16", 16 * 512), ("marlin_k64", 4096 * 64)])
def test_pieces_stay_small(layout: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of rows, or a block of K: never the packed matrix in one piece."""
    monkeypatch.setattr(packing, "_EMIT_BYTES", 4096 * 64)

    def rows() -> Iterator[torch.Tensor]:
        for _ in range(4096):
            yield torch.zeros(1, 512, dtype=torch.int8)

    assert max(piece.numel() for piece in packed(planned(layout, (4096, 512)), rows())) == bound


@pytest.mark.parametrize("layout", ["plain", *PACKED])
def test_any_rows_are_read_back(layout: str, tmp_path: Path) -> None:
    w = torch.randint(-128, 128, (3, 48, 192), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    data = LAYOUTS[layout].pack(w).numpy().tobytes()
    (tmp_path / "file").write_bytes(b"header" + data)
    shape = LAYOUTS[layout].packed_shape((3, 48, 192))
    record = TensorRecord(
        name="w",
        sources=(),
        role="expert.down",
        layer=0,
        experts=(4, 5, 6),
        file="file",
        offset=6,
        nbytes=len(data),
        dtype="I8",
        shape=shape,
        global_shape=(9, 48, 192),
        layout=layout,
        xxh3="",
    )
    files = OpenFiles(tmp_path)
    for slot in range(3):
        for start, stop in ((0, 48), (0, 1), (5, 9), (15, 17), (31, 48), (16, 32)):
            assert torch.equal(stored_rows(files, record, slot, start, stop), w[slot, start:stop])
    files.close()


@pytest.mark.parametrize("layout", PACKED)
def test_the_runtime_refuses_what_it_has_no_kernel_for(layout: str, model: Path, tmp_path: Path, w8a8: Recipe) -> None:
    from quantkit_runtime.errors import UnsupportedDtype
    from quantkit_runtime.loader import open_model

    sharded(model, tmp_path / "out", w8a8, layout, mesh=Mesh())
    with pytest.raises(UnsupportedDtype) as caught:
        open_model(tmp_path / "out")
    assert f"is packed in layout {layout} for {LAYOUTS[layout].target}" in caught.value.message
    assert "--layout plain" in caught.value.hint
    sharded(tmp_path / "out", tmp_path / "plain", w8a8, "plain", mesh=Mesh())
    with open_model(tmp_path / "plain") as files:
        assert files.tensors
