"""The manifest of a conversion: what every written byte is and where it came from.

It stands in both output forms as `quantkit_manifest.json` (checkpoint) or `manifest.json` (sharded). It holds no time
stamps, host names or absolute paths: equal input and options give equal bytes on one machine. Machines with other
software differ in `environments` alone, which `digest` leaves out: it is the same wherever the same was converted.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from quantkit.errors import InputError, UsageError
from quantkit.spec.document import Strict, problems_of
from quantkit.spec.environment import Environment
from quantkit.spec.files import MAX_JSON_BYTES, is_file, open_bounded
from quantkit.spec.manifest_checks import contradictions, outside_names
from quantkit.spec.mesh import Mesh
from quantkit.spec.transform import Step

SHARDED_NAME = "manifest.json"
CHECKPOINT_NAME = "quantkit_manifest.json"
SIGNATURE_NAME = "model.sig"  # beside either, when it was asked for; the usual name of model-signing
COMPARISON_NAME = "quantkit_comparison.json"  # beside either, when one was saved; see quantkit.compare.saved
BESIDE = (SIGNATURE_NAME, COMPARISON_NAME)  # in no manifest: they say something about a finished folder
MAX_MANIFEST_BYTES = 4 * 2**30  # a record takes about 700 bytes, and there are a few million at most
FORMAT_VERSION = 1
EXTRA_FILES = "extra"  # set of shard files with whole tensors that no rank reads: draft layers, vision towers


class SourceFile(Strict):
    """A file that was read.

    Attributes:
        name: relative to the source folder.
        size: bytes.
        sha256: hex digest of the whole file.
    """

    name: str
    size: int
    sha256: str


class OutputFile(Strict):
    """A file that was written or copied.

    Attributes:
        name: relative to the output folder.
        size: bytes.
        sha256: hex digest of the whole file.
        copied: byte-for-byte copy of the source's file of this name.
    """

    name: str
    size: int
    sha256: str
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TensorRecord:
    """A tensor that was written. A dataclass with slots: there are a million of them, and a model takes 2 KB more.

    Attributes:
        name: in its file.
        sources: names in the source checkpoint, in the order in which they are fused or stacked.
        role: a name of `archs.roles.ROLES`.
        layer: decoder layer, None outside the layers.
        experts: logical ids of the experts along dimension 0, in order; empty when not stacked.
        part: "weight", "weight_scale" or "bias".
        file: `OutputFile.name`.
        offset: byte position of the data in the file.
        nbytes: length of the data.
        dtype: safetensors name.
        shape: as written.
        global_shape: of the whole tensor before the split.
        slices: (dim, start, stop) in the global shape: which rows and columns of the whole tensor these are. One item
            for each run of rows, in the order of the rows here (a fused tensor has one for each part), then one for
            the columns; empty when the tensor is whole. Rows after the runs are padding and hold zeros.
        scheme: row of `spec.scheme.SCHEMES` that the GEMM runs in.
        scale: name of its scale tensor, "" if none.
        alias: name of the tensor whose bytes this one shares (tied embeddings), "" if none.
        layout: row of the layouts, "plain" for `[N, K]`.
        target: device family of a packed layout, "" for plain.
        xxh3: xxh3-128 of the data, hex.
    """

    name: str
    sources: tuple[str, ...]
    role: str
    layer: int | None = None
    experts: tuple[int, ...] = ()
    part: str = "weight"
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...] = ()
    scheme: str = "keep"
    scale: str = ""
    alias: str = ""
    layout: str = "plain"
    target: str = ""
    xxh3: str


class Dropped(Strict):
    """A tensor or a file of the source that was not written.

    Attributes:
        name: of the tensor or file.
        rule: what says so.
        parameters: of the tensor, 0 for a file.
    """

    name: str
    rule: str
    parameters: int = 0


class RankFiles(Strict):
    """Files that one rank reads, in order, with its layers and experts.

    Attributes:
        rank: global rank.
        files: names of `OutputFile`.
        layers: decoder layers of its stage.
        experts: logical ids of the routed experts it holds.
    """

    rank: int
    files: tuple[str, ...]
    layers: tuple[int, ...]
    experts: tuple[int, ...] = ()


class Manifest(Strict):
    """The whole record.

    Attributes:
        format_version: of this model.
        form: "checkpoint" or "sharded".
        tool_version: quantkit's.
        options_digest: sha256 over recipe, mesh, form and layout.
        architecture: record that classified the tensors.
        model_type: of the config.
        recipe: as resolved, a JSON object.
        calibration_digest: sha256 of the calibration artifact, "" without one.
        transforms: exact changes of the weights before they were rounded or kept, in order. Where they give a tied
            output head weights of its own, these count as parameters of the source.
        mesh: sizes and policies.
        vocab_size: true vocabulary, before padding.
        tied_embeddings: the output head is the embedding table.
        source_files: every file that was read.
        files: every file that was written, sorted by name; the manifest itself is not in it.
        tensors: every tensor that was written, sorted by file and offset.
        dropped: every source tensor that was not written.
        ranks: what each rank reads.
        parameters: number of parameters of the source, scales not counted.
        environments: the software of every machine that wrote weights, each once; several after `convert --part` or
            `--ray` over machines that differ, or after an upgrade between a crash and its continuation. Each has a
            digest of its own. Empty in manifests of before 0.1.0.
        digest: sha256 over this manifest with an empty digest and no environments: it identifies the content, and a
            changed manifest is found.
    """

    format_version: Literal[1] = 1
    form: Literal["checkpoint", "sharded"]
    tool_version: str
    options_digest: str
    architecture: str
    model_type: str
    recipe: dict[str, object]
    calibration_digest: str = ""
    transforms: tuple[Step, ...] = ()
    mesh: Mesh = Mesh()
    vocab_size: int
    tied_embeddings: bool
    source_files: tuple[SourceFile, ...]
    files: tuple[OutputFile, ...]
    tensors: tuple[TensorRecord, ...]
    dropped: tuple[Dropped, ...] = ()
    ranks: tuple[RankFiles, ...] = ()
    parameters: int
    environments: tuple[Environment, ...] = ()
    digest: str = ""

    @property
    def recipe_roles(self) -> dict[str, str]:
        """Pattern -> role that the recipe added (`archs.extra`).

        Raises:
            InputError: they are no such table.
        """
        roles = self.recipe.get("roles", {})
        if not isinstance(roles, dict) or not all(isinstance(text, str) for pair in roles.items() for text in pair):
            raise InputError("the manifest's recipe holds `roles` that are no names", "run `quantkit convert` again")
        return roles


def manifest_path(folder: Path) -> Path | None:
    """The manifest of a converted folder, None when it has none."""
    for name in (SHARDED_NAME, CHECKPOINT_NAME):
        if is_file(folder / name):
            return folder / name
    return None


def read_manifest(path: Path) -> Manifest:
    """Parse and validate a manifest.

    Memory: its records, equal names and shapes once, and a few hundred kilobytes of its text at a time.

    Raises:
        InputError: unreadable, not JSON, of another version, with unknown or missing fields (all listed), changed
            since it was written, naming files outside its folder, or contradicting itself.
    """
    try:
        with open_bounded(path, MAX_MANIFEST_BYTES) as file:
            manifest = _parse(file)
            file.seek(0)
            canonical = _is_canonical(file, manifest)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", "run `quantkit convert` again") from error
    except ValidationError as error:
        raise InputError(f"{path} is not a quantkit manifest", "convert again", items=problems_of(error)) from error
    except UsageError as error:  # a mesh beyond all bounds: nobody asked for it here
        raise InputError(f"{path} is not a quantkit manifest", "convert again", items=[error.message]) from error
    if not canonical:
        raise InputError(f"{path} was changed or damaged since it was written", "copy it again, or convert again")
    if outside := outside_names(manifest):
        raise InputError(f"{path} names files outside its folder", "use a manifest of quantkit's own", items=outside)
    if problems := contradictions(manifest):
        raise InputError(f"{path} contradicts itself", "copy it again, or convert again", items=problems)
    return manifest


_CHUNK = 1 << 18
_LONGEST_RECORD = 1 << 25  # bytes; one that is fused of a thousand experts takes 100,000
_FIRST, _BETWEEN, _LAST = b'"tensors": [', b'}, {"alias": ', b'], "tied_embeddings": '
"""What stands before, between and after records in canonical JSON. A quote that is not escaped stands in no string, so
neither name nor value can look like these."""

_RECORDS = TypeAdapter(list[TensorRecord])
_REPEATED = ("name", "file", "scale", "sources", "experts", "shape", "global_shape", "slices")
"""Fields whose values many records share: tensors of several ranks, scales, shapes."""


def _parse(file: BinaryIO) -> Manifest:
    """A manifest from its text, records a piece at a time.

    Raises:
        ValidationError: it is none; the whole text is parsed then, so that places in it are named right.
        OSError: it is none, and too large for that.
    """
    try:
        return _streamed(file)
    except (ValidationError, _NoPieces):
        file.seek(0)
        raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise OSError(errno.EINVAL, "It is no manifest of quantkit") from None
        return Manifest.model_validate_json(raw)


class _NoPieces(Exception):
    """A text that is not in canonical form, so that it cannot be cut into records."""


def _streamed(file: BinaryIO) -> Manifest:
    head, found = bytearray(), -1
    while found < 0:
        piece = file.read(_CHUNK)
        if not piece or len(head) > MAX_JSON_BYTES:
            raise _NoPieces
        head += piece
        found = head.find(_FIRST, max(0, len(head) - len(piece) - len(_FIRST)))
    text = bytes(head[found + len(_FIRST) :])
    del head[found:]
    records: list[TensorRecord] = []
    seen: dict[object, object] = {}
    while _LAST not in text:
        cut = text.rfind(_BETWEEN) + 1
        if cut:
            records += _records(text[:cut], seen)
            text = text[cut:].removeprefix(b", ")
        elif len(text) > _LONGEST_RECORD:
            raise _NoPieces
        piece = file.read(_CHUNK)
        text += piece
        if not piece:
            break
    end, last, rest = text.partition(_LAST)
    records += _records(end, seen)
    manifest = Manifest.model_validate_json(bytes(head) + _FIRST + last + rest + file.read())
    return manifest.model_copy(update={"tensors": tuple(records)})


def _records(text: bytes, seen: dict[object, object]) -> list[TensorRecord]:
    """Records of a piece of the array; values that were `seen` before are not kept twice."""
    found = _RECORDS.validate_json(b"[" + text + b"]")
    for record in found:
        for name in _REPEATED:
            value = getattr(record, name)
            object.__setattr__(record, name, seen.setdefault(value, value))
    return found


def sealed(manifest: Manifest) -> Manifest:
    """The same manifest with its digest filled in."""
    digest = hashlib.sha256()
    for piece in manifest_chunks(manifest.model_copy(update={"digest": "", "environments": ()})):
        digest.update(piece)
    return manifest.model_copy(update={"digest": digest.hexdigest()})


def manifest_bytes(manifest: Manifest) -> bytes:
    """Canonical JSON (sorted keys, one line) with the digest filled in."""
    return b"".join(manifest_chunks(sealed(manifest)))


def manifest_chunks(manifest: Manifest) -> Iterator[bytes]:
    """The canonical JSON of a manifest as it stands, some hundred kilobytes at a time; it is written sealed."""
    return (text for _, text in _pieces(manifest))


def _is_canonical(file: BinaryIO, manifest: Manifest) -> bool:
    """Whether a file is what `manifest_bytes` would write, digest included."""
    digest = hashlib.sha256()
    for name, text in _pieces(manifest):
        if file.read(len(text)) != text:
            return False
        if name != "environments":
            digest.update(b'""' if name == "digest" else text)
    intact = all(environment.intact for environment in manifest.environments)
    return not file.read(1) and digest.hexdigest() == manifest.digest and intact


_TENSOR_FIELDS = tuple(sorted(field.name for field in fields(TensorRecord)))
_RECORDS_AT_ONCE = 512


def _pieces(manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """(field, or "" for what stands between fields; its text) in order: a JSON object on one line."""
    values = manifest.model_dump(mode="json", exclude={"tensors"})
    lead = "{"
    for name in sorted(type(manifest).model_fields):
        if name == "environments" and not manifest.environments:
            continue
        yield name if name == "environments" else "", f'{lead}"{name}": '.encode()
        lead = ", "
        if name == "tensors":
            yield from ((name, text) for text in _record_texts(manifest.tensors))
        else:
            yield name, _canonical(values[name])
    yield "", b"}\n"


def _record_texts(records: tuple[TensorRecord, ...]) -> Iterator[bytes]:
    """A JSON array, some records at a time: all of them as dictionaries or as text would take gigabytes."""
    yield b"["
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        part = _canonical([_values(record) for record in records[start : start + _RECORDS_AT_ONCE]])
        yield (b", " if start else b"") + part[1:-1]
    yield b"]"


def _values(record: TensorRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _TENSOR_FIELDS}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
