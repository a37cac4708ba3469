"""Small settings: the tests measure correctness, the models are tiny and the text is short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantkit.recipe import Recipe, load_recipe
from quantkit.report import calibration as report


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Artifacts whose report is one word: drawing takes longer than calibrating a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "render", lambda _summary: "report")
        yield


def small_recipe(name: str = "w8a8", **calibration: object) -> Recipe:
    """A shipped recipe with little text; keyword arguments are keys of its calibration section."""
    values = load_recipe(name).model_dump()
    small = {"samples": 18, "seq_len": 48, "min_tokens_per_expert": 1, "held_out": 6}
    return Recipe.model_validate({**values, "calibration": {**values["calibration"], **small, **calibration}})
