"""One pass over a file: sha256 of all of it and xxh3-128 of each tensor, so that a wrong byte is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from quantkit.spec.manifest import OutputFile, TensorRecord

_CHUNK = 1 << 20


def hash_file(path: Path, expected: OutputFile, records: list[TensorRecord]) -> list[str]:
    """What differs from the manifest, as sentences; empty when nothing does.

    Args:
        records: tensors of the file, any order, without aliases.
    """
    digest = hashlib.sha256()
    tensors = {record.name: xxhash.xxh3_128() for record in records}
    spans = sorted(records, key=lambda record: record.offset)
    position, first = 0, 0
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                digest.update(view[:count])
                while first < len(spans) and spans[first].offset + spans[first].nbytes <= position:
                    first += 1
                for index in range(first, len(spans)):
                    record = spans[index]
                    if record.offset >= position + count:
                        break
                    low = max(record.offset - position, 0)
                    high = min(record.offset + record.nbytes - position, count)
                    tensors[record.name].update(view[low:high])
                position += count
    except OSError as error:
        return [f"{expected.name}: {error.strerror or error}"]
    wrong = [f"{expected.name}: {r.name}: its bytes changed" for r in spans if tensors[r.name].hexdigest() != r.xxh3]
    if digest.hexdigest() != expected.sha256 or position != expected.size:
        where = "" if wrong or not records else " outside its tensors (header)"
        wrong.append(f"{expected.name}: its bytes changed{where}")
    return wrong
