"""A sealed manifest from anywhere: it may neither lead outside its folder nor contradict itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.convert.merge import merge
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import InputError
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.manifest import (
    CHECKPOINT_NAME,
    SHARDED_NAME,
    Manifest,
    RankFiles,
    TensorRecord,
    manifest_bytes,
    read_manifest,
)
from quantkit.spec.mesh import Mesh

Change = Callable[[TensorRecord], dict[str, Any]]


@pytest.fixture(scope="module")
def shards(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    convert(tiny("qwen3_moe"), out, load_recipe("w8a8"), form="sharded", mesh=Mesh(tp=2, ep=2), jobs=1)
    return out


@pytest.fixture
def copy(shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards, tmp_path / "copy"))


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / SHARDED_NAME
    path.write_bytes(manifest_bytes(read_manifest(path).model_copy(update=changes)))


def stacked(manifest: Manifest) -> int:
    """A record with rows, columns and experts: one rank's gate_up of some layer."""
    return next(i for i, row in enumerate(manifest.tensors) if row.dtype == "I8" and row.experts and row.slices)


def rewrite_tensor(folder: Path, change: Change) -> None:
    manifest = read_manifest(folder / SHARDED_NAME)
    at, rows = stacked(manifest), list(manifest.tensors)
    rows[at] = replace(rows[at], **change(rows[at]))
    rewrite(folder, tensors=tuple(rows))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"offset": 10**15}, "do not lie in the file"),
        (lambda t: {"offset": -8}, "do not lie in the file"),
        (lambda t: {"nbytes": t.nbytes + 1}, "does not take"),
        (lambda t: {"shape": (-1, -1, t.nbytes)}, "no tensor has the shape"),
        (lambda t: {"shape": (t.nbytes,)}, "is no part of"),
        (lambda t: {"shape": (1, 1, t.nbytes)}, "does not hold 3 experts"),
        (lambda t: {"shape": (t.shape[0], 2 * t.shape[1], t.shape[2] // 2)}, "does not hold the slices of"),
        (lambda t: {"global_shape": (5, 10**9, 10**9)}, "that it should"),
        (lambda t: {"global_shape": (5, *(n - 1 for n in t.global_shape[1:]))}, "does not lie in"),
        (lambda t: {"slices": ((1, 0, 10**6),)}, "does not lie in"),
        (lambda t: {"slices": ((1, -4, 0),)}, "does not lie in"),
        (lambda t: {"slices": ((1, 4, 2),)}, "does not lie in"),
        (lambda t: {"slices": ((7, 0, 1),)}, "does not lie in"),
        (lambda t: {"slices": ((0, 0, 1), *t.slices)}, "are not runs of rows"),
        (lambda t: {"slices": (*t.slices, (2, 0, 1), (2, 1, 2))}, "are not runs of rows"),
        (lambda t: {"experts": (*t.experts, 0)}, "does not hold 4 experts"),
        (lambda t: {"dtype": "XX"}, "no dtype is called XX"),
        (lambda t: {"layout": "nope"}, "no layout is called nope"),
        (lambda t: {"target": "gfx9xx"}, "layout plain is not for the target gfx9xx"),
        (lambda t: {"layout": "aiter_16x16"}, "layout aiter_16x16 is not for the target (none)"),
        (lambda t: {"scheme": "keep"}, "I8 with scales is not of the scheme keep"),
        (lambda t: {"scale": ""}, "I8 without scales is not of the scheme w8a8"),
        (lambda t: {"sources": (*t.sources, t.sources[0])}, "one of its sources stands twice"),
        (lambda t: {"scale": "nope"}, "its scales nope are not in the file"),
        (lambda t: {"scheme": "nope"}, "no scheme is called nope"),
        (lambda t: {"experts": t.experts[::-1]}, "are of other rows or experts"),
        (lambda t: {"slices": (*t.slices[1::-1], *t.slices[2:])}, "are of other rows or experts"),
        (lambda t: {"alias": "nope"}, "its alias nope is not in the file"),
        (lambda t: {"alias": t.name}, "is not in the file"),
        (lambda t: {"file": "gone.safetensors"}, "its file is none of the files"),
        (lambda t: {"role": "nope"}, "no role is called nope"),
    ],
)
def test_a_record_that_contradicts_itself(change: Change, words: str, copy: Path, tmp_path: Path) -> None:
    rewrite_tensor(copy, change)
    with pytest.raises(InputError) as caught:
        merge(copy, tmp_path / "out", jobs=1)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert words in "\n".join(verify(copy).failures)


@pytest.mark.parametrize(
    "turn", [lambda rows, columns: (columns, rows), lambda rows, columns: (2 * rows, columns // 2)]
)
def test_a_whole_tensor_of_another_shape(turn: Callable[[int, int], tuple[int, int]], copy: Path) -> None:
    """Of as many bytes: nothing but the whole tensor's shape contradicts it."""
    manifest = read_manifest(copy / SHARDED_NAME)
    rows = list(manifest.tensors)
    at = next(i for i, t in enumerate(rows) if not t.slices and len(t.shape) == 2 and 1 < t.shape[1] != t.shape[0])
    rows[at] = replace(rows[at], shape=turn(*rows[at].shape))
    rewrite(copy, tensors=tuple(rows))
    found = f"{rows[at].name}: {list(rows[at].shape)} does not hold the whole {list(rows[at].global_shape)}"
    assert any(found in failure for failure in verify(copy, quick=True).failures)


@pytest.mark.parametrize("name", ["../{}", "{}\0", "a/../../{}"])
def test_a_tensor_outside_the_folder_is_not_read(name: str, copy: Path, tmp_path: Path) -> None:
    """The bytes are there, so nothing but the name can refuse them."""
    manifest = read_manifest(copy / SHARDED_NAME)
    moved = manifest.tensors[0].file
    shutil.copyfile(copy / moved, tmp_path / moved)
    away = name.format(moved)
    records = tuple(replace(row, file=away) if row.file == moved else row for row in manifest.tensors)
    rewrite(copy, tensors=records, files=tuple(file for file in manifest.files if file.name != moved))
    with pytest.raises(InputError, match="names files outside its folder") as caught:
        merge(copy, tmp_path / "out", jobs=1)
    assert caught.value.items == (away,)


@pytest.mark.parametrize("field", ["source_files", "ranks"])
def test_other_names_outside_the_folder(field: str, copy: Path) -> None:
    rows: tuple[Any, ...] = getattr(read_manifest(copy / SHARDED_NAME), field)
    change = {"name": "../x"} if field == "source_files" else {"files": ("../x",)}
    rewrite(copy, **{field: (rows[0].model_copy(update=change), *rows[1:])})
    with pytest.raises(InputError, match="names files outside its folder"):
        read_manifest(copy / SHARDED_NAME)


def test_ranks_and_files_twice(copy: Path) -> None:
    manifest = read_manifest(copy / SHARDED_NAME)
    rewrite(copy, ranks=(*manifest.ranks[1:], manifest.ranks[1]), files=(*manifest.files, manifest.files[0]))
    with pytest.raises(InputError, match="contradicts itself") as caught:
        read_manifest(copy / SHARDED_NAME)
    assert caught.value.items == (
        "files: a name stands twice",
        "ranks: [1, 1] of a mesh of 2",
    )


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("tensors", "it does not stand by file and offset"),
        ("files", "files: they are not in the order of their names"),
        ("ranks", "ranks: [1, 0] are not in order"),
    ],
)
def test_what_stands_in_another_order(field: str, words: str, copy: Path) -> None:
    rewrite(copy, **{field: getattr(read_manifest(copy / SHARDED_NAME), field)[::-1]})
    assert words in "\n".join(verify(copy, quick=True).failures)


def test_what_stands_twice(copy: Path) -> None:
    manifest = read_manifest(copy / SHARDED_NAME)
    first, *others = manifest.ranks
    for change, words in (
        ({"tensors": (manifest.tensors[0], *manifest.tensors)}, f"{manifest.tensors[0].name} stands twice"),
        ({"source_files": manifest.source_files * 2}, "source_files: they do not stand once"),
        ({"ranks": (first.model_copy(update={"files": first.files * 2}), *others)}, "rank 0: it reads a file twice"),
        (
            {"tensors": (manifest.tensors[0], replace(manifest.tensors[0], name="x", alias=manifest.tensors[0].name))},
            "x: an alias, but no ends are tied",
        ),
    ):
        (copy / SHARDED_NAME).write_bytes(manifest_bytes(manifest.model_copy(update=change)))
        assert words in "\n".join(verify(copy, quick=True).failures)


def test_names_of_a_checkpoint_are_those_of_its_roles(
    tiny: Callable[[str], Path], w8a8: Recipe, tmp_path: Path
) -> None:
    convert(tiny("qwen3_moe"), tmp_path / "out", w8a8, jobs=1)
    path = tmp_path / "out" / CHECKPOINT_NAME
    manifest, swap = read_manifest(path), {"attn.q_norm": "attn.k_norm", "attn.k_norm": "attn.q_norm"}
    rows = tuple(replace(row, role=swap.get(row.role, row.role)) for row in manifest.tensors)
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"tensors": rows})))
    assert [f for f in verify(tmp_path / "out").failures if "q_norm.weight: its name is not of" in f]


