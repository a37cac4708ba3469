"""Small settings: the tests measure correctness, the models are tiny and the text is short."""

from __future__ import annotations

from quantkit.recipe import Recipe, load_recipe


def small_recipe(name: str = "w8a8", **calibration: object) -> Recipe:
    """A shipped recipe with little text; keyword arguments are keys of its calibration section."""
    values = load_recipe(name).model_dump()
    small = {"samples": 18, "seq_len": 48, "min_tokens_per_expert": 1, "held_out": 6}
    return Recipe.model_validate({**values, "calibration": {**values["calibration"], **small, **calibration}})
