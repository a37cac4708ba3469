"""Whether the ranks of a mesh together hold every layer, expert and element of the model, by the manifest alone."""

from __future__ import annotations

import math
from collections import defaultdict

from quantkit.convert.boxes import Box, boxes, covered, overlap
from quantkit.spec.manifest import Manifest, TensorRecord


def check_coverage(manifest: Manifest, sizes: tuple[int, int]) -> tuple[int, list[str], str]:
    """(number of whole tensors, failures, note).

    Args:
        sizes: decoder layers and routed experts by the config.
    """
    layers, experts = sizes
    failures = _ranks(manifest, layers, experts)
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
