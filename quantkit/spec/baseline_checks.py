"""Whether a baseline agrees with itself, before a candidate is run on it: it may come from anywhere.

The sequences are checked by their numbers, the tensor files by their headers; no tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from quantkit.spec.tensorfile import Header

if TYPE_CHECKING:
    from quantkit.spec.baseline import Baseline, Sequence

MAX_LAYERS = 10_000
_MAX_ID = 2**31
_WIDTH = 64  # of the fingerprint of a row

_ROWS = (
    ("top_ids", "I32", "P k"),
    ("top_logprobs", "F32", "P k"),
    ("rest_logprob", "F32", "P"),
    ("next_logprob", "F32", "P"),
)

ROW_NAMES = tuple(name for name, *_ in _ROWS)

_OPERATOR = r"\.\d{3,}\..+\.(in|out)"
_LAYER = (
    (r"input|output", "F32", "T H"),
    (r"long", "F32", "S H"),
    (r"routing", "I16", "A k"),
    (r"probe\.routing", "I16", "T k"),
    (r"probe\.router", "F32", "T E"),
    (rf"probe{_OPERATOR}", "F32", f"Q {_WIDTH}"),
    (rf"long{_OPERATOR}", "F32", f"S {_WIDTH}"),
    (r"experts\.input", "F32", "R H"),
    (r"experts\.output", "F32", f"E R {_WIDTH}"),
    (r"input\..+", "", ""),
    (r"(weight|rows)\..+", "F32", ""),
)
"""Name, dtype and shape of the tensors of a layer's file; a letter has one value in a file. "": any."""

_OUTSIDE = _LAYER[-1:]


def contradictions(baseline: Baseline) -> list[str]:
    """Sentences, one for each contradiction."""
    found = [problem for sequence in baseline.sequences for problem in _of_sequence(sequence)]
    names = [sequence.name for sequence in baseline.sequences]
    if len(set(names)) < len(names):
        found.append("sequences: a name stands twice")
    if not 1 <= baseline.layers <= MAX_LAYERS:
        found.append(f"layers: {baseline.layers}")
    if any(limit < 1 for limit in baseline.limits):
        found.append(f"limits: {list(baseline.limits)}")
    return found


def _of_sequence(sequence: Sequence) -> Iterator[str]:
    length = len(sequence.ids)
    if not all(0 <= number < _MAX_ID for number in sequence.ids):
        yield f"{sequence.name}: ids that no token has"
    if not 1 <= sequence.prompt_tokens <= length:
        yield f"{sequence.name}: {sequence.prompt_tokens} of {length} tokens are its prompt"
    if not _ascending(sequence.scored, length - 1):
        yield f"{sequence.name}: scored positions are not ascending, or beyond {length} tokens"
    if not _ascending(sequence.sampled, length):
        yield f"{sequence.name}: sampled positions are not ascending, or beyond {length} tokens"


def lacks(baseline: Baseline) -> list[str]:
    """What a comparison needs and a baseline does not have, a sentence each."""
    found = [problem for sequence in baseline.sequences for problem in _not_kept(sequence)]
    if len(baseline.of_use("probe")) != 1 or len(baseline.of_use("long")) > 1:
        found.append("sequences: there must be one probe, and one long text at most")
    if not baseline.of_use("text", "long"):
        found.append("sequences: no text is among them")
    return found


def _not_kept(sequence: Sequence) -> Iterator[str]:
    new = len(sequence.ids) - sequence.prompt_tokens
    if sequence.use != "prompt" and not sequence.scored:
        yield f"{sequence.name}: nothing of it is scored"
    if sequence.use == "prompt" and len(sequence.scored) != new:
        yield f"{sequence.name}: {len(sequence.scored)} of {new} new tokens are scored"
    if sequence.use in ("probe", "long") and not sequence.sampled:
        yield f"{sequence.name}: no position of it is sampled"


def _ascending(positions: tuple[int, ...], stop: int) -> bool:
    return all(a < b for a, b in zip((-1, *positions), (*positions, stop), strict=True))


def row_problems(baseline: Baseline, header: Header, needed: Iterable[str] = ROW_NAMES) -> list[str]:
    """What is wrong with the tensors of `logprobs.safetensors`, of which those are needed."""
    scored = sum(len(sequence.scored) for sequence in baseline.sequences)
    problems = _misfits(_ROWS, header, {"P": scored})
    problems += [f"{name} is missing" for name in needed if name not in header.tensors]
    if not problems and "top_ids" in header.tensors and header.tensors["top_ids"].shape[1] < 2:
        problems.append("top_ids holds fewer than 2 tokens of a position")
    return problems


def layer_problems(baseline: Baseline, header: Header) -> list[str]:
    """What is wrong with the tensors of a layer's file."""
    (probe,) = baseline.of_use("probe")
    sizes = {
        "T": len(probe.ids),
        "Q": len(probe.sampled),
        "A": sum(len(sequence.ids) for sequence in baseline.of_use("text")),
    }
    for long in baseline.of_use("long"):
        sizes["S"] = len(long.sampled)
    problems = _misfits(_LAYER, header, sizes)
    return problems + [f"{name} is missing" for name in ("input", "output") if name not in header.tensors]


def outside_problems(header: Header) -> list[str]:
    """What is wrong with the fingerprints of the weights outside the layers."""
    return _misfits(_OUTSIDE, header, {})


def _misfits(table: tuple[tuple[str, str, str], ...], header: Header, sizes: Mapping[str, int]) -> list[str]:
    """Tensors that no row of the table names, or that have another dtype or shape."""
    problems, known = [], dict(sizes)
    for name, info in header.tensors.items():
        row = next((row for row in table if re.fullmatch(row[0], name)), None)
        if row is None:
            problems.append(f"{name} does not belong there")
            continue
        _, dtype, shape = row
        wanted = shape.split()
        sound = not wanted or len(wanted) == len(info.shape)
        for letter, size in zip(wanted, info.shape, strict=False):
            sound = sound and known.setdefault(letter, int(letter) if letter.isdigit() else size) == size
        if not sound or (dtype and info.dtype != dtype) or (wanted and not all(info.shape)):
            problems.append(f"{name} is {info.dtype} {list(info.shape)}, not {dtype} [{', '.join(wanted)}]")
    return problems