def test_pieces_that_overlap_and_leave_a_hole(copy: Path, tmp_path: Path) -> None:
    """The areas add up to the whole tensor, but two ranks claim the same rows and none holds the rest."""

    def onto_the_first(record: TensorRecord) -> TensorRecord:
        (dim, _, stop), *others = record.slices
        return replace(record, slices=((dim, stop // 2 - 2, stop - 2), *others))

    manifest = read_manifest(copy / SHARDED_NAME)
    at = next(i for i, t in enumerate(manifest.tensors) if t.name == "embed.weight" and t.slices and t.slices[0][1])
    rows = list(manifest.tensors)
    rows[at] = onto_the_first(rows[at])
    rewrite(copy, tensors=tuple(rows))
    assert [f for f in verify(copy).failures if "embed.weight" in f and "overlap" in f]
    with pytest.raises(InputError, match="overlap"):
        merge(copy, tmp_path / "out", jobs=1)


@pytest.mark.parametrize("change", [{"vocab_size": 7}, {"model_type": "llama"}, {"architecture": "mixtral"}])
def test_what_the_manifest_says_of_the_model_is_held_against_the_config(change: dict[str, object], copy: Path) -> None:
    rewrite(copy, **change)
    assert [
        f for f in verify(copy).failures if f.startswith("manifest and config.json agree") and next(iter(change)) in f
    ]


def test_named_sources_are_those_of_the_source(copy: Path, tiny: Callable[[str], Path], w8a8: Recipe) -> None:
    assert verify(copy, source=tiny("qwen3_moe")).passed
    rewrite_tensor(copy, lambda t: {"sources": ("model.layers.0.nothing.weight", *t.sources[1:])})
    failures = "\n".join(verify(copy, source=tiny("qwen3_moe")).failures)
    assert "model.layers.0.nothing.weight: not in the source" in failures


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rank: {"files": rank.files[:-1]}, "rank 0: no file of it holds a part of "),
        (lambda rank: {"files": ()}, "rank 0: its files hold the layers []"),
        (lambda rank: {"layers": rank.layers[:-1]}, "rank 0: its files hold the layers [0, 1, 2], not [0, 1]"),
        (lambda rank: {"experts": (4, *rank.experts[1:])}, "holds the experts [0, 1, 2], not [4, 1, 2]"),
    ],
)
def test_a_rank_that_does_not_get_what_is_listed(
    change: Callable[[RankFiles], dict[str, Any]], words: str, copy: Path
) -> None:
    first, *others = read_manifest(copy / SHARDED_NAME).ranks
    rewrite(copy, ranks=(first.model_copy(update=change(first)), *others))
    assert words in "\n".join(verify(copy, quick=True).failures)


