"""`quantkit plan`: how many cards, which mesh, what fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import FiniteRange, console, json_option, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quantkit.plan.report import PlanReport

_REASONS = 6
"""Reasons of rejection that are printed."""

_DTYPES = click.Choice(["bf16", "int8"])


@click.command(
    "plan",
    epilog="""\b
Examples:
  quantkit plan MODEL --device K100_AI                  fewest cards, recommended cards, meshes
  quantkit plan config.json --card-memory 64 --cards 16 --context 131072 --concurrency 32
Weights and cache are exact, activations and buffers are estimates. Exit code 3 if nothing fits.
""",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--device", metavar="NAME", help="Card by name: K100_AI, MI210, MI300X, ...")
@click.option("--card-memory", type=FiniteRange(0.001), metavar="GiB", help="Memory of a card.")
@click.option("--cards", type=click.IntRange(1, 4096), help="Cards to plan for; default: the recommended number.")
@click.option("--cards-per-node", type=click.IntRange(1, 128), default=8, show_default=True)
@click.option("--context", type=click.IntRange(1), help="Tokens of each sequence; default: the model's, at most 32768.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Sequences at a time.")
@click.option("--recipe", default="w8a8", show_default=True, metavar="NAME|FILE", help="What is quantized.")
@click.option("--kv-keys", type=_DTYPES, default="bf16", show_default=True, help="Dtype of cached keys.")
@click.option("--kv-values", type=_DTYPES, default="bf16", show_default=True, help="Dtype of cached values.")
@json_option
def command(
    model: Path,
    device: str | None,
    card_memory: float | None,
    cards: int | None,
    cards_per_node: int,
    context: int | None,
    concurrency: int,
    recipe: str,
    kv_keys: str,
    kv_values: str,
    as_json: bool,
) -> None:
    """Plan the cards for MODEL, a checkpoint folder or a bare config.json; no weights are read."""
    from quantkit.plan.cache import CacheFormat
    from quantkit.plan.devices import find_device
    from quantkit.plan.report import make_plan
    from quantkit.plan.sizing import Request
    from quantkit.recipe import load_recipe

    request = Request(
        find_device(device, card_memory),
        load_recipe(recipe),
        cards,
        cards_per_node,
        context,
        concurrency,
        CacheFormat(kv_keys, kv_values),
        recipe_given=recipe,
    )
    found = make_plan(model, request)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        render(found, console())
    if not found.fits:
        raise SystemExit(3)


def render(found: PlanReport, out: Console) -> None:
    """Warnings, sizes, number of cards, memory of a card, meshes, why others were rejected, what if, commands."""
    from quantkit.memory import human_bytes, human_count

    for warning in found.warnings:
        out.print(f"warning: {warning}", markup=False)
    origin = "headers" if found.from_tensors else "config.json alone"
    out.print(
        f"{found.model_type}: {human_count(found.parameters)} parameters, {human_bytes(found.source_bytes)} "
        f"({next(iter(found.source_dtypes), '-')}) -> {human_bytes(found.output_bytes)} by recipe {found.recipe} "
        f"(from {origin})",
        markup=False,
    )
    out.print(
        f"cache: keys {found.kv_keys}, values {found.kv_values}: {found.kv_bytes_per_token:,} B a token, "
        f"{human_bytes(found.kv_bytes_per_sequence)} for {found.context:,} tokens, "
        f"{human_bytes(found.kv_bytes_total)} for {found.concurrency} sequences; "
        f"positions {found.max_positions:,}, rope scaling {found.rope}",
        markup=False,
    )
    fewest = "none" if found.fewest is None else str(found.fewest)
    note = f" ({found.device_note})" if found.device_note else ""
    out.print(
        f"cards of {found.device}, {human_bytes(found.card_bytes)}{note}: fewest {fewest}, "
        f"recommended {found.recommended or 'none'} ({found.advice}); planned for {found.cards or 'none'}",
        markup=False,
    )
    if found.beside_ranks:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in sorted(found.beside_ranks.items()))
        out.print(f"on no rank, and not counted below: {parts}", markup=False)
    if found.proposals:
        _render_fit(found, out)
    else:
        out.print(f"nothing fits on {found.cards or 'these'} cards", markup=False)
        if found.smaller:
            out.print(found.smaller, markup=False)
    for row in found.rejected[:_REASONS]:
        out.print(f"rejected {row.count}: {row.reason} ({'; '.join(row.examples)})", markup=False)
    if len(found.rejected) > _REASONS:
        out.print(f"rejected for {len(found.rejected) - _REASONS} more reasons: see --json", markup=False)
    out.print(_what_if(found))
    out.print(f"fit: sequences on these cards; host memory: caches of {found.concurrency} sequences kept on the host")
    for number, line in enumerate(found.commands):
        out.print(f"next: {line}{'' if number == 0 else '   (checkpoint for engines)'}", markup=False)


def _render_fit(found: PlanReport, out: Console) -> None:
    from quantkit.memory import human_bytes

    best = found.proposals[0]
    out.print(
        f"\nthe fullest card of tp {best.tp}, pp {best.pp}, dp {best.dp}, ep {best.ep} "
        f"(prefill chunks of {found.chunk}, reserve {found.reserve:.0%}):",
        markup=False,
    )
    table = _plain_table("part", "bytes")
    for row in found.memory:
        table.add_row(row.column, human_bytes(row.nbytes) if row.nbytes else "0")
    out.print(table)
    out.print("\nmeshes that fit, the best first; bytes that a rank sends for one token:", markup=False)
    table = _plain_table("tp", "pp", "dp", "ep", "a card", "free", "a layer", "experts", "stages", "context", "batch")
    for mesh in found.proposals:
        table.add_row(
            *(str(size) for size in (mesh.tp, mesh.pp, mesh.dp, mesh.ep)),
            human_bytes(mesh.card_bytes),
            human_bytes(mesh.free_bytes),
            f"{mesh.tp_bytes_per_token_and_layer:,}",
            f"{mesh.ep_bytes_per_token_and_layer:,}",
            f"{mesh.pp_bytes_per_token:,}",
            f"{mesh.longest_context:,}",
            f"{mesh.largest_batch:,}",
        )
    out.print(table)
    for mesh in found.proposals:
        if mesh.notes:
            out.print(f"  tp {mesh.tp}, pp {mesh.pp}, dp {mesh.dp}: {'; '.join(mesh.notes)}", markup=False)
    out.print(
        "a layer: all-reduces and experts; experts: those parts of it; stages: between all of them together; "
        f"context: longest for {found.concurrency} sequences; batch: most sequences of {found.context:,} tokens",
        markup=False,
    )


def _what_if(found: PlanReport) -> Table:
    from quantkit.memory import human_bytes

    table = _plain_table("what if: context", "one cache", "in BF16", "fit", "host memory", "")
    for row in found.what_if:
        table.add_row(
            f"{row.context:,}",
            human_bytes(row.cache_bytes),
            human_bytes(row.bf16_bytes),
            f"{row.batch:,}",
            human_bytes(row.host_bytes),
            "beyond positions" if row.beyond else "",
        )
    return table


def _plain_table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("part", "") else "right")
    return table
