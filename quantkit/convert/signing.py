"""Signatures of converted folders, through the `model-signing` package (OpenSSF) and a key file; no network.

`model.sig` lists every file with its sha256 and the manifest with its own, and stands outside both, so a folder without
its signature is byte for byte the unsigned one. The checksums come from the manifest, which were taken while the files
were written: signing reads no weights. `model_signing verify key` of that package accepts the same file.

An ECDSA signature has a random part: signing again gives other bytes for the same statement.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quantkit.checkpoint.writer import write_atomic
from quantkit.convert.nonweights import BESIDE_THE_RESULT
from quantkit.errors import InputError, UsageError
from quantkit.outdir import WORK_NAME
from quantkit.spec.files import is_file
from quantkit.spec.manifest import SIGNATURE_NAME, manifest_path, read_manifest

_GIT = frozenset({".gitattributes", ".gitignore"})
"""Left out of signatures by the package's convention; the signed manifest has their checksums."""

_KEY_HINT = "give an elliptic-curve key (P-256, P-384 or P-521) as PEM without a password"


def signer(key: Path) -> Callable[[Path], Path]:
    """A function that signs a converted folder with a private key and returns the signature's path.

    Raises:
        UsageError: the package is not installed, or the key cannot be used.
    """
    config = _module("signing").Config()
    try:
        config.use_elliptic_key_signer(private_key=key)
    except Exception as error:  # the package lets through whatever its libraries raise
        raise UsageError(f"{key} cannot be used as a private key: {_reason(error)}", _KEY_HINT) from error

    def sign(folder: Path) -> Path:
        raw = folder / WORK_NAME / SIGNATURE_NAME
        config.set_hashing_config(_hashing(folder)).sign(folder, raw)
        write_atomic(folder / SIGNATURE_NAME, [raw.read_bytes()])
        raw.unlink()
        return folder / SIGNATURE_NAME

    return sign


def verifier(key: Path) -> Callable[[Path], tuple[int, list[str], str]]:
    """A check of a folder's signature against a public key: files signed, failures, note.

    The check holds the signature against the manifest; the manifest's checksums must be held against the files.

    Raises:
        UsageError: the package is not installed, or the key cannot be used.
    """
    config = _module("verifying").Config()
    try:
        config.use_elliptic_key_verifier(public_key=key)
    except Exception as error:  # as above
        raise UsageError(f"{key} cannot be used as a public key: {_reason(error)}", _KEY_HINT) from error

    def check(folder: Path) -> tuple[int, list[str], str]:
        if not is_file(folder / SIGNATURE_NAME):
            return 0, [f"{SIGNATURE_NAME}: missing"], ""
        hashing = _hashing(folder)
        try:
            config.set_hashing_config(hashing).verify(folder, folder / SIGNATURE_NAME)
        except Exception as error:  # a forged file may fail in any of the package's libraries
            return 0, [f"{SIGNATURE_NAME}: {_reason(error)}"], ""
        return len(read_manifest(_manifest_of(folder)).files) + 1, [], ""

    return check


def _manifest_of(folder: Path) -> Path:
    path = manifest_path(folder)
    if path is None:
        raise InputError(f"{folder} has no manifest, so nothing of it can be signed", "give an output of quantkit")
    return path


def _hashing(folder: Path) -> Any:
    """A hashing configuration of the package that takes the files' checksums from the manifest."""
    hashing, statement = _module("hashing"), _module("manifest")
    path = _manifest_of(folder)
    recorded = {file.name: file.sha256 for file in read_manifest(path).files if file.name not in _GIT}

    class Recorded(hashing.Config):  # type: ignore[misc, name-defined]
        def hash(self, model_path: Path, *, files_to_hash: Iterable[Path] | None = None) -> Any:
            own = super().hash(model_path, files_to_hash=[path])
            digest = next(own.resource_descriptors()).digest
            digests = {path.name: digest}
            for name, sha256 in recorded.items():
                digests[name] = type(digest)(digest.algorithm, bytes.fromhex(sha256))
            how = statement.SerializationType.from_args(own.serialization_type)
            items = [how.new_item(name, value) for name, value in digests.items()]
            return statement.Manifest(own.model_name, items, how)

    return Recorded().set_ignored_paths(paths=[WORK_NAME, *BESIDE_THE_RESULT])


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        raise UsageError(
            f"signatures need the package model-signing, which cannot be imported: {error}",
            "pip install 'quantkit[sign]'",
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
