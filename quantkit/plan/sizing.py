"""How many cards: the fewest on which a mesh fits, and the number that leaves room."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.plan.cache import CacheFormat
from quantkit.plan.devices import Device
from quantkit.plan.estimate import RESERVE, Model, Workload, largest_batch, longest_context
from quantkit.plan.proposals import illegal, meshes, propose
from quantkit.recipe import Recipe
from quantkit.spec.mesh import Mesh

MAX_NODES = 64


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        cards: to plan for; None: the recommended number.
        context: of each sequence; None: the config's positions, at most 32,768.
        recipe_given: name or file of the recipe, for the commands that are printed; empty: its own name.
    """

    device: Device
    recipe: Recipe
    cards: int | None = None
    cards_per_node: int = 8
    context: int | None = None
    concurrency: int = 8
    cache: CacheFormat = CacheFormat()  # noqa: RUF009  # frozen
    recipe_given: str = ""


def candidates(cards_per_node: int) -> list[int]:
    """Numbers of cards that people have: any within a node, whole nodes beyond."""
    return [*range(1, cards_per_node + 1), *(cards_per_node * nodes for nodes in range(2, MAX_NODES + 1))]


def fewest_cards(model: Model, request: Request, work: Workload) -> int | None:
    """The least number of cards with a mesh that fits."""
    usable = request.device.nbytes * (1 - RESERVE)
    least = _weight_bytes(model) / usable
    for cards in candidates(request.cards_per_node):
        if cards >= least and propose(model, cards, request.cards_per_node, work, request.device.nbytes)[0]:
            return cards
    return None


def _weight_bytes(model: Model) -> int:
    dense, expert = model.weights.stage(Mesh(), 0, range(model.dims.layers))
    return sum(dense.values()) + model.dims.experts * sum(expert.values())


def recommend(model: Model, request: Request, work: Workload, fewest: int | None) -> tuple[int | None, str]:
    """1.2 to 1.5 times the fewest, rounded to what people have and to a mesh that fits; with the reason."""
    if fewest is None:
        return None, f"does not fit on {MAX_NODES} nodes of {request.cards_per_node} cards"
    low, high = math.ceil(1.2 * fewest), max(math.floor(1.5 * fewest), math.ceil(1.2 * fewest))
    rule = f"1.2 to 1.5 times the fewest is {low}" + (f" to {high}" if high > low else "")
    possible = [cards for cards in candidates(request.cards_per_node) if cards >= low]
    for cards in possible:
        if propose(model, cards, request.cards_per_node, work, request.device.nbytes)[0]:
            why = "" if cards <= high else "; the next number with whole nodes and a mesh that fits"
            return cards, f"{rule}{why}{_wider(model, request, work, cards)}"
    return fewest, rule


def _wider(model: Model, request: Request, work: Workload, cards: int) -> str:
    """A remark where a few more cards of one node would split every layer over all of them, and these do not."""

    def whole(number: int) -> bool:
        found, _ = propose(model, number, request.cards_per_node, work, request.device.nbytes)
        return any(row.mesh.tp == number for row in found)

    if cards >= request.cards_per_node or whole(cards):
        return ""
    more = next((number for number in range(cards + 1, request.cards_per_node + 1) if whole(number)), None)
    return f"; {more} could share every layer (tp={more}), which answers a single request faster" if more else ""


def smaller_work(model: Model, request: Request, work: Workload, cards: int) -> str:
    """Where the weights fit on `cards`: the mesh that leaves most for a cache, and what it has room for; else ""."""
    best: tuple[int, int, Mesh] | None = None
    for mesh in meshes(cards, bool(model.dims.experts)):
        if illegal(model, mesh, request.cards_per_node):
            continue
        found = longest_context(model, mesh, work, request.device.nbytes), -mesh.ep, mesh
        if found[0] and (best is None or found[:2] > best[:2]):
            best = found
    if best is None:
        return ""
    context, _, mesh = best
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.sizes.items())
    batch = largest_batch(model, mesh, work, request.device.nbytes)
    fewer = f"{batch} sequences of {work.context:,} tokens, or " if batch else ""
    return f"with less work it fits on {cards} cards ({sizes}): {fewer}{work.concurrency} of {context:,}"
