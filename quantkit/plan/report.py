"""All that `quantkit plan` tells, from a checkpoint folder or a config.json, for one kind of card and one workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.console import quoted
from quantkit.errors import UsageError
from quantkit.memory import grows, human_bytes
from quantkit.plan.cache import CacheFormat, per_token_at_start, sequence_bytes
from quantkit.plan.estimate import CHUNK, RESERVE, CardMemory, Model, Workload, largest_batch, longest_context
from quantkit.plan.proposals import Proposal, Rejected, propose
from quantkit.plan.sizing import Request, fewest_cards, recommend, smaller_work
from quantkit.plan.source import Source, read_source
from quantkit.recipe import Recipe
from quantkit.rope import rope_text
from quantkit.spec.document import Strict
from quantkit.spec.mesh import Mesh

SHOWN = 5
MILLION = 1_000_000


class MemoryRow(Strict):
    """Bytes of one column on the fullest card of the first proposal."""

    column: str
    nbytes: int


class ProposalRow(Strict):
    """One mesh, see `quantkit.plan.proposals.Proposal`.

    Attributes:
        card_bytes: on the fullest card, reserve included.
        longest_context: tokens of each sequence at the workload's concurrency that memory allows.
        largest_batch: sequences of the workload's context that memory allows.
        other_ep: values of ep that differ little from this one.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    card_bytes: int
    free_bytes: int
    kv_replicas: int
    tp_bytes_per_token_and_layer: int
    ep_bytes_per_token_and_layer: int
    pp_bytes_per_token: int
    longest_context: int
    largest_batch: int
    cost: float
    other_ep: tuple[int, ...]
    notes: tuple[str, ...]


class RejectedRow(Strict):
    """Meshes (tp, pp, dp, ep) that one reason forbids."""

    reason: str
    count: int
    examples: tuple[str, ...]


class WhatIf(Strict):
    """Another length of every sequence.

    Attributes:
        cache_bytes: of one sequence, one copy of everything, in the planned dtypes.
        bf16_bytes: the same in BF16.
        batch: sequences that fit on the first proposal.
        host_bytes: host memory that holds the caches of all of the workload's sequences, one copy of each.
        beyond: longer than the config's positions.
    """

    context: int
    cache_bytes: int
    bf16_bytes: int
    batch: int
    host_bytes: int
    beyond: bool


class PlanReport(Strict):
    """See the module. `fewest` is None when no number of cards up to `MAX_NODES` nodes is enough.

    `smaller` says what would fit where only the cache is too large.
    """

    name: str
    model_type: str
    from_tensors: bool
    parameters: int
    source_bytes: int
    source_dtypes: dict[str, int]
    output_bytes: int
    recipe: str
    device: str
    device_note: str
    card_bytes: int
    cards_per_node: int
    context: int
    concurrency: int
    chunk: int
    reserve: float
    kv_keys: str
    kv_values: str
    max_positions: int
    rope: str
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_bytes_total: int
    fewest: int | None
    recommended: int | None
    advice: str
    cards: int | None
    smaller: str
    memory: tuple[MemoryRow, ...]
    beside_ranks: dict[str, int]
    proposals: tuple[ProposalRow, ...]
    rejected: tuple[RejectedRow, ...]
    what_if: tuple[WhatIf, ...]
    commands: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return bool(self.proposals)


def make_plan(path: Path, request: Request) -> PlanReport:
    """Plan a model.

    Args:
        path: a checkpoint folder, a folder with a config.json, or a config.json.

    Raises:
        InputError: neither, or a config that describes no decoder.
        UsageError: INT8 keys or values where latents take their place.
    """
    return plan_source(read_source(path, request.recipe), request)


def plan_source(source: Source, request: Request) -> PlanReport:
    """Plan a model that was read with the request's recipe, so that several requests read it once."""
    model = source.model
    latents = model.dims.is_mla or not model.dims.v_head_dim
    if latents and request.cache.keys != request.cache.values:
        raise UsageError(
            "this model caches latents, which are keys and values at once", "give --kv-keys and --kv-values alike"
        )
    positions = model.dims.max_positions
    context = request.context or min(positions or 32768, 32768)
    work = Workload(context, request.concurrency, request.cache)
    fewest = fewest_cards(model, request, work)
    recommended, advice = recommend(model, request, work, fewest)
    cards = request.cards or recommended
    proposals: list[Proposal] = []
    rejected: list[Rejected] = []
    if cards:
        proposals, rejected = propose(model, cards, request.cards_per_node, work, request.device.nbytes)
    elif fewest is None:
        _, rejected = propose(model, request.cards_per_node, request.cards_per_node, work, request.device.nbytes)
    return _report(source, request, work, fewest, recommended, advice, cards, proposals, rejected)