def test_a_file_that_no_rank_reads(copy: Path) -> None:
    first, second = read_manifest(copy / SHARDED_NAME).ranks
    rewrite(copy, ranks=(first, second.model_copy(update={"files": first.files})))
    assert [f for f in verify(copy, quick=True).failures if "no rank reads it" in f]


def test_a_role_of_other_sizes(copy: Path, tiny: Callable[[str], Path]) -> None:
    """Columns of the source that the written tensor does not have are a failure, not a crash."""
    manifest = read_manifest(copy / SHARDED_NAME)
    rows = [replace(t, role="attn.qkv") if t.role == "attn.o" else t for t in manifest.tensors]
    rewrite(copy, tensors=tuple(rows))
    assert [
        f for f in verify(copy, source=tiny("qwen3_moe")).failures if "attn.o.weight" in f and "the source's are" in f
    ]


def test_rows_that_no_rank_holds(copy: Path) -> None:
    """A part that shrinks leaves a hole without overlap: the areas alone tell it."""
    manifest = read_manifest(copy / SHARDED_NAME)
    at = next(i for i, t in enumerate(manifest.tensors) if t.name == "embed.weight" and t.slices[0][1])
    rows = list(manifest.tensors)
    (dim, start, stop), *others = rows[at].slices
    rows[at] = replace(rows[at], slices=((dim, start, stop - 1), *others))
    rewrite(copy, tensors=tuple(rows))
    assert [f for f in verify(copy, quick=True).failures if "embed.weight: the ranks hold" in f]


