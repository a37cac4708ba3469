"""`smooth`: move the range of outlier channels from activations into weights, as far as it pays, group by group.

Output channel j of a norm, of v or of up is divided by s_j, and input column j of everything that reads it multiplied
by it, which is exact (SmoothQuant, arXiv:2211.10438). SmoothQuant has one strength a for a whole model,
s = |x|^a / |w|^(1 - a); here every group is searched: a norm with all matrices behind it (router, shared expert and all
experts too), v with the output projection, up with down, each expert by itself. Magnitudes are the largest or the root
mean square over sampled rows. Each candidate is judged by the error of the group's outputs on these rows with weights
and activations rounded as they will be, and none is taken unless that error falls. Factors behind a norm are those that
leave the norm's weight a bf16 number: powers of two would, but their steps cost 10 to 25 % of the error that is left.

After `rotate` the channels behind the norms are alike already: what remains is v and up. On SmolLM2-135M with rounding
to nearest the searched strengths bring the mean squared error of the outputs of qkv, o, gate and up, down to 10, 65, 28
and 46 %, and after a rotation that of o and down to 63 and 42 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from quantkit.archs import ROLES, Key, Kind
from quantkit.arithmetic import channel_scales, represented
from quantkit.calibrate.fake_quant import round_tokens
from quantkit.calibrate.methods.base import (
    Built,
    Found,
    LayerView,
    Learns,
    Method,
    MethodOptions,
    no_vectors,
    stored_vectors,
)
from quantkit.calibrate.rows import input_name
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.refusals import refusals
from quantkit.spec.calibration import MethodRow
from quantkit.spec.scheme import SCHEMES, Scheme
from quantkit.spec.transform import RESIDUAL_NORMS, VECTORS_NAME, ScalePair, Transforms

_SET = "smooth"

PRODUCERS = (
    "norm.input",
    "norm.pre_mlp",
    "mla.q_a_norm",
    "mla.kv_a_norm",
    "attn.v",
    "mlp.up",
    "shared.up",
    "expert.up",
)
"""Roles whose outputs can be scaled, with GEMMs behind them; see `ScalePair.producer`."""

_STRENGTHS = (0.2, 0.5, 0.8)
_STEPS = (0.15, 0.075)
"""To both sides of the best strength so far."""
_MOST_EXPERTS = 8
"""Experts that are looked at for a vector that all experts of a layer share: those with most rows."""


class SmoothOptions(MethodOptions):
    """Options of `smooth`.

    Attributes:
        producers: roles to scale; empty: all of `PRODUCERS` that the family has and that can be scaled exactly.
        tokens: of the text that goes through the model for the search.
        rows: sampled rows of each input.
        min_rows: an expert with fewer keeps its channels as they are.
        scheme: how the activations of these GEMMs will be rounded. Groups leave little of their tails, so that weights
            matter more and other strengths are best.
    """

    name: Literal["smooth"] = "smooth"
    producers: tuple[str, ...] = ()
    tokens: Annotated[int, Field(ge=1)] = 16384
    rows: Annotated[int, Field(ge=16)] = 1024
    min_rows: Annotated[int, Field(ge=1)] = 16
    scheme: Literal["w8a8", "w8a8-group128"] = "w8a8"


def build(source: Source, options: SmoothOptions, artifact: Path | None) -> Built:
    producers = options.producers or tuple(role for role in PRODUCERS if _can_scale(source, role))
    steps = tuple(ScalePair(producer=role, vectors=_SET) for role in producers)
    return Built(steps, stored_vectors(artifact) if artifact else no_vectors)


def _can_scale(source: Source, role: str) -> bool:
    """Whether a family has a producer, and scaling it is exact."""
    present = {key.role for key in source.entries}
    names = {role, source.arch.role(role).fuse} - {""}
    if role == "attn.v" and source.dims.is_mla:
        names = {"mla.kv_b"}
    step = ScalePair(producer=role, vectors=_SET)
    return bool(names & present) and not list(refusals(source, Transforms(steps=(step,)), without_drafts=True))


# --------------------------------------------------------------------------------------------------- search


class Norm(NamedTuple):
    """A norm, which multiplies by `weight` (float64 `[channels]`, kept in bf16) + `offset`."""

    weight: Tensor
    offset: float

    def divisors(self, scale: Tensor) -> Tensor:
        """The factors next to `scale` by which it is divided exactly; 1 where there are none."""
        whole = self.weight + self.offset
        kept = (whole / scale - self.offset).bfloat16().double()
        found = whole / (kept + self.offset)
        return torch.where(found.isfinite() & (found > 0), found, torch.ones_like(found)).float()


@dataclass(frozen=True)
class Group:
    """A producer and what reads it.

    Attributes:
        producer: key of its weight.
        readers: for each set of rows `[n, K]` the weights `[N, K]` that multiply it.
        times: query heads that read each kv head; 1 where every channel is read once.
        head: channels of a head.
        norm: of a producer that is a norm.
    """

    producer: Key
    readers: Sequence[tuple[Tensor, Tensor]]
    times: int = 1
    head: int = 1
    norm: Norm | None = None


def search_layer(view: LayerView, options: SmoothOptions) -> Found:
    """Vectors of one layer."""
    producers = [step.producer for step in build(view.source, options, None).steps if isinstance(step, ScalePair)]
    groups = [group for role in producers for group in _groups(view, role, options.min_rows)]
    outcomes = view.map(lambda group: search(group, SCHEMES[options.scheme]), groups)
    found = [(group.producer.shard_name, outcome) for group, outcome in zip(groups, outcomes, strict=True)]
    return Found(
        {f"{_SET}.{name}": outcome.scale for name, outcome in found if outcome.scale is not None},
        [
            MethodRow(
                method=_SET,
                layer=view.layer,
                name=name.removesuffix(".weight"),
                before=outcome.before,
                after=outcome.after,
                note=outcome.note,
            )
            for name, outcome in found
        ],
    )


def _groups(view: LayerView, role: str, min_rows: int) -> Iterator[Group]:
    """Groups of a producer that has quantized readers in this layer; one for each expert where it is per expert."""
    arch, dims = view.source.arch, view.source.dims
    readers = [key for key in view.weights if arch.role(key.role).fed_by == role and key in view.schemes]
    if arch.role(role).per_expert:
        for key in readers:
            x = view.rows[input_name(arch, key)].of(key.expert) if input_name(arch, key) in view.rows else None
            if x is not None and len(x) >= min_rows:
                yield Group(Key(view.layer, role, key.expert), [(x, view.weight(key))])
        return
    found = [(x, torch.cat([view.weight(key) for key in keys])) for x, keys in _by_rows(view, readers)]
    if not found:
        return
    if role == "attn.v":
        times = 1 if dims.is_mla else dims.heads // dims.kv_heads
        yield Group(Key(view.layer, role), found, times, dims.v_head_dim)
    else:
        yield Group(Key(view.layer, role), found, norm=_norm(view, role) if ROLES[role].kind is Kind.NORM else None)


def _norm(view: LayerView, role: str) -> Norm:
    offset = view.source.arch.norm_offset if role in RESIDUAL_NORMS else 0.0
    weight = view.source.fetch(Key(view.layer, role)).double()
    return Norm(weight.to(next(iter(view.rows.values())).x.device), offset)


def _by_rows(view: LayerView, readers: Sequence[Key]) -> Iterator[tuple[Tensor, list[Key]]]:
    """Readers that see the same rows, together; of routed experts the busiest."""
    sets: dict[tuple[str, int | None], list[Key]] = {}
    for key in readers:
        sets.setdefault((input_name(view.source.arch, key), key.expert), []).append(key)
    for name in dict.fromkeys(name for name, _ in sets):
        rows = view.rows.get(name)
        if rows is None:
            continue
        counts = rows.counts(view.source.dims.experts)
        busiest = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))[:_MOST_EXPERTS]
        experts: Sequence[int | None] = busiest or (None,)
        for expert in experts:
            x = rows.of(expert)
            if len(x) and (name, expert) in sets:
                yield x, sets[name, expert]


class Outcome(NamedTuple):
    """Of the search for a group.

    Attributes:
        scale: float32 `[channels of the producer]`, None where no candidate lowers the error.
        before, after: relative errors.
        note: what was chosen.
    """

    scale: Tensor | None
    before: float
    after: float
    note: str


def search(group: Group, scheme: Scheme = SCHEMES["w8a8"]) -> Outcome:
    """The best of all candidates, with activations rounded by `scheme`."""
    exact = [x @ w.T for x, w in group.readers]
    square = max(sum(float(torch.linalg.vector_norm(y, dim=1).double().square().sum()) for y in exact), 1e-30)

    def error(scale: Tensor | None) -> float:
        expanded = None if scale is None else expand(group, scale)
        pairs = zip(group.readers, exact, strict=True)
        return math.sqrt(sum(output_error(x, w, y, expanded, scheme) for (x, w), y in pairs) / square)

    def attempt(statistic: str, strength: float) -> Outcome:
        x, w = sizes[statistic]
        scale = smoothing(x, w, strength, group.norm)
        return Outcome(scale, before, error(scale), f"{statistic}, strength {strength:.3g}")

    before = error(None)
    sizes = {statistic: magnitudes(group, statistic) for statistic in ("largest", "rms")}
    coarse = {(statistic, strength): attempt(statistic, strength) for statistic in sizes for strength in _STRENGTHS}
    statistic, strength = min(coarse, key=lambda tried: coarse[tried].after)  # the other one hardly ever overtakes it
    tried = {strength: coarse[statistic, strength]}
    for step in _STEPS:
        strength = min(tried, key=lambda each: tried[each].after)
        tried |= {each: attempt(statistic, each) for each in (strength - step, strength + step)}
    best = min(tried.values(), key=lambda outcome: outcome.after)
    return best if best.after < before else Outcome(None, before, before, "left as it is")


def output_error(x: Tensor, w_NK: Tensor, y: Tensor, scale: Tensor | None, scheme: Scheme = SCHEMES["w8a8"]) -> float:
    """||y - y'||^2 of a GEMM whose input and weight are rounded after they were scaled."""
    if scale is not None:
        x, w_NK = x / scale, w_NK * scale
    output = round_tokens(x, scheme) @ represented(w_NK, channel_scales(w_NK)).T
    return float(torch.linalg.vector_norm(output.sub_(y), dim=1).double().square().sum())


