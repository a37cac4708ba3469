"""Small settings: the tests measure correctness, the models are tiny and the text is short."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from quantkit.recipe import Recipe, load_recipe
from quantkit.report import calibration as report
from tests.families import make_tiny


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Artifacts whose report is one word: drawing takes longer than calibrating a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "render", lambda _summary: "report")
        yield


@pytest.fixture(scope="session")
def family(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's random model with a tokenizer, so that it can be calibrated."""

    @cache
    def make(name: str) -> Path:
        root = make_tiny(name, tmp_path_factory.mktemp(name) / "model", vocab_size=4096)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(minimax / file, root)
        return root

    return make


def small_recipe(name: str = "w8a8", **calibration: object) -> Recipe:
    """A shipped recipe with little text; keyword arguments are keys of its calibration section."""
    values = load_recipe(name).model_dump()
    small = {"samples": 18, "seq_len": 48, "min_tokens_per_expert": 1, "held_out": 6}
    return Recipe.model_validate({**values, "calibration": {**values["calibration"], **small, **calibration}})