def test_replicas_that_differ(copy: Path) -> None:
    """A replicated tensor of one rank has other bytes, with right checksums of its own."""
    manifest = read_manifest(copy / SHARDED_NAME)
    at = next(i for i, t in enumerate(manifest.tensors) if t.role == "router")
    rows = list(manifest.tensors)
    rows[at] = replace(rows[at], xxh3="0" * 32)
    rewrite(copy, tensors=tuple(rows))
    assert [f for f in verify(copy, quick=True).failures if "differs from the same part in" in f]


def test_an_expert_that_no_rank_holds(copy: Path) -> None:
    ranks = read_manifest(copy / SHARDED_NAME).ranks
    rewrite(copy, ranks=tuple(rank.model_copy(update={"experts": rank.experts[1:]}) for rank in ranks))
    assert [f for f in verify(copy, quick=True).failures if "stage 0: no rank holds expert 0" in f]


def test_a_listed_name_that_no_file_can_have_is_missing(copy: Path) -> None:
    manifest = read_manifest(copy / SHARDED_NAME)
    last = manifest.files[-1].model_copy(update={"name": "z" * 300})
    rewrite(copy, files=(*manifest.files, last))
    assert f"{last.name}: missing" in "\n".join(verify(copy, quick=True).failures)


def test_parts_of_one_name_that_are_of_several_tensors(copy: Path, tmp_path: Path) -> None:
    """Each rank's record is sound by itself; only together they make no tensor."""
    rows = list(read_manifest(copy / SHARDED_NAME).tensors)
    at = next(i for i, row in enumerate(rows) if not row.experts and row.part == "weight" and not row.scale)
    rows[at] = replace(rows[at], experts=(3,))
    rewrite(copy, tensors=tuple(rows))
    with pytest.raises(InputError, match="the parts of its ranks are not of the same tensors") as caught:
        merge(copy, tmp_path / "out", jobs=1)
    assert set(caught.value.items) == {rows[at].name}


def test_a_fused_tensor_whose_parts_stand_in_another_order(copy: Path, tmp_path: Path) -> None:
    """The runs add up to the rows that are there, whatever their order."""

    def turned(row: TensorRecord) -> TensorRecord:
        runs = tuple(item for item in row.slices if item[0] == 0)
        return replace(row, slices=(*runs[::-1], *row.slices[len(runs) :])) if row.role == "attn.qkv" else row

    rewrite(copy, tensors=tuple(map(turned, read_manifest(copy / SHARDED_NAME).tensors)))
    with pytest.raises(InputError, match=r"does not hold attn\.q, attn\.k, attn\.v one after the other"):
        merge(copy, tmp_path / "out", jobs=1)
