"""Whether the ranks of a mesh together hold every layer, expert and element of the model, by the manifest alone."""

from __future__ import annotations

import math
from collections import defaultdict

from quantkit.convert.boxes import Box, boxes, covered, overlap
from quantkit.spec.manifest import EXTRA_FILES, Manifest, TensorRecord


def check_coverage(manifest: Manifest, sizes: tuple[int, int]) -> tuple[int, list[str], str]:
    """(number of whole tensors, failures, note).

    Args:
        sizes: decoder layers and routed experts by the config.
    """
    layers, experts = sizes
    failures = [*_ranks(manifest, layers, experts), *_contents(manifest, layers)]
    whole: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in manifest.tensors:
        if not record.alias:
            whole[record.name].append(record)
    for name, records in whole.items():
        shapes = {record.global_shape for record in records}
        if len(shapes) > 1:
            failures.append(f"{name}: its pieces disagree about the whole shape: {sorted(shapes)}")
            continue
        found = [box for record in records for box in boxes(record)]
        expected = math.prod(shapes.pop())
        if covered(found) != expected:
            failures.append(f"{name}: the ranks hold {covered(found)} of {expected} elements")
        if overlap(found):
            failures.append(f"{name}: the parts of its ranks overlap")
        failures += _replicas(records)
    return len(whole), failures, ""


def _ranks(manifest: Manifest, layers: int, experts: int) -> list[str]:
    failures = []
    known = {file.name for file in manifest.files}
    holders: dict[tuple[int, int], int] = defaultdict(int)
    if len(manifest.ranks) != manifest.mesh.world:
        failures.append(f"{len(manifest.ranks)} ranks are listed, the mesh has {manifest.mesh.world}")
    stages = defaultdict(set)
    for rank in manifest.ranks:
        failures += [f"rank {rank.rank}: {name} is no file of this folder" for name in rank.files if name not in known]
        at = manifest.mesh.coordinates(rank.rank)
        stages[at.pp].add(rank.layers)
        for expert in rank.experts:
            holders[at.pp, expert] += 1
    listed = [layer for stage in sorted(stages) for layer in next(iter(stages[stage]))]
    if any(len(found) > 1 for found in stages.values()) or listed != list(range(layers)):
        failures.append(f"the stages hold the layers {listed}, the model has {layers}")
    failures += [
        f"stage {stage}: no rank holds expert {expert}"
        for stage in stages
        for expert in range(experts)
        if not holders[stage, expert]
    ]
    return failures


def _contents(manifest: Manifest, layers: int) -> list[str]:
    """What the files of every rank hold against the layers and experts that are listed for it and against the other
    ranks of its stage: each has a part of every tensor, and no file of a stage is read by nobody."""
    held: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in manifest.tensors:
        held[record.file].append(record)
    read = {name for rank in manifest.ranks for name in rank.files}
    unread = sorted(held.keys() - read - {f for f in held if f.startswith(f"{EXTRA_FILES}-")})
    failures = [f"{name}: no rank reads it" for name in unread]
    stages: dict[int, dict[int, set[str]]] = defaultdict(dict)
    for rank in manifest.ranks:
        records = [record for name in rank.files for record in held.get(name, ())]
        found = {record.layer for record in records if record.layer is not None and record.layer < layers}
        if found != set(rank.layers):
            failures.append(f"rank {rank.rank}: its files hold the layers {sorted(found)}, not {list(rank.layers)}")
        routed = [record for record in records if record.experts]
        failures += [
            f"rank {rank.rank}: {record.name} holds the experts {list(record.experts)}, not {list(rank.experts)}"
            for record in routed
            if record.experts != rank.experts
        ]
        stages[manifest.mesh.coordinates(rank.rank).pp][rank.rank] = {record.name for record in records}
    experts = {record.name for record in manifest.tensors if record.experts}
    without = {rank.rank for rank in manifest.ranks if not rank.experts}
    for names in stages.values():
        every = set[str]().union(*names.values())
        failures += [
            f"rank {rank}: no file of it holds a part of {name}"
            for rank, own in names.items()
            for name in sorted(every - own - (experts if rank in without else set()))
        ]
    return failures


def _replicas(records: list[TensorRecord]) -> list[str]:
    """Records that hold the same part must hold the same bytes."""
    first: dict[tuple[object, ...], TensorRecord] = {}
    failures = []
    for record in records:
        same = first.setdefault((record.slices, record.experts, record.shape), record)
        if same.xxh3 != record.xxh3:
            failures.append(f"{record.file}: {record.name}: differs from the same part in {same.file}")
    return failures


def written_parameters(manifest: Manifest) -> int:
    """Distinct elements of weights and biases; padding, replicas, scales and aliases are not counted.

    A part that the source does not have (the missing bias of a fused one) is zeros and not counted either.
    """
    found: dict[str, list[Box]] = defaultdict(list)
    for record in manifest.tensors:
        if record.alias or record.part not in ("weight", "bias") or not record.sources:
            continue
        if manifest.tied_embeddings and record.role == "lm_head":
            continue
        found[record.name] += boxes(record)
    return sum(covered(rows) for rows in found.values())