def _report(
    source: Source,
    request: Request,
    work: Workload,
    fewest: int | None,
    recommended: int | None,
    advice: str,
    cards: int | None,
    proposals: list[Proposal],
    rejected: list[Rejected],
) -> PlanReport:
    model, caches = source.model, source.model.caches(work.cache, 1)
    best = proposals[0] if proposals else None
    return PlanReport(
        name=source.name,
        model_type=str(model.config.get("model_type")),
        from_tensors=source.from_tensors,
        parameters=source.parameters,
        source_bytes=source.source_bytes,
        source_dtypes=source.dtypes,
        output_bytes=source.output_bytes,
        recipe=request.recipe.name,
        device=request.device.name,
        device_note=request.device.note,
        card_bytes=request.device.nbytes,
        cards_per_node=request.cards_per_node,
        context=work.context,
        concurrency=work.concurrency,
        chunk=CHUNK,
        reserve=RESERVE,
        kv_keys=work.cache.keys,
        kv_values=work.cache.values,
        max_positions=model.dims.max_positions,
        rope=rope_text(model.config),
        kv_bytes_per_token=per_token_at_start(caches),
        kv_bytes_per_sequence=sequence_bytes(caches, work.context),
        kv_bytes_total=sequence_bytes(caches, work.context) * work.concurrency,
        fewest=fewest,
        recommended=recommended,
        advice=advice,
        cards=cards,
        smaller=smaller_work(model, request, work, cards) if cards and not best else "",
        memory=tuple(_memory(best.memory)) if best else (),
        beside_ranks=dict(model.weights.whole),
        proposals=tuple(_rows(model, proposals, work, request.device.nbytes)),
        rejected=tuple(_rejected(row) for row in rejected),
        what_if=tuple(_what_if(model, best, work, request.device.nbytes)),
        commands=_commands(source, request, best.mesh) if best else (),
        warnings=(*_size_warnings(source, model, work, request.recipe), *source.warnings),
    )


def _size_warnings(source: Source, model: Model, work: Workload, recipe: Recipe) -> Iterator[str]:
    if grows(source.source_bytes, source.output_bytes):
        form = next(iter(source.dtypes), "its form")
        yield (
            f"INT8 makes this model larger: {human_bytes(source.source_bytes)} ({form}) become "
            f"{human_bytes(source.output_bytes)}; keep the source where cards read it natively"
        )
    if recipe.methods and model.weights.tied:
        table = model.dims.vocab * model.dims.hidden * 2
        yield f"recipe {recipe.name} may give the tied output head weights of its own: {human_bytes(table)} more"
    if model.dims.max_positions and work.context > model.dims.max_positions:
        yield f"a context of {work.context:,} is beyond the {model.dims.max_positions:,} positions of config.json"


def _memory(memory: CardMemory) -> Iterator[MemoryRow]:
    for column, nbytes in sorted(memory.weights.items(), key=lambda item: -item[1]):
        yield MemoryRow(column=f"weights: {column}", nbytes=nbytes)
    yield MemoryRow(column="KV cache", nbytes=memory.cache)
    yield MemoryRow(column="activations (estimate)", nbytes=memory.activations)
    yield MemoryRow(column="communication buffers (estimate)", nbytes=memory.buffers)
    yield MemoryRow(column="reserve", nbytes=memory.reserve)
    yield MemoryRow(column="free", nbytes=memory.free)


def _rows(model: Model, proposals: list[Proposal], work: Workload, card: int) -> Iterator[ProposalRow]:
    """The best mesh of each (tp, pp, dp), with the values of ep that would do too."""
    groups: dict[tuple[int, int, int], list[Proposal]] = {}
    for row in proposals:
        groups.setdefault((row.mesh.tp, row.mesh.pp, row.mesh.dp), []).append(row)
    for group in list(groups.values())[:SHOWN]:
        row = group[0]
        yield ProposalRow(
            tp=row.mesh.tp,
            pp=row.mesh.pp,
            dp=row.mesh.dp,
            ep=row.mesh.ep,
            card_bytes=row.memory.total,
            free_bytes=row.memory.free,
            kv_replicas=row.replicas,
            tp_bytes_per_token_and_layer=row.tp_bytes,
            ep_bytes_per_token_and_layer=row.ep_bytes,
            pp_bytes_per_token=row.pp_bytes,
            longest_context=longest_context(model, row.mesh, work, card),
            largest_batch=largest_batch(model, row.mesh, work, card),
            cost=row.cost,
            other_ep=tuple(other.mesh.ep for other in group[1:]),
            notes=row.notes,
        )


def _rejected(row: Rejected) -> RejectedRow:
    shown = tuple(f"tp{mesh.tp} pp{mesh.pp} dp{mesh.dp} ep{mesh.ep}" for mesh in row.meshes[:3])
    return RejectedRow(reason=row.reason, count=len(row.meshes), examples=shown)


def _what_if(model: Model, best: Proposal | None, work: Workload, card: int) -> Iterator[WhatIf]:
    own, plain = model.caches(work.cache, 1), model.caches(CacheFormat(), 1)
    positions = model.dims.max_positions
    for context in sorted({work.context, positions or work.context, MILLION}):
        one = sequence_bytes(own, context)
        other = Workload(context, work.concurrency, work.cache)
        yield WhatIf(
            context=context,
            cache_bytes=one,
            bf16_bytes=sequence_bytes(plain, context),
            batch=largest_batch(model, best.mesh, other, card) if best else 0,
            host_bytes=one * work.concurrency,
            beyond=bool(positions and context > positions),
        )


def _commands(source: Source, request: Request, mesh: Mesh) -> tuple[str, ...]:
    given = request.recipe_given or request.recipe.name
    recipe = "" if given == "w8a8" else f" --recipe {quoted(given)}"
    options = "".join(f" --{name} {size}" for name, size in mesh.sizes.items() if size > 1)
    return (
        f"quantkit convert {quoted(source.place)} -o OUT{recipe} --format sharded{options}",
        f"quantkit convert {quoted(source.place)} -o OUT{recipe}",
    )
