"""Fingerprints: random projections that tell how far two tensors are apart without keeping either.

A tensor is multiplied by matrices of random signs. Projections are linear, so the difference of two fingerprints is the
fingerprint of the difference, and its length estimates the difference's: with m numbers the relative error of the
squared length is about sqrt(2 / m) (Johnson-Lindenstrauss; signs: Achlioptas 2003). That is enough to tell a rounding
error of one percent from a wrong scale, and equal tensors have equal fingerprints.

The signs are raw bits of PCG64, whose stream numpy keeps fixed, so they are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.archs import Architecture, Key
from quantkit.archs.modeling import canonical_value
from quantkit.archs.roles import Kind
from quantkit.arithmetic import dequantize

WIDTH = 64
"""Numbers for each token's activations."""

SIDE = 8
"""A matrix keeps SIDE x SIDE numbers."""


@lru_cache(maxsize=16)
def signs(size: int, width: int, stream: int = 0) -> Tensor:
    """Random signs, float32 `[size, width]`; `stream` tells the two sides of a matrix apart."""
    bits = np.random.PCG64(0x5EED + stream).random_raw(math.ceil(size * width / 64)).astype("<u8")
    values = np.unpackbits(bits.view(np.uint8))[: size * width].reshape(size, width)
    return torch.from_numpy(2.0 * values.astype(np.float32) - 1.0)


def of_rows(x: Tensor) -> Tensor:
    """Fingerprint of every row of `[..., N]` -> float32 `[..., WIDTH]`; lengths are kept on average."""
    return x.float() @ signs(x.shape[-1], WIDTH).to(x.device) / math.sqrt(WIDTH)


def of_matrix(w: Tensor) -> Tensor:
    """Fingerprint of a matrix `[N, K]`, or of each of `[E, N, K]`: float32 `[..., SIDE, SIDE]`."""
    left, right = signs(w.shape[-2], SIDE, 1).to(w.device), signs(w.shape[-1], SIDE).to(w.device)
    return left.T @ (w.float() @ right) / SIDE


def row_projections(w: Tensor) -> Tensor:
    """Fingerprint of every row of a matrix `[N, K]` -> float32 `[N, SIDE]`."""
    return w.float() @ signs(w.shape[-1], SIDE).to(w.device) / math.sqrt(SIDE)


def of_weight(w: Tensor) -> Tensor:
    """What is kept of a weight: a vector itself, else a matrix' fingerprint (kernels of convolutions flattened)."""
    if w.ndim < 2:
        return w.float().reshape(-1)
    return of_matrix(w if w.ndim in (2, 3) and w.shape[-2] > 1 else w.flatten(1))


# ----------------------------------------------------------------------------------------- weights of a module


def module_weights(
    arch: Architecture, prefix: str, module: nn.Module, *, without: str = " "
) -> Iterator[tuple[Key, Tensor]]:
    """Weights of a module as floating point, stacked experts `[E, N, K]` with gate and up apart.

    Args:
        prefix: of the module's parameter names, `model.layers.3`; "" for a whole model.
        module: with floating-point parameters, or with int8 weights and a `weight_scale` beside them.
        without: names that begin with it are passed over.
    """
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    for name, tensor in tensors.items():
        if name.endswith("weight_scale") or tensor.is_meta or name.startswith(without):
            continue
        key = arch.parse(f"{prefix}.{name}" if prefix else name)
        if key is None or key.role == "buffer":
            continue
        quantized = tensor.dtype == torch.int8
        value = dequantize(tensor, tensors[f"{name}_scale"]) if quantized else tensor
        yield from _parts(arch, key, value, oriented=quantized)


def _parts(arch: Architecture, key: Key, value: Tensor, *, oriented: bool) -> Iterator[tuple[Key, Tensor]]:
    """A stacked gate_up as its two parts. `oriented`: `[E, N, K]` whatever the family does in floating point."""
    role = arch.role(key.role)
    if not (role.per_expert and key.expert is None and role.parts and key.part in ("weight", "bias")):
        if role.per_expert and key.expert is None and not oriented:
            value = canonical_value(arch, key, value)
        yield key, value
        return
    if not oriented and arch.experts_transposed and value.ndim == 3:
        value = value.transpose(1, 2)
    halves = (value[:, 0::2], value[:, 1::2]) if arch.gate_up_interleaved else value.chunk(2, dim=1)
    for part, half in zip(role.parts, halves, strict=True):
        yield key._replace(role=part), half


