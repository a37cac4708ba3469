"""Meshes: how ranks are arranged, and the named policies for what does not divide.

`world = pp x tp x dp`; rank = (pp_rank * dp + dp_rank) * tp + tp_rank. Dense weights are split over tp and shared by
the dp replicas. The experts of a stage are spread over its tp x dp ranks: `ep` groups of tp * dp / ep ranks, which
split each expert between them (`moe_tp`).
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

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

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

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
