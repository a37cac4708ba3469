"""The pages under `recipes/plans`: what `quantkit plan` says of published models for 8, 16 and 32 cards.

python -m tests.plan.published      # writes them anew; `make plans` does the same
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from quantkit.commands.plan import render
from quantkit.memory import human_bytes, human_count
from quantkit.plan.devices import find_device
from quantkit.plan.report import PlanReport, plan_source
from quantkit.plan.sizing import Request
from quantkit.plan.source import read_source
from quantkit.recipe import load_recipe
from tests.models.replica import make_replica

PLANS = Path(__file__).parents[2] / "recipes" / "plans"
CARDS = (8, 16, 32)
DEVICE = "K100_AI"

RECIPES = {
    "Qwen3-30B-A3B": "qwen3-moe",
    "Qwen3-235B-A22B": "qwen3-moe",
    "Qwen3.5-397B-A17B": "qwen3.5-moe",
    "MiniMax-M2.7": "minimax-m2",
    "MiniMax-M3": "minimax-m3",
    "GLM-4.5": "glm-4.5",
    "GLM-5": "glm-5",
    "DeepSeek-V3.2": "deepseek-v3",
    "Kimi-K2": "kimi-k2",
    "gpt-oss-120b": "gpt-oss",
}
"""Published model -> recipe."""


@dataclass(frozen=True)
class Planned:
    """A model and its plan for each number of `CARDS`."""

    model: str
    reports: tuple[PlanReport, ...]


def planned(model: str, folder: Path) -> Planned:
    """Plan the replica `folder / model`; commands name it as a reader would, without the folder."""
    recipe, device = load_recipe(RECIPES[model]), find_device(DEVICE, None)
    with _inside(folder):
        source = read_source(Path(model), recipe)
        reports = [plan_source(source, Request(device, recipe, cards)) for cards in CARDS]
    return Planned(model, tuple(reports))


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def page(found: Planned) -> str:
    """Markdown: the recipe, then for each number of cards the command and all that it prints."""
    name = RECIPES[found.model]
    parts = [
        f"# {found.model} on {DEVICE}",
        f"Recipe [`{name}`](../{name}.yaml): {load_recipe(name).description}",
        "Written by `make plans` from headers that were made of the published config; the tests compare it.",
    ]
    for report in found.reports:
        command = f"quantkit plan {found.model} --recipe {name} --device {DEVICE} --cards {report.cards}"
        parts.append(f"## {report.cards} cards\n\n```\n$ {command}\n{_as_printed(report)}```")
    return "\n\n".join(parts) + "\n"


def _as_printed(report: PlanReport) -> str:
    file = StringIO()
    render(report, Console(file=file, highlight=False, soft_wrap=True, markup=False, emoji=False, width=10_000))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


_HEAD = ("model", "recipe", "parameters", "source", "INT8", "fewest cards", *(f"{cards} cards" for cards in CARDS))


def overview(every: list[Planned]) -> str:
    """Markdown: one row for each model."""
    first = every[0].reports[0]
    return (
        f"# Plans for published models on {DEVICE}\n\n{_row(_HEAD)}{_row(['---'] * len(_HEAD))}"
        f"{''.join(map(overview_row, every))}\n"
        "Under a number of cards: the first mesh, and the longest context that memory allows for as many sequences.\n"
        f"Planned for {first.concurrency} sequences of {first.context:,} tokens, BF16 cache, nodes of "
        f"{first.cards_per_node} cards. Sizes are exact for weights and cache,\n"
        "estimates for the rest; nothing here was run on these cards. Written by `make plans`.\n"
    )


def overview_row(found: Planned) -> str:
    first, name = found.reports[0], RECIPES[found.model]
    sizes = human_count(first.parameters), human_bytes(first.source_bytes), human_bytes(first.output_bytes)
    places = f"[{found.model}]({found.model}.md)", f"[`{name}`](../{name}.yaml)"
    return _row([*places, *sizes, str(first.fewest), *map(_cell, found.reports)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(report: PlanReport) -> str:
    if not report.proposals:
        return report.smaller.partition(": ")[2] if report.smaller else "-"
    best = report.proposals[0]
    sizes = " ".join(f"{name}{size}" for name in ("tp", "pp", "dp", "ep") if (size := getattr(best, name)) > 1)
    return f"{sizes}: {best.longest_context:,}"


def main() -> None:
    PLANS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        every = []
        for model in RECIPES:
            make_replica(model, Path(folder) / model)
            every.append(planned(model, Path(folder)))
            (PLANS / f"{model}.md").write_text(page(every[-1]), encoding="utf-8")
    (PLANS / "README.md").write_text(overview(every), encoding="utf-8")


if __name__ == "__main__":
    main()