def magnitudes(group: Group, statistic: str) -> tuple[Tensor, Tensor]:
    """(of the inputs, of the weights) per channel of the producer."""
    if statistic == "largest":
        x = torch.stack([rows.abs().amax(0) for rows, _ in group.readers]).amax(0)
        w = torch.stack([weight.abs().amax(0) for _, weight in group.readers]).amax(0)
        return tuple(_heads(group, each).amax(1).flatten() for each in (x, w))  # type: ignore[return-value]
    x = torch.cat([rows for rows, _ in group.readers]).square().mean(0)
    w = torch.cat([weight for _, weight in group.readers]).square().mean(0)
    return tuple(_heads(group, each).mean(1).flatten().sqrt() for each in (x, w))  # type: ignore[return-value]


def _heads(group: Group, channels: Tensor) -> Tensor:
    """Channels of a reader `[K]` as `[kv heads, times, head]`."""
    heads: Tensor = channels.unflatten(0, (-1, group.times, group.head))
    return heads


def expand(group: Group, scale: Tensor) -> Tensor:
    """A vector over the producer's channels for the channels of its readers."""
    heads: Tensor = scale.unflatten(0, (-1, 1, group.head))
    return heads.expand(-1, group.times, -1).flatten()


def smoothing(x: Tensor, w: Tensor, strength: float, norm: Norm | None = None) -> Tensor:
    """s = |x|^a / |w|^(1 - a) over its geometric mean; rounded to divisors of the norm, else to bf16.

    Channels that are zero on either side keep a factor of the mean.
    """
    dead = (x <= 0) | (w <= 0)
    logs = strength * x.double().clamp_min(1e-30).log2() - (1 - strength) * w.double().clamp_min(1e-30).log2()
    logs = torch.where(dead, logs[~dead].mean() if bool((~dead).any()) else torch.zeros_like(logs), logs)
    logs = (logs - logs.mean()).clamp(-12, 12)
    return norm.divisors(logs.exp2()) if norm is not None else logs.exp2().bfloat16().float()


def finish(records: Sequence[Path], out: Path) -> None:
    """All vectors into the artifact."""
    from quantkit.calibrate.state import join_records

    join_records(out / VECTORS_NAME, records)


METHOD = Method(
    SmoothOptions,
    build,
    Learns(
        lambda options: options.tokens,
        lambda options: options.rows,
        search_layer,
        finish,
        weight_bytes=21,
        output_bytes=16,
    ),
)
