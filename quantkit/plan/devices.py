"""Cards by name: memory, and nothing else.

No speed stands here: published peak rates say little about INT8 GEMMs and links, and some cannot be trusted at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import UsageError

MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """One card as a rank sees it.

    Attributes:
        name: as its vendor writes it.
        arch: what `gcnArchName` begins with.
        mib: memory in MiB; 0 where no figure is known that holds for every version of the card.
        note: what a person should know.
    """

    name: str
    arch: str
    mib: int
    note: str = ""

    @property
    def nbytes(self) -> int:
        return self.mib * MIB


DEVICES: tuple[Device, ...] = (
    Device("K100_AI", "gfx928", 65520, "as the driver reports it"),
    Device("K100", "gfx926", 0),
    Device("Z100", "gfx906", 0),
    Device("BW1000", "gfx936", 0),
    Device("MI100", "gfx908", 32 * 1024),
    Device("MI210", "gfx90a", 64 * 1024),
    Device("MI250X", "gfx90a", 64 * 1024, "one of the two dies of a card, which is what a rank sees"),
    Device("MI300X", "gfx942", 192 * 1024),
    Device("MI325X", "gfx942", 256 * 1024),
    Device("MI355X", "gfx950", 288 * 1024),
)


def find_device(name: str | None, card_memory_gib: float | None) -> Device:
    """The card to plan for; a given memory wins over the table's.

    Raises:
        UsageError: neither name nor memory, an unknown name, or a card without a figure and none given.
    """
    if name is None:
        if card_memory_gib is None:
            raise UsageError(
                "no card was given", "pass --device NAME or --card-memory GiB", choices=[row.name for row in DEVICES]
            )
        return Device("card", "", int(card_memory_gib * 1024))
    row = next((row for row in DEVICES if row.name.lower() == name.lower().replace("-", "_")), None)
    if row is None:
        raise UsageError(
            f"unknown device {name!r}", "pass --card-memory GiB instead", choices=[row.name for row in DEVICES]
        )
    if card_memory_gib is not None:
        return Device(row.name, row.arch, int(card_memory_gib * 1024), "memory as given")
    if not row.mib:
        raise UsageError(
            f"the memory of {row.name} differs between its versions", "pass --card-memory GiB too, as the driver shows"
        )
    return row
