"""The ranks of a mesh: which of them work together on what, and the collectives that they use.

Processes are started by `torchrun`; NCCL or RCCL carries the tensors between cards, gloo between CPUs. A mesh of one
needs no `torch.distributed` at all: every collective of a team of one returns what it was given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from quantkit.errors import InputError, QuantkitError, UsageError
from quantkit.spec.mesh import Coordinates, Mesh

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""After which a rank stops waiting for another, which may load for long; `torchrun` ends the rest of a dead one."""


@dataclass(frozen=True)
class Team:
    """Ranks that compute one thing together.

    Attributes:
        ranks: global ranks, in order.
        index: place of this process among them.
        group: torch's process group, None for a team of one.
        overlap: tokens from which `sum_of` sends one half while it computes the other; 0: never.
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: Any = None
    overlap: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the team, in place where `x` is contiguous."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def sum_of(self, compute: Callable[[slice], Tensor], tokens: int) -> Tensor:
        """Sum over the team of what `compute` gives for a range of the tokens: `[T, ...]`."""
        if self.size == 1 or not 0 < self.overlap <= tokens:
            return self.sum(compute(slice(0, tokens)))
        halves, sums = (slice(0, tokens // 2), slice(tokens // 2, tokens)), []
        for half in halves:
            part = compute(half).contiguous()
            sums.append((part, dist.all_reduce(part, group=self.group, async_op=True)))
        for _, sent in sums:
            sent.wait()
        return torch.cat([part for part, _ in sums])

    def max(self, x: Tensor) -> Tensor:
        """Largest value over the team, element by element."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x, op, group=self.group)
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Everybody's `x`, all of one shape, side by side along `dim`."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self.ranks]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def broadcast(self, x: Tensor, index: int) -> Tensor:
        """`x` of the member at `index`; that of the others is overwritten."""
        if self.size > 1:
            x = x.contiguous()
            dist.broadcast(x, self.ranks[index], group=self.group)
        return x

    def send(self, x: Tensor, index: int) -> None:
        dist.send(x.contiguous(), self.ranks[index], group=self.group)

    def receive(self, like: Tensor, index: int) -> Tensor:
        """A tensor of the shape and dtype of `like` from the member at `index`."""
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(x, self.ranks[index], group=self.group)
        return x

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """All-to-all: the first `sent[0]` rows go to the first member, and so on; the rows that came in, in order."""
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def objects(self, value: Any) -> list[Any]:
        """Everybody's `value`, in order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


ALONE = Team()


@dataclass(frozen=True)
class Ranks:
    """This process in its mesh.

    Attributes:
        mesh: sizes and policies.
        rank: global rank.
        tp: ranks that split dense layers; pp: the same place in every stage; dp: the same place in every replica.
        stage: all ranks of a stage: they share its experts. ep: one rank for each part of the experts; moe_tp: ranks
            that split one expert between them.
        world: all ranks.
    """

    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    tp: Team = ALONE
    pp: Team = ALONE
    dp: Team = ALONE
    stage: Team = ALONE
    ep: Team = ALONE
    moe_tp: Team = ALONE
    world: Team = ALONE

    @property
    def at(self) -> Coordinates:
        return self.mesh.coordinates(self.rank)

    def together(self, step: Callable[[], T], what: str) -> T:
        """Run a step that may fail on some ranks: it then fails on all, and says on which and why.

        Raises:
            QuantkitError: the error itself on a mesh of one; else one that lists those of all ranks.
        """
        error, done = None, []
        try:
            done.append(step())
        except QuantkitError as failed:
            error = failed
        found = self.world.objects(error and (type(error), str(error)))
        if error is not None and self.world.size == 1:
            raise error
        if failures := {rank: failure for rank, failure in enumerate(found) if failure}:
            kinds = {kind for kind, _ in failures.values()}
            kind = kinds.pop() if len(kinds) == 1 else InputError  # a common class keeps its meaning and exit code
            items = [f"rank {rank}: {text}" for rank, (_, text) in failures.items()]
            message = f"{what} failed on {len(failures)} of {self.world.size} ranks"
            raise kind(message, items=items) if self.rank == 0 else kind(message, "rank 0 says why")
        return done[0]


TEAMS: dict[str, Callable[[Coordinates], tuple[int, ...]]] = {
    "tp": lambda at: (at.pp, at.dp),
    "pp": lambda at: (at.dp, at.tp),
    "dp": lambda at: (at.pp, at.tp),
    "stage": lambda at: (at.pp,),
    "ep": lambda at: (at.pp, at.moe_tp),
    "moe_tp": lambda at: (at.pp, at.ep),
    "world": lambda at: (),
}
"""Team -> what its members have in common."""


def team_ranks(mesh: Mesh, name: str) -> list[tuple[int, ...]]:
    """Global ranks of every team of a name; together they are all ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        found.setdefault(TEAMS[name](mesh.coordinates(rank)), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def world_size() -> int:
    """Processes that `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(mesh: Mesh, what: str, *, on_card: bool = False, overlap: int = 0) -> Ranks:
    """Meet the other processes of a mesh.

    Args:
        what: was made for the mesh, for the message ("these shards are").
        on_card: tensors lie on cards.
        overlap: see `Team`.

    Raises:
        UsageError: another number of processes runs than the mesh has ranks.
    """
    if mesh.world != world_size():
        sizes = " ".join(f"{name}={size}" for name, size in mesh.sizes.items())
        raise UsageError(
            f"{what} made for {sizes}, a mesh of {mesh.world} rank(s); {world_size()} process(es) run",
            f"start one process for each rank: torchrun --nproc-per-node {mesh.world} ... (over several nodes: "
            "--nnodes), or convert for another mesh",
        )
    if mesh.world == 1:
        return Ranks(mesh)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_card else "gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    made: dict[tuple[int, ...], Any] = {}
    teams = {}
    for name in TEAMS:  # every process makes every group, in one order: torch wants it so
        for ranks in team_ranks(mesh, name):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)
            if rank in ranks:
                teams[name] = Team(ranks, ranks.index(rank), made.get(ranks), overlap)
    return Ranks(mesh, rank, **teams)


def leave() -> None:
    """Take leave of the other processes; without it NCCL warns at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
