"""What config.json says about quantization: a hint that helps to read the tensors, never a proof of what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.archs.base import text_config
from quantkit.errors import InputError


@dataclass(frozen=True)
class FormatContext:
    """The parts of `quantization_config` that reading needs.

    Attributes:
        declared: how the config names the format: `format` of compressed-tensors (of every group), else `quant_method`;
            empty when it has no quantization_config.
        block: rows and columns that share a scale, None when the config does not say.
        packings: (num_bits, group_size) of each group of weights; group size 0 when each channel is one group.
    """

    declared: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    packings: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> FormatContext:
        """Context of a parsed config.json.

        Raises:
            InputError: `quantization_config` is not an object, or its block size is not two positive numbers.
        """
        found = _quantization_config(config)
        if not found:
            return FormatContext()
        groups = [group for group in _mappings(found.get("config_groups")) if group]
        weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
        names = [found.get("format"), *(group.get("format") for group in groups)]
        declared = {name for name in names if isinstance(name, str)} or {str(found.get("quant_method", "unnamed"))}
        sizes = [found.get("weight_block_size"), *(args.get("block_structure") for args in weights)]
        blocks = {_block(size) for size in sizes if size is not None}
        if len(blocks) > 1:
            raise InputError(
                f"config.json names {len(blocks)} block sizes: {', '.join(map(str, blocks))}",
                "remove the wrong one, or all: block sizes then follow from the shapes",
            )
        packings = [(args.get("num_bits"), args.get("group_size") or 0) for args in weights]
        return FormatContext(
            declared=tuple(sorted(declared)),
            block=next(iter(blocks), None),
            packings=tuple(sorted({(bits, size) for bits, size in packings if _positive(bits) and type(size) is int})),
        )


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in (config, text_config(config)):
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if isinstance(found, Mapping):
                return found
            if found is not None:
                raise InputError(f"config.json: {key} is {type(found).__name__}, not an object")
    return {}


def _mappings(groups: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(groups, Mapping):
        yield from (group for group in groups.values() if isinstance(group, Mapping))


def _block(value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(_positive(size) for size in value):
        return value[0], value[1]
    raise InputError(
        f"config.json: the block size {value!r} is not two positive numbers",
        "correct it, or remove it: block sizes then follow from the shapes",
    )


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0
