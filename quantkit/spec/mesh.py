"""Meshes: how ranks are arranged, and the named policies for what does not divide.

`world = pp x tp x dp`; rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Dense weights are split over tp and shared by
the dp replicas. The experts of a stage are spread over its tp x dp ranks: `ep` groups of tp * dp / ep ranks, which
split each expert between them (`moe_tp`).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantkit.errors import UsageError

MAX_RANKS = 65_536
"""Bound on a mesh: files and manifest rows are made for each rank."""

Size = Annotated[int, Field(ge=1)]


class Coordinates(NamedTuple):
    """Place of one rank in every direction of the mesh."""

    pp: int
    dp: int
    tp: int
    ep: int
    moe_tp: int


class Mesh(BaseModel):
    """Sizes and policies of a mesh.

    Attributes:
        tp, pp, ep, dp: sizes.
        pp_policy: where the remainder of the layers goes: "middle" (vLLM: 61 over 4 = 15, 15, 16, 15), "last"
            (SGLang: 15, 15, 15, 16), or "explicit" with `pp_layers`.
        pp_layers: layers of each stage for "explicit".
        ep_policy: where the remainder of the experts goes: "first" (vLLM: one more on each of the first), "last"
            (all on the last), "round_robin" (rank r owns r, r + ep, ...), or "map" with `expert_map`.
        expert_map: experts of each ep rank for "map"; an expert may stand on several ranks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: Size = 1
    pp: Size = 1
    ep: Size = 1
    dp: Size = 1
    pp_policy: Literal["middle", "last", "explicit"] = "middle"
    pp_layers: tuple[int, ...] = ()
    ep_policy: Literal["first", "last", "round_robin", "map"] = "first"
    expert_map: tuple[tuple[int, ...], ...] = ()

    @model_validator(mode="after")
    def _bounded(self) -> Mesh:
        """A slip of the keyboard must not list a billion ranks."""
        if max(self.world, self.ep) > MAX_RANKS:
            raise UsageError(
                f"tp {self.tp} x pp {self.pp} x dp {self.dp}, ep {self.ep} is beyond {MAX_RANKS:,} ranks",
                "give the mesh that the model will run on",
            )
        return self

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names that options and reports give them."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}

    @property
    def moe_tp(self) -> int:
        """Ranks that split one expert between them; meaningful when ep divides tp * dp."""
        return self.tp * self.dp // self.ep

    def coordinates(self, rank: int) -> Coordinates:
        tp_rank = rank % self.tp
        dp_rank = rank // self.tp % self.dp
        in_stage = dp_rank * self.tp + tp_rank
        return Coordinates(
            pp=rank // (self.tp * self.dp),
            dp=dp_rank,
            tp=tp_rank,
            ep=in_stage // self.moe_tp,
            moe_tp=in_stage % self.moe_tp,
        )

    def stage_layers(self, layers: int) -> tuple[range, ...]:
        """Decoder layers of each pipeline stage; the mesh must fit (`problems`)."""
        if self.pp_policy == "explicit":
            sizes = list(self.pp_layers)
        else:
            sizes = [layers // self.pp] * self.pp
            # "middle" leaves the last stage, which also has the output head, without an extra layer
            shift = 2 if self.pp_policy == "middle" else 1
            for extra in range(layers % self.pp):
                sizes[-shift - extra] += 1
        starts = [sum(sizes[:stage]) for stage in range(self.pp)]
        return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))

    def rank_experts(self, experts: int) -> tuple[tuple[int, ...], ...]:
        """Logical experts of each ep rank; the mesh must fit (`problems`)."""
        if self.ep_policy == "map":
            return self.expert_map
        if self.ep_policy == "round_robin":
            return tuple(tuple(range(rank, experts, self.ep)) for rank in range(self.ep))
        base, extra = divmod(experts, self.ep)
        if self.ep_policy == "first":
            sizes = [base + (rank < extra) for rank in range(self.ep)]
        else:
            sizes = [base] * (self.ep - 1) + [base + extra]
        starts = [sum(sizes[:rank]) for rank in range(self.ep)]
        return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))

    def problems(self, layers: int, experts: int) -> list[str]:
        """Everything about the layers and experts that does not fit this mesh, with the legal values."""
        found: list[str] = []
        if self.pp_policy == "explicit":
            if len(self.pp_layers) != self.pp or sum(self.pp_layers) != layers or min(self.pp_layers, default=0) < 1:
                found.append(
                    f"pp_layers={list(self.pp_layers)}: give {self.pp} positive sizes that add up to {layers} layers"
                )
        elif self.pp_layers:
            found.append(f"pp_layers is given but pp_policy is {self.pp_policy}; legal: pp_policy explicit")
        elif self.pp > layers:
            found.append(f"pp={self.pp}: the model has {layers} layers; legal pp: 1 to {layers}")
        if self.tp * self.dp % self.ep:
            legal = [ep for ep in range(1, self.tp * self.dp + 1) if self.tp * self.dp % ep == 0]
            options = f"legal ep: {_listed(legal)}; or raise tp or dp"
            found.append(f"ep={self.ep} does not divide tp * dp = {self.tp * self.dp}; {options}")
        if self.ep > max(experts, 1):
            found.append(f"ep={self.ep}: the model has {experts} routed experts; legal ep: 1 to {max(experts, 1)}")
        return found + self._map_problems(experts)

    def _map_problems(self, experts: int) -> list[str]:
        if self.ep_policy != "map":
            return ["expert_map is given but ep_policy is not map"] if self.expert_map else []
        found = []
        if len(self.expert_map) != self.ep:
            found.append(f"expert_map has {len(self.expert_map)} rows; legal: one for each of the {self.ep} ep ranks")
        held = {expert for row in self.expert_map for expert in row}
        if lost := sorted(set(range(experts)) - held):
            found.append(f"expert_map leaves out the experts {_listed(lost)}")
        if foreign := sorted(held - set(range(experts))):
            found.append(f"expert_map names the experts {_listed(foreign)}; legal: 0 to {experts - 1}")
        if any(len(set(row)) != len(row) or not row for row in self.expert_map):
            found.append("expert_map: a row is empty or names an expert twice")
        return found


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
