"""The manifest: canonical, strict, and aware of changes to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.spec import manifest as manifest_module
from quantkit.spec.environment import Environment, changes, distinct, mixed
from quantkit.spec.manifest import Manifest, OutputFile, TensorRecord, manifest_bytes, read_manifest


def example(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "form": "checkpoint",
        "tool_version": "1",
        "options_digest": "0",
        "architecture": "default",
        "model_type": "llama",
        "recipe": {"名": "值"},
        "vocab_size": 3,
        "tied_embeddings": False,
        "source_files": (),
        "files": (OutputFile(name="a/b.safetensors", size=1, sha256="0"),),
        "tensors": (),
        "parameters": 1,
    }
    return Manifest.model_validate({**fields, **changes})


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes(example()))
    found = read_manifest(path)
    assert len(found.digest) == 64
    assert found.model_copy(update={"digest": ""}) == example()
    assert manifest_bytes(found) == path.read_bytes()


def test_roles_of_the_recipe_are_names() -> None:
    assert example().recipe_roles == {}
    assert example(recipe={"roles": {"layers.*.wi": "mlp.up"}}).recipe_roles == {"layers.*.wi": "mlp.up"}
    for wrong in ([], "mlp.up", None, {"layers.*.wi": ["mlp.up"]}, {"layers.*.wi": 1}):
        with pytest.raises(InputError, match="`roles` that are no names"):
            _ = example(recipe={"roles": wrong}).recipe_roles


def test_a_mesh_beyond_all_bounds_is_a_broken_manifest(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes(example()).replace(b'"tp": 1', b'"tp": 99999999'))
    with pytest.raises(InputError, match=r"manifest\.json is not a quantkit manifest") as caught:
        read_manifest(path)
    assert caught.value.items == ("tp 99999999 x pp 1 x dp 1, ep 1 is beyond 65,536 ranks",)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"parameters": 1', b'"parameters": 2'),
        (b"llama", b"lloma"),
        (b'"tool_version"', b' "tool_version"'),
        (b"}\n", b"}"),
    ],
)
def test_changes_are_found(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    raw = manifest_bytes(example())
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(InputError, match="changed or damaged"):
        read_manifest(path)


def test_unknown_and_missing_fields_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    fields = json.loads(manifest_bytes(example()))
    del fields["form"]
    path.write_text(json.dumps({**fields, "extra": 1}))
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert {item.split(":")[0] for item in caught.value.items} == {"form", "extra"}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", ""])
def test_files_stay_inside(name: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes(example(files=(OutputFile(name=name, size=1, sha256="0"),))))
    with pytest.raises(InputError, match="outside its folder"):
        read_manifest(path)


HERE = {"torch": "2.13.0", "driver": "nvidia 550", "kernels": "ab" * 32}


def test_the_environment_is_kept_and_identifies_nothing(tmp_path: Path) -> None:
    path, kept = tmp_path / "manifest.json", distinct([HERE, dict(reversed(HERE.items())), {**HERE, "torch": "2.9.0"}])
    assert len(kept) == 2
    path.write_bytes(manifest_bytes(example(environments=kept)))
    found = read_manifest(path)
    assert found.environments == kept
    path.write_bytes(manifest_bytes(example()))
    assert read_manifest(path).digest == found.digest
    assert b"environments" not in path.read_bytes(), "as manifests were before they had any"


def test_a_changed_environment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    raw = manifest_bytes(example(environments=distinct([HERE])))
    path.write_bytes(raw.replace(b"2.13.0", b"2.12.0"))
    with pytest.raises(InputError, match="changed or damaged"):
        read_manifest(path)


def test_what_changed_is_said_version_by_version() -> None:
    records = distinct([HERE, {**HERE, "torch": "2.9.0"}])
    assert changes([Environment.of(HERE)], HERE) == []
    now = {**HERE, "driver": "", "kernels": "cd" * 32, "numpy": "2"}
    assert [row.line for row in changes(records, now)] == [
        f"kernels {'ab' * 6}, now {'cd' * 6}",
        "torch 2.13.0 / 2.9.0, now 2.13.0",
        "driver nvidia 550, now none",
    ]
    assert mixed(records) == ["torch 2.13.0 / 2.9.0"]
    assert mixed(records[:1]) == []


def records(count: int) -> tuple[TensorRecord, ...]:
    """Records whose names look like what stands between records, as far as JSON lets them."""
    names = [
        f'"tensors": [], "tied_embeddings": }}, {{"alias": \\"{{ 名 {number} \U0001f600' for number in range(count)
    ]
    return tuple(
        TensorRecord(
            name=name,
            sources=(name, "}, {"),
            role="embed",
            file="a/b.safetensors",
            offset=0,
            nbytes=0,
            dtype="I8",
            shape=(0, 7),
            global_shape=(0, 7),
            xxh3=f"{number:032x}",
        )
        for number, name in enumerate(names)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_records_are_read_whole_wherever_the_text_is_cut(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "manifest.json", example(tensors=records(count))
    path.write_bytes(manifest_bytes(written))
    for size in (1, 2, 3, 7, 50, 300, 401, 997, 10**6):
        monkeypatch.setattr(manifest_module, "_CHUNK", size)
        assert read_manifest(path).model_copy(update={"digest": ""}) == written, size


def test_equal_values_of_records_are_one_object(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes(example(tensors=records(3))))
    first, *others = read_manifest(path).tensors
    assert all(other.shape is first.shape and other.file is first.file for other in others)
    assert first.shape is first.global_shape


def test_a_wrong_record_is_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_CHUNK", 100)
    path = tmp_path / "manifest.json"
    raw = json.loads(manifest_bytes(example(tensors=records(5))))
    raw["tensors"][3] |= {"offset": "far", "more": 1}
    path.write_text(json.dumps(raw, sort_keys=True, ensure_ascii=False) + "\n")
    with pytest.raises(InputError, match="is not a quantkit manifest") as caught:
        read_manifest(path)
    assert {item.split(":")[0] for item in caught.value.items} == {"tensors.3.offset", "tensors.3.more"}


def test_a_manifest_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    raw = manifest_bytes(example(tensors=records(2)))
    for stop in range(0, len(raw), 37):
        path.write_bytes(raw[:stop])
        with pytest.raises(InputError, match="is not a quantkit manifest"):
            read_manifest(path)


def test_a_text_without_records_is_not_read_whole_beyond_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte here, gigabytes there: no boundary of records, so nothing could be parsed piece by piece."""
    monkeypatch.setattr(manifest_module, "MAX_JSON_BYTES", 2**20)
    monkeypatch.setattr(manifest_module, "_LONGEST_RECORD", 2**19)
    path = tmp_path / "manifest.json"
    for text in (b'{"dropped": ["' + b"x" * 2**21 + b'"]}', b'{"tensors": [{' + b"x" * 2**21):
        path.write_bytes(text)
        with pytest.raises(InputError, match="no manifest of quantkit"):
            read_manifest(path)
