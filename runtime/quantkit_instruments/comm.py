"""Collectives over the teams of a mesh: are they right, how long does one take, how much do they carry.

Bandwidth is that of the links, as nccl-tests define it: an all-reduce moves 2 (n - 1) / n of its bytes over each link,
an all-gather and an all-to-all (n - 1) / n of what a rank has in the end, send/recv all.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit.spec.mesh import Mesh
from quantkit_runtime.device import Device
from quantkit_runtime.parallel import TEAMS, Ranks, Team, join, team_ranks


@dataclass(frozen=True)
class Row:
    """One collective over the teams of a name; figures are those of the slowest rank.

    Attributes:
        teams: names of the teams that have these members.
        size: ranks of a team.
        correct: the result is the expected one on every rank.
        latency: seconds of a message of a few bytes.
        bandwidth: bytes a second over a link, with `nbytes` on each rank.
    """

    teams: str
    size: int
    collective: str
    correct: bool
    latency: float
    nbytes: int
    bandwidth: float


def _ring(team: Team, x: Tensor) -> Tensor:
    """To the next member, as hidden states go from stage to stage; the last one's to the first."""
    if team.index == 0:
        team.send(x, 1)
        return team.receive(x, team.size - 1)
    got = team.receive(x, team.index - 1)
    team.send(x, (team.index + 1) % team.size)
    return got


def _all_to_all(team: Team, x: Tensor) -> Tensor:
    rows = [len(x) // team.size] * team.size
    return team.exchange(x, rows, rows)


Collective = Callable[[Team, Tensor], Tensor]
Expected = Callable[[Team, Callable[[int], Tensor]], Tensor]

COLLECTIVES: dict[str, tuple[Collective, Expected, Callable[[int], float]]] = {
    "all-reduce": (
        lambda team, x: team.sum(x.clone()),
        lambda team, of: torch.stack([of(i) for i in range(team.size)]).sum(0),
        lambda n: 2 * (n - 1) / n,
    ),
    "all-gather": (
        lambda team, x: team.gather(x, 0),
        lambda team, of: torch.cat([of(i) for i in range(team.size)]),
        lambda n: n - 1,
    ),
    "all-to-all": (
        _all_to_all,
        lambda team, of: torch.cat([of(i).chunk(team.size)[team.index] for i in range(team.size)]),
        lambda n: (n - 1) / n,
    ),
    "send/recv": (_ring, lambda team, of: of((team.index - 1) % team.size), lambda n: n),  # n hops after each other
}
"""Name -> (what runs, what must come out given every member's tensor, share of its bytes that a link carries)."""


def check(mesh: Mesh, device: Device, nbytes: int, repeats: int) -> tuple[list[Row], list[str]]:
    """Run all collectives; every rank of the mesh must call it.

    Returns:
        The rows, and warnings about where ranks lie.

    Raises:
        UsageError: a mesh of one, or one that does not run.
    """
    ranks = join(mesh, "the mesh is", on_card=device.torch.type == "cuda")
    if mesh.world == 1:
        raise UsageError(
            "a mesh of one rank has no collectives", "give --tp, --pp, --dp or shards of a mesh, under torchrun"
        )
    rows = [
        _measure(ranks, names, team, collective, device.torch, nbytes, repeats)
        for names, team in _distinct(ranks)
        for collective in COLLECTIVES
    ]
    return rows, _warnings(ranks)


def _distinct(ranks: Ranks) -> Iterator[tuple[str, Team]]:
    """Teams of more than one rank; those with the same members once, under all their names."""
    found: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name in TEAMS:
        found.setdefault(tuple(team_ranks(ranks.mesh, name)), []).append(name)
    for names in found.values():
        team: Team = getattr(ranks, names[0])
        if team.size > 1:
            yield ", ".join(names), team


def _measure(
    ranks: Ranks, names: str, team: Team, collective: str, device: torch.device, nbytes: int, repeats: int
) -> Row:
    run, expected, share = COLLECTIVES[collective]

    def of(member: int, count: int) -> Tensor:
        """Whole numbers that differ between members and places, and whose sum float32 holds."""
        return (torch.arange(count, device=device) % 251 + 1000 * member).float()

    small, large = (team.size * max(1, size // (4 * team.size)) for size in (8, nbytes))
    right = torch.equal(run(team, of(team.index, large)), expected(team, lambda member: of(member, large)))
    latency = _seconds(lambda: run(team, of(team.index, small)), device, repeats)
    x = of(team.index, large)
    seconds = _seconds(lambda: run(team, x), device, repeats)
    found = ranks.world.objects((right, latency, seconds))
    slowest = max(seconds for _, _, seconds in found)
    return Row(
        names,
        team.size,
        collective,
        all(right for right, _, _ in found),
        max(latency for _, latency, _ in found) / (team.size if collective == "send/recv" else 1),
        4 * large,
        share(team.size) * 4 * large / slowest,
    )


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of a call, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _warnings(ranks: Ranks) -> list[str]:
    """Tensor parallelism that leaves a node: its all-reduces, two a layer, then wait for the network."""
    nodes = ranks.world.objects(os.environ.get("GROUP_RANK", socket.gethostname()))
    return [
        f"the tp team of ranks {members[0]} to {members[-1]} lies on {len(places)} nodes ({', '.join(places)}): choose "
        "a tp that divides the cards of a node, and pp or dp across nodes"
        for members in team_ranks(ranks.mesh, "tp")
        if len(places := sorted({nodes[rank] for rank in members})) > 1
    ]


def as_json(mesh: Mesh, device: Device, rows: list[Row], warnings: list[str]) -> dict[str, Any]:
    """The machine-readable report."""
    return {
        "passed": all(row.correct for row in rows),
        "mesh": mesh.sizes,
        "device": device.line,
        "backend": torch.distributed.get_backend(),
        "collectives": [asdict(row) for row in rows],
        "warnings": warnings,
    }
