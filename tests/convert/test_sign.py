"""Signatures: ours are accepted by model-signing's own command, and any change of folder, signature or key is found."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from quantkit.cli import main
from quantkit.convert.run import convert
from quantkit.convert.signing import signer
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.manifest import CHECKPOINT_NAME, SIGNATURE_NAME, manifest_bytes, read_manifest
from tests.convert.helpers import tree

CHECK = "signature is made with the key, of this manifest"


def write_pair(folder: Path, name: str, private: PrivateKeyTypes, password: bytes | None = None) -> tuple[Path, Path]:
    """PEM files of a private and a public key."""
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    key, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, lock))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(pem, info))  # type: ignore[union-attr]
    return key, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("keys"), "key", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture(scope="module")
def model(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with a file that model-signing leaves out by default, as every download from a hub has one."""
    root = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(minimax, root)
    (root / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    return root


@pytest.fixture(scope="module")
def original(model: Path, keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("signed") / "out"
    convert(model, out, load_recipe("w8a8"), jobs=1, max_shard_bytes=3_000_000)
    signer(keys[0])(out)
    return out


@pytest.fixture
def signed(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "moved")
    return tmp_path / "moved"


def failures(folder: Path, public: Path, *, quick: bool = False) -> dict[str, tuple[str, ...]]:
    report = verify(folder, public_key=public, quick=quick)
    return {check.name: check.failures for check in report.checks if check.failures}


def quantkit(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_moved_and_sound(signed: Path, keys: tuple[Path, Path]) -> None:
    report = verify(signed, public_key=keys[1])
    assert report.passed, report.failures
    count = {check.name: check.count for check in report.checks}[CHECK]
    assert count == len(read_manifest(signed / CHECKPOINT_NAME).files) + 1
    assert [check.note for check in verify(signed).checks if check.name == "signature"] == [
        "not checked: give --public-key"
    ]


def test_the_command_of_model_signing_accepts_it(signed: Path, keys: tuple[Path, Path]) -> None:
    """It hashes every file itself; then one bit is flipped."""
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(signed)]
    command += ["--signature", str(signed / SIGNATURE_NAME), "--public_key", str(keys[1])]
    accepted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stderr
    flip(sorted(signed.glob("*.safetensors"))[0], -100)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert ".safetensors" in refused.stderr


def test_the_rest_of_the_folder_is_that_without_a_signature(
    original: Path, model: Path, tmp_path: Path, w8a8: Recipe
) -> None:
    convert(model, tmp_path / "out", w8a8, jobs=1, max_shard_bytes=3_000_000)
    with_signature = tree(original)
    assert with_signature.pop(SIGNATURE_NAME)
    assert tree(tmp_path / "out") == with_signature


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def forge(folder: Path) -> None:
    """Change a weight and the manifest with it, so that all checksums are right again."""
    import hashlib

    import xxhash

    manifest = read_manifest(folder / CHECKPOINT_NAME)
    file = next(file for file in manifest.files if file.name.endswith(".safetensors"))
    record = next(record for record in manifest.tensors if record.file == file.name and not record.alias)
    flip(folder / file.name, record.offset)
    data = (folder / file.name).read_bytes()
    raw = manifest.model_dump(mode="json", exclude={"digest"})
    for row in raw["files"]:
        if row["name"] == file.name:
            row["sha256"] = hashlib.sha256(data).hexdigest()
    for row in raw["tensors"]:
        if row["name"] == record.name:
            row["xxh3"] = xxhash.xxh3_128(data[record.offset : record.offset + record.nbytes]).hexdigest()
    (folder / CHECKPOINT_NAME).write_bytes(manifest_bytes(type(manifest).model_validate(raw)))


def test_a_forged_folder(signed: Path, keys: tuple[Path, Path]) -> None:
    """Without the key its checksums pass; only the signature tells."""
    forge(signed)
    assert verify(signed).passed
    found = failures(signed, keys[1])
    assert list(found) == [CHECK]
    assert CHECKPOINT_NAME in found[CHECK][0]
    assert list(failures(signed, keys[1], quick=True)) == [CHECK]


def change_statement(folder: Path) -> None:
    """Another statement under the old signature."""
    raw = json.loads((folder / SIGNATURE_NAME).read_text())
    statement = json.loads(base64.b64decode(raw["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["digest"] = "0" * 64
    raw["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (folder / SIGNATURE_NAME).write_text(json.dumps(raw))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: (folder / SIGNATURE_NAME).unlink(),
    "empty": lambda folder: (folder / SIGNATURE_NAME).write_bytes(b""),
    "cut": lambda folder: (folder / SIGNATURE_NAME).write_bytes((folder / SIGNATURE_NAME).read_bytes()[:-40]),
    "no json": lambda folder: (folder / SIGNATURE_NAME).write_bytes(b"\xff\x00"),
    "statement": change_statement,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_signatures(damage: str, signed: Path, keys: tuple[Path, Path]) -> None:
    DAMAGE[damage](signed)
    found = failures(signed, keys[1], quick=True)
    assert list(found) == [CHECK]
    assert found[CHECK][0].startswith(f"{SIGNATURE_NAME}: ")


def test_another_key(signed: Path, tmp_path: Path) -> None:
    _, public = write_pair(tmp_path, "other", ec.generate_private_key(ec.SECP256R1()))
    assert list(failures(signed, public, quick=True)) == [CHECK]


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_curves_and_signing_again(curve: ec.EllipticCurve, signed: Path, tmp_path: Path) -> None:
    key, public = write_pair(tmp_path, "key", ec.generate_private_key(curve))
    signer(key)(signed)
    first = (signed / SIGNATURE_NAME).read_bytes()
    signer(key)(signed)
    assert (signed / SIGNATURE_NAME).read_bytes() != first, "ECDSA draws a number"
    assert not failures(signed, public, quick=True)
    assert sorted(path.name for path in (signed / ".quantkit-work").iterdir()) == ["lock", "options.json"]


def test_keys_that_cannot_be_used(signed: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    bad = {
        "RSA": write_pair(tmp_path, "rsa", rsa.generate_private_key(65537, 2048)),
        "password": write_pair(tmp_path, "locked", ec.generate_private_key(ec.SECP256R1()), b"secret"),
        "curve": write_pair(tmp_path, "curve", ec.generate_private_key(ec.SECP256K1())),
        "missing": (tmp_path / "none.pem", tmp_path / "none.pub"),
        "swapped": (keys[1], keys[0]),
    }
    for name, (key, public) in bad.items():
        with pytest.raises(UsageError, match="cannot be used as a private key") as caught:
            signer(key)
        assert "P-256" in caught.value.hint
        if name != "password":
            with pytest.raises(UsageError, match="cannot be used as a public key"):
                verify(signed, public_key=public)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path]) -> None:
    monkeypatch.setitem(sys.modules, "model_signing.signing", None)
    with pytest.raises(UsageError, match="need the package model-signing") as caught:
        signer(keys[0])
    assert "quantkit[sign]" in caught.value.hint


def test_a_signature_is_not_inherited(signed: Path, tmp_path: Path, w8a8: Recipe, keys: tuple[Path, Path]) -> None:
    manifest = convert(signed, tmp_path / "again", w8a8, jobs=1)
    assert not (tmp_path / "again" / SIGNATURE_NAME).exists()
    assert [row.rule for row in manifest.dropped if row.name == SIGNATURE_NAME] == [
        "signature of the source, not of what is made of it"
    ]
    assert verify(tmp_path / "again", source=signed).passed


def test_commands(minimax: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    key, public = keys
    options = [minimax, "-o", tmp_path / "out", "--jobs", 1]
    wrong = quantkit("convert", *options, "--sign-key", public)
    assert wrong.exit_code == 2
    assert not (tmp_path / "out").exists(), "a wrong key is told before the work"
    assert quantkit("convert", *options, "--sign-key", key).exit_code == 0
    assert quantkit("verify", tmp_path / "out", "--quick", "--public-key", public).exit_code == 0
    (tmp_path / "out" / SIGNATURE_NAME).unlink()
    assert quantkit("verify", tmp_path / "out", "--quick", "--public-key", public).exit_code == 4
    parts = ["convert", minimax, "-o", tmp_path / "parts", "--jobs", 1, "--part", "1/1"]
    assert quantkit(*parts, "--sign-key", key).exit_code == 2
    assert quantkit(*parts).exit_code == 0
    assert quantkit("merge-manifest", tmp_path / "parts", "--source", minimax, "--sign", key).exit_code == 0
    assert quantkit("verify", tmp_path / "parts", "--quick", "--public-key", public).exit_code == 0
