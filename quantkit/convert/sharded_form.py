"""The sharded form: one set of files per stage and tp rank (dense) and per stage, ep and moe_tp rank (experts).

Tensors are fused (q+k+v, gate+up), stacked over the local experts, split and in canonical orientation; names are
`Key.shard_name`. Replicas (dp) read the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs import Key, Role, Split, Stage
from quantkit.archs.assemble import Location, cut, locate
from quantkit.archs.split import Range, misfit, split_range
from quantkit.checkpoint.reader import Source
from quantkit.convert.checkpoint_form import keep_tensor, kept_dtype, rows_of
from quantkit.convert.decide import Decisions, Problems, is_extra
from quantkit.convert.units import How, Piece, PlannedTensor, Zeros
from quantkit.spec.manifest import EXTRA_FILES, RankFiles
from quantkit.spec.mesh import Mesh
from quantkit.spec.scheme import SCHEMES, group_size_for

Unit = tuple[PlannedTensor, ...]


@dataclass(frozen=True)
class Member:
    """One part of a target: its role, where its rows lie (by expert; one item when there are none), their number.

    `locations` holds None where the source has no such tensor, which only biases may lack.
    """

    role: Role
    locations: tuple[tuple[Location, ...] | None, ...]
    rows: int


@dataclass(frozen=True)
class Target:
    """A tensor of the whole model in the form in which ranks hold it, before the split.

    Attributes:
        key: fused where possible, expert None.
        members: parts in row order.
        shape: global shape; `[E, ...]` for experts.
        dtype: when it is kept.
        scheme: name of its weight's scheme.
        tail: sizes after the rows: (K,) of a matrix, () of a vector.
    """

    key: Key
    members: tuple[Member, ...]
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    tail: tuple[int, ...]

    @property
    def per_expert(self) -> bool:
        return self.members[0].role.per_expert

    @property
    def is_int8(self) -> bool:
        return self.key.part == "weight" and SCHEMES[self.scheme].is_int8


class ShardedForm:
    """Builds the tensors of every rank of a mesh. Misfits go to `problems`, each once."""

    def __init__(self, source: Source, decisions: Decisions, mesh: Mesh, problems: Problems) -> None:
        self.source, self.decisions, self.mesh = source, decisions, mesh
        self.arch, self.dims = source.arch, source.dims
        self._problems = problems
        problems.use += mesh.problems(self.dims.layers, self.dims.experts)
        self.targets = [target for key in self._target_keys() if (target := self._target(key))]
        self._check_fit()

    def groups(self) -> Iterator[tuple[str, list[Unit]]]:
        """(name of a set of files, its tensors) for every stage and rank, then the whole tensors of no rank."""
        stages = self.mesh.stage_layers(self.dims.layers)
        experts = self.mesh.rank_experts(self.dims.experts) if self.dims.experts else ((),) * self.mesh.ep
        for stage in range(self.mesh.pp):
            here = [target for target in self.targets if self._stage(target.key, stages) == stage]
            dense = [target for target in here if not target.per_expert]
            for rank in range(self.mesh.tp):
                units = [self._with_alias(self._build(target, self.mesh.tp, rank)) for target in dense]
                yield f"stage{stage}-tp{rank}", units
            routed = [target for target in here if target.per_expert]
            for ep in range(self.mesh.ep):
                for rank in range(self.mesh.moe_tp):
                    units = [self._build(target, self.mesh.moe_tp, rank, experts[ep]) for target in routed]
                    yield f"stage{stage}-ep{ep}-moetp{rank}", units
        extra = [key for key in self.decisions.written if is_extra(self.source, key)]
        yield EXTRA_FILES, [(keep_tensor(self.source, key, key.shard_name),) for key in extra]

    def ranks(self, files: dict[str, tuple[str, ...]]) -> tuple[RankFiles, ...]:
        """What every rank reads, from the files of each set."""
        stages = self.mesh.stage_layers(self.dims.layers)
        experts = self.mesh.rank_experts(self.dims.experts) if self.dims.experts else ((),) * self.mesh.ep
        rows = []
        for rank in range(self.mesh.world):
            at = self.mesh.coordinates(rank)
            names = files[f"stage{at.pp}-tp{at.tp}"] + files[f"stage{at.pp}-ep{at.ep}-moetp{at.moe_tp}"]
            rows.append(RankFiles(rank=rank, files=names, layers=tuple(stages[at.pp]), experts=experts[at.ep]))
        return tuple(rows)

    # ------------------------------------------------------------------------------------------ targets

    def _target_keys(self) -> list[Key]:
        """Every target once, in canonical order of its first member."""
        found: dict[Key, None] = {}
        for key in self.decisions.written:
            if is_extra(self.source, key):
                continue
            whole = key._replace(expert=None)
            fuse = self.arch.role(key.role).fuse
            if fuse and self._all_parts(whole._replace(role=fuse, part="weight")):
                whole = whole._replace(role=fuse)
            found[whole] = None
        if self.source.tied and self.mesh.pp > 1:
            found[Key(None, "lm_head")] = None
        return list(found)

    def _all_parts(self, key: Key) -> bool:
        one = key._replace(expert=0) if self.arch.role(key.role).per_expert else key
        return all(self._locate(one._replace(role=part)) for part in self.arch.role(key.role).parts)

    def _locate(self, key: Key) -> tuple[Location, ...] | None:
        if key.role == "lm_head" and self.source.tied:
            key = key._replace(role="embed")
        return locate(self.arch, self.dims, key, self.source.has, lambda stored: rows_of(self.source, stored))

    def _target(self, key: Key) -> Target | None:
        role = self.arch.role(key.role)
        experts: list[int | None] = list(range(self.dims.experts)) if role.per_expert else [None]
        members = []
        for name in role.parts or (key.role,):
            places = tuple(self._locate(key._replace(role=name, expert=expert)) for expert in experts)
            members.append(Member(self.arch.role(name), places, self._member_rows(key._replace(role=name), places)))
        stored = [item.key for m in members for place in m.locations if place for item in place]
        if not stored or not self._complete(key, members):  # nothing stored: the config counts no experts
            return None
        tails = {self._tail(item) for item in stored}
        dtypes = {kept_dtype(self.source, self.source.entries[item]) for item in stored}
        int8 = self.decisions.is_int8(stored[0]) and key.part == "weight"
        if len(tails) > 1 or (len(dtypes) > 1 and not int8):
            shown = (
                ", ".join(f"{list(tail)}" for tail in sorted(tails)) if len(tails) > 1 else ", ".join(sorted(dtypes))
            )
            self._problems.source.append(f"{key.shard_name}: its parts differ in shape or dtype: {shown}")
            return None
        tail, rows = tails.pop(), sum(member.rows for member in members)
        shape = (*((self.dims.experts,) if role.per_expert else ()), rows, *tail)
        if self.source.entries[stored[0]].shape == ():
            shape = ()
        scheme = self.decisions.schemes[stored[0].with_part("weight")].name if int8 else "keep"
        return Target(key, tuple(members), shape, sorted(dtypes)[0], scheme, tail)

    def _member_rows(self, key: Key, places: tuple[tuple[Location, ...] | None, ...]) -> int:
        """Rows of one part; a bias that is missing has those of its weight."""
        counts = {sum(item.rows for item in place) for place in places if place}
        if not counts and key.part == "bias":
            one = key._replace(part="weight", expert=0 if self.arch.role(key.role).per_expert else None)
            counts = {sum(item.rows for item in self._locate(one) or ())}
        if len(counts) > 1:
            self._problems.source.append(f"{key.shard_name}: experts differ in shape: {sorted(counts)} rows")
        return max(counts, default=0)

    def _complete(self, key: Key, members: list[Member]) -> bool:
        """Whether every expert has every part; what is lost is reported. A whole part may lack its bias."""
        for member in members:
            lost = [str(expert) for expert, place in enumerate(member.locations) if place is None]
            if lost and not (key.part == "bias" and len(lost) == len(member.locations)):
                name = key._replace(role=member.role.name).shard_name
                self._problems.source.append(f"{name}: the checkpoint lacks experts {', '.join(lost)}")
                return False
        return True

    def _tail(self, stored: Key) -> tuple[int, ...]:
        shape = self.source.canonical_shape(stored)
        return shape[2:] if self.source.is_stacked(stored) else shape[1:]

    def _stage(self, key: Key, stages: tuple[range, ...]) -> int:
        if key.layer is not None:
            return next(stage for stage, layers in enumerate(stages) if key.layer in layers)
        return len(stages) - 1 if self.arch.role(key.role).stage is Stage.LAST else 0

    # -------------------------------------------------------------------------------------------- split

    def _check_fit(self) -> None:
        for target in self.targets:
            size, what = (self.mesh.moe_tp, "tp * dp / ep") if target.per_expert else (self.mesh.tp, "tp")
            if target.key.part != "weight" or not size:
                continue
            for member in target.members:
                by_row = member.role.split is Split.ROW and bool(target.tail)
                length = target.tail[0] if by_row else member.rows
                group = SCHEMES[target.scheme].group_size
                group = group_size_for(length, group) if group and by_row else 0
                if problem := misfit(self.dims, member.role, length, size, what, group):
                    self._problems.use.append(problem)

    def _build(self, target: Target, size: int, rank: int, experts: tuple[int, ...] = ()) -> Unit:
        """The weight (with its scales) or bias of one rank."""
        role = target.members[0].role
        lead = (len(experts),) if target.per_expert else ()
        columns = self._columns(target, role, size, rank)
        ranges = [self._rows(target, member, size, rank) for member in target.members]
        rows = sum(part.stop - part.start + part.padding for part in ranges)
        tail = (columns.stop - columns.start,) if columns else target.tail
        shape = (*lead, rows, *tail) if target.shape else ()
        pieces = tuple(self._pieces(target, ranges, experts))
        stored = [piece.key for piece in pieces if isinstance(piece, Location)]
        sources = tuple(dict.fromkeys(self.source.entries[key].name for key in stored))
        name = target.key.shard_name
        row_slices, column_slices = self._slices(target, ranges, columns)
        shared: dict[str, Any] = {"pieces": pieces, "experts": experts, "sources": sources}
        window = (columns.start, columns.stop) if columns else None
        slices: dict[str, Any] = {"global_shape": target.shape, "slices": row_slices + column_slices}
        if not target.is_int8:
            kept = PlannedTensor(name, target.key, How.COPY, target.dtype, shape, columns=window, **slices, **shared)
            return (kept,)
        scale_key = target.key.with_part("weight_scale")
        weight = PlannedTensor(
            name,
            target.key,
            How.INT8,
            "I8",
            shape,
            columns=window,
            scheme=target.scheme,
            scale=scale_key.shard_name,
            **slices,
            **shared,
        )
        scale = PlannedTensor(
            scale_key.shard_name,
            scale_key,
            How.SCALE,
            "F32",
            (*shape[:-1], 1),
            global_shape=(*target.shape[:-1], 1),
            slices=row_slices,  # the scales of a tensor that is split along K are whole on every rank
            **shared,
        )
        return weight, scale

    def _columns(self, target: Target, role: Role, size: int, rank: int) -> Range | None:
        if role.split is not Split.ROW or size == 1 or not target.tail:
            return None
        return split_range(self.dims, role, target.tail[0], size, rank)

    def _rows(self, target: Target, member: Member, size: int, rank: int) -> Range:
        if member.role.split is Split.COL:
            return split_range(self.dims, member.role, member.rows, size, rank)
        if member.role.split is Split.ROW and target.key.part == "bias" and rank > 0:
            return Range(0, 0, member.rows)  # the partial sums of the ranks are added, the bias must count once
        return Range(0, member.rows)

    def _pieces(self, target: Target, ranges: list[Range], experts: tuple[int, ...]) -> Iterator[Piece]:
        for expert in experts if target.per_expert else (0,):
            for member, part in zip(target.members, ranges, strict=True):
                place = member.locations[expert]
                if place is None:
                    yield Zeros(part.stop - part.start + part.padding)
                    continue
                yield from cut(place, part.start, part.stop)
                if part.padding:
                    yield Zeros(part.padding)

    def _slices(
        self, target: Target, ranges: list[Range], columns: Range | None
    ) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]:
        """Slices along the rows (one per part) and along the columns, in the global tensor."""
        row_dim = 1 if target.per_expert else 0
        rows: list[tuple[int, int, int]] = []
        start = 0
        for member, part in zip(target.members, ranges, strict=True):
            rows.append((row_dim, start + part.start, start + part.stop))
            start += member.rows
        whole = len(ranges) == 1 and all(
            part == Range(0, m.rows) for m, part in zip(target.members, ranges, strict=True)
        )
        column = () if columns is None else ((row_dim + 1, columns.start, columns.stop),)
        return () if whole else tuple(rows), column

    def _with_alias(self, unit: Unit) -> Unit:
        """The embedding table, followed by the output head of a tied model when both lie on the same rank."""
        table = unit[0]
        if table.key != Key(None, "embed") or not self.source.tied or self.mesh.pp > 1:
            return unit
        head = Key(None, "lm_head")
        return table, replace(table, name=head.shard_name, key=head, how=How.ALIAS, alias=table.name)
