"""What differs between cards and is no arithmetic: tile sizes, warps, where the GEMV hands over to tiles.

`tuning.json` holds a table for each card that was measured and a default. `quantkit-runtime tune` measures the card at
hand and writes a table for it into the user's file, which goes first. A table changes speed only, never a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import InputError
from quantkit.spec.files import is_file, read_whole
from quantkit_runtime import device

VARIABLE = "QUANTKIT_TUNING"
"""Environment variable that names another file than the user's."""

DEFAULT = "default"

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """How a tiled GEMM is cut.

    Attributes:
        bm, bn, bk: rows, output channels and inputs of a tile.
        warps, stages: of Triton.
        band: row tiles that go over the output channels together.
        swap: multiply weights x activations, so that output channels are the rows of the matrix instruction.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    band: int = 8
    swap: bool = False


@dataclass(frozen=True)
class Streaming:
    """How the GEMV is cut: output channels of a step, threads of a block, blocks per compute unit."""

    outputs: int
    threads: int
    blocks: int


@dataclass(frozen=True)
class Attention:
    """How decode attention is cut: tokens of a step, Triton's warps and stages, programs to aim at."""

    bn: int
    warps: int
    stages: int
    programs: int

    def stages_of(self, longest: int, shares: int) -> int:
        """Triton's stages: no more than a program has steps."""
        return max(1, min(self.stages, -(-longest // (shares * self.bn))))

    def shares(self, sequences: int, longest: int) -> int:
        """Programs that share a sequence and key head, a power of two of at most 64, with a step's work each."""
        wanted = min(self.programs // max(1, sequences), -(-longest // self.bn), 64)
        return 1 << max(0, wanted.bit_length() - 1)


@dataclass(frozen=True)
class Prefill:
    """How prefill attention is cut: queries of a tile, keys of a step, Triton's warps and stages."""

    queries: int
    bn: int
    warps: int
    stages: int

    def fitted(self, row_bytes: int) -> tuple[int, int]:
        """Keys of a step and stages for heads whose key and value take so many bytes together: the table is for 512
        (128 + 128 of bfloat16), and wider steps would not fit into the memory of a compute unit."""
        wide = -(-row_bytes // 512)
        return max(16, self.bn // (1 << (wide - 1).bit_length())), self.stages if wide == 1 else min(self.stages, 2)


@dataclass(frozen=True)
class Tuning:
    """A card's table.

    Attributes:
        gemv_rows: most tokens that the streaming GEMV serves.
        gemv: its shapes by number of tokens: the first row whose bound is not exceeded.
        gemm: tiles by number of tokens: the first row whose bound is not exceeded; the last serves the rest.
        gemm_group: the same for activations quantized per group.
        grouped, grouped_group: tiles of routed experts by the mean number of rows of an expert.
        quantize: (elements of a row, warps): the first row whose bound is not exceeded.
        attention, attention_float: of decode over INT8 and over float keys.
        prefill: of prefill attention by tokens x heads: the first row whose bound is not exceeded.
    """

    gemv_rows: int
    gemv: tuple[tuple[int, Streaming], ...]
    gemm: tuple[tuple[int, Tile], ...]
    gemm_group: tuple[tuple[int, Tile], ...]
    grouped: tuple[tuple[int, Tile], ...]
    grouped_group: tuple[tuple[int, Tile], ...]
    quantize: tuple[tuple[int, int], ...]
    attention: Attention
    attention_float: Attention
    prefill: tuple[tuple[int, Prefill], ...]

    def streaming(self, tokens: int) -> Streaming:
        return _first(self.gemv, tokens)

    def gemm_tile(self, rows: int, *, grouped_activations: bool) -> Tile:
        return _first(self.gemm_group if grouped_activations else self.gemm, rows)

    def expert_block(self, slots: int, experts: int) -> int:
        """Rows of a tile of routed experts."""
        return _first(self.grouped, slots // experts).bm

    def grouped_tile(self, block: int, *, grouped_activations: bool) -> Tile:
        """The table's tile for this number of rows, or its first."""
        rows = self.grouped_group if grouped_activations else self.grouped
        return next((tile for _, tile in rows if tile.bm == block), rows[0][1])

    def prefill_shape(self, tokens: int, heads: int, queries: int = 0) -> Prefill:
        """`queries`: of tiles that are cut already, for another number of heads; 0: none are."""
        rows = tuple(row for row in self.prefill if queries in (0, row[1].queries))
        return _first(rows or self.prefill, tokens * heads)

    def quantize_warps(self, elements: int) -> int:
        return _first(self.quantize, elements)


def _first(rows: tuple[tuple[int, T], ...], size: int) -> T:
    return next((value for bound, value in rows if size <= bound), rows[-1][1])


def user_folder() -> Path:
    """What was made for the cards of this user: tables and built kernels."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "quantkit"


def user_file() -> Path:
    """Where `tune` writes and every run looks first."""
    return Path(os.environ.get(VARIABLE) or user_folder() / "tuning.json")


@cache
def tuning() -> Tuning:
    """The table of the card at hand: of the user's file, shipped, or the default."""
    return table(device.resolve().arch)


def table(arch: str) -> Tuning:
    """The table of a card.

    Raises:
        InputError: the user's file is broken.
    """
    return _of_user(arch) or _shipped(arch)


def _shipped(arch: str) -> Tuning:
    return from_json(_rows(arch))


def _rows(arch: str) -> dict[str, Any]:
    tables = json.loads(Path(__file__).with_name("tuning.json").read_text(encoding="utf-8"))
    return {**tables[DEFAULT], **tables.get(arch, {})}


def _of_user(arch: str) -> Tuning | None:
    path = user_file()
    if not is_file(path):
        return None
    try:
        rows = json.loads(read_whole(path)).get(arch)
        # a table that was measured before there was fused prefill attention stays good for the rest
        return None if rows is None else from_json({"prefill": _rows(arch)["prefill"], **rows})
    # any JSON may stand in the file of a user: other types, missing keys, rows that are too short
    except (OSError, ValueError, ArithmeticError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: this is no tuning table ({error})", "write it again with quantkit-runtime tune, or remove it"
        ) from error


def from_json(rows: Mapping[str, Any]) -> Tuning:
    """A table from JSON, as `as_json` writes it.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """

    def shape(kind: type[T], given: Mapping[str, Any]) -> T:
        if wrong := [name for name, value in given.items() if not isinstance(value, int) or value < (name != "swap")]:
            raise ValueError(f"{wrong[0]} is {given[wrong[0]]!r}")
        return kind(**given)

    def bounded(name: str, kind: type[T]) -> tuple[tuple[int, T], ...]:
        if not rows[name]:
            raise ValueError(f"{name} has no rows")
        return tuple((int(bound), shape(kind, given)) for bound, given in rows[name])

    return Tuning(
        gemv_rows=int(rows["gemv_rows"]),
        gemv=bounded("gemv", Streaming),
        gemm=bounded("gemm", Tile),
        gemm_group=bounded("gemm_group", Tile),
        grouped=bounded("grouped", Tile),
        grouped_group=bounded("grouped_group", Tile),
        quantize=tuple((int(bound), int(warps)) for bound, warps in rows["quantize"]),
        attention=shape(Attention, rows["attention"]),
        attention_float=shape(Attention, rows["attention_float"]),
        prefill=bounded("prefill", Prefill),
    )


def as_json(found: Tuning) -> dict[str, Any]:
    """The table as JSON."""
    return asdict(found)


def write(path: Path, arch: str, found: Tuning) -> None:
    """Put a card's table into a file of tables; those of other cards stay.

    Raises:
        InputError: the file is there and is none of tables.
    """
    tables: dict[str, Any] = {}
    if is_file(path):
        try:
            tables = dict(json.loads(read_whole(path)))
        except (OSError, ValueError, TypeError, RecursionError) as error:  # unreadable, no JSON, or no object
            raise InputError(f"{path} holds no tuning tables ({error})", "move it away, or give --output") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    part.write_text(json.dumps({**tables, arch: as_json(found)}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    tuning.cache_clear()
