"""The manifest: canonical, strict, and aware of changes to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.spec.environment import Environment, changes, distinct, mixed
from quantkit.spec.manifest import Manifest, OutputFile, manifest_bytes, read_manifest


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
