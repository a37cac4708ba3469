"""Which written tensors are compared with the source: all of them, or a sample that shows every role and layer."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.reader import Source
from quantkit.errors import UsageError
from quantkit.spec.manifest import TensorRecord


@dataclass(frozen=True)
class Sample:
    """How many tensors are drawn.

    Attributes:
        count: at least so many, 0 when `share` says it.
        share: of all tensors.
        seed: of the choice; the same seed and folder give the same choice.
    """

    count: int = 0
    share: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Sample:
        """Sample of "500" (tensors), "0.05" or "5%" (a share of them).

        Raises:
            UsageError: it is neither.
        """
        text = text.strip()
        if re.fullmatch(r"[1-9]\d*", text):
            return cls(count=int(text), seed=seed)
        found = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
        share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
        if not 0 < share <= 1:
            raise UsageError(
                f"--sample {text!r} is no sample", "give a number of tensors, as 500, or a share of them, as 0.05 or 5%"
            )
        return cls(share=share, seed=seed)

    def choose(self, records: list[TensorRecord]) -> list[TensorRecord]:
        """The chosen records in their order: one at least of every role and part and of every layer, whatever the
        number; the rest are drawn without regard to anything but the seed and the names."""
        wanted = self.count or math.ceil(self.share * len(records))
        order = sorted(range(len(records)), key=lambda index: self._rank(records[index]))
        first: dict[tuple[object, ...], int] = {}
        for index in order:
            record = records[index]
            first.setdefault(("role", record.role, record.part), index)
            first.setdefault(("layer", record.layer), index)
        chosen = dict.fromkeys(first.values())
        for index in order:
            if len(chosen) >= wanted:
                break
            chosen[index] = None
        return [records[index] for index in sorted(chosen)]

    def _rank(self, record: TensorRecord) -> bytes:
        return hashlib.sha256(f"{self.seed}/{record.file}/{record.name}".encode()).digest()


def records_of(folder: Path) -> list[TensorRecord]:
    """Records of a checkpoint without a manifest, from its headers."""
    found = Source(folder)
    records = []
    for key, entry in found.entries.items():
        int8 = entry.format.name == "int8-channel"
        for part, info in entry.stored.items():
            records.append(
                TensorRecord(
                    name=info.name,
                    sources=(entry.name,),
                    role=key.role,
                    layer=key.layer,
                    experts=() if key.expert is None else (key.expert,),
                    part=key.part if part == "weight" else part,
                    file=found.index.file_of[info.name],
                    offset=info.start,
                    nbytes=info.nbytes,
                    dtype=info.dtype,
                    shape=info.shape,
                    global_shape=info.shape,
                    scale=entry.stored["weight_scale"].name if int8 and part == "weight" else "",
                    xxh3="",
                )
            )
    return records