def weight_fingerprints(arch: Architecture, prefix: str, module: nn.Module, *, without: str = " ") -> dict[str, Tensor]:
    """`weight.NAME` and `rows.NAME` of every weight of a module, by `Key.shard_name`; see `module_weights`."""
    found: dict[str, Tensor] = {}
    for key, value in module_weights(arch, prefix, module, without=without):
        found[f"weight.{key.shard_name}"] = of_weight(value).cpu().contiguous()
        if arch.role(key.role).kind is Kind.ROUTER and value.ndim == 2:
            found[f"rows.{key.shard_name}"] = row_projections(value).cpu().contiguous()
    return found


# ----------------------------------------------------------------------------------------- what a difference is


def relative_error(reference: Tensor, found: Tensor) -> float:
    """||found - reference|| / ||reference||; 0 for two zeros, infinity for a non-finite `found`."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    size, distance = float(reference.double().norm()), float((found.double() - reference.double()).norm())
    return 0.0 if distance == 0 else distance / size if size else math.inf


_SHOWN = 6
_CLOSE = 0.1
"""Two fingerprints this near are of the same weight, rounding apart; those of unrelated weights are at about 1.4."""


class Explanation(NamedTuple):
    """What became of a weight; `detail` is data.

    Attributes:
        why: "factor" (detail: of the source's weight), "other" (the source's weight that it holds), "rows" (which row
            holds which), "offset" (added to every channel), "" when nothing known fits.
        detail: see there.
    """

    why: Literal["", "factor", "other", "rows", "offset"] = ""
    detail: str = ""


def explain(
    name: str, reference: Mapping[str, Tensor], found: Mapping[str, Tensor], expert: int | None = None
) -> Explanation:
    """What became of a weight.

    Args:
        name: of a fingerprint, `weight.layers.3.expert.gate.weight`.
        reference: fingerprints of the source's layer.
        found: those of the candidate's.
        expert: index along dimension 0.
    """
    old, new = _one(reference[name], expert), _one(found[name], expert)
    power = float((old.double() ** 2).sum())
    factor = float((old.double() * new.double()).sum()) / power if power else 0.0
    if abs(factor) > _CLOSE and relative_error(factor * old, new) < _CLOSE:
        return Explanation("factor", f"{factor:.3g}")
    other = _named_after(name, new, reference, expert)
    if other:
        return Explanation("other", other)
    rows = _moved_rows(name, reference, found)
    if rows:
        return Explanation("rows", rows)
    offset = _offset(old, new)
    return Explanation("offset", offset) if offset else Explanation()


def _one(fingerprint: Tensor, expert: int | None) -> Tensor:
    return fingerprint if expert is None else fingerprint[expert]


def _named_after(name: str, new: Tensor, reference: Mapping[str, Tensor], expert: int | None) -> str:
    """Another weight of the source's layer that is the candidate's `new`."""
    for other, fingerprints in reference.items():
        if not other.startswith("weight."):
            continue
        stacked = fingerprints.ndim == 3
        for index, one in enumerate(fingerprints) if stacked else [(None, fingerprints)]:
            same = other == name and index == expert
            if not same and one.shape == new.shape and relative_error(one, new) < _CLOSE:
                return other.removeprefix("weight.").removesuffix(".weight") + (f".{index}" if stacked else "")
    return ""


def _moved_rows(name: str, reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    rows = name.replace("weight.", "rows.", 1)
    if rows not in reference or reference[rows].shape != found[rows].shape:
        return ""
    old, new = reference[rows].double(), found[rows].double()
    distance = torch.cdist(new, old)
    nearest = distance.argmin(dim=1)
    size = old.norm(dim=1)[nearest].clamp(min=1e-30)
    if not bool((distance.gather(1, nearest[:, None]).squeeze(1) <= _CLOSE * size).all()):
        return ""
    moved = [(row, int(source)) for row, source in enumerate(nearest.tolist()) if source != row]
    more = ", ..." if len(moved) > _SHOWN else ""
    return ", ".join(f"{row} ← {source}" for row, source in moved[:_SHOWN]) + more


def _offset(old: Tensor, new: Tensor) -> str:
    """A vector that lost or gained one in every channel: norms that multiply by (1 + weight)."""
    if old.ndim != 1:
        return ""
    step = float((new - old).double().mean())
    if round(step) not in (-1, 1) or relative_error(old + round(step), new) > _CLOSE:
        return ""
    return f"{round(step):+d}"
