"""Calibration methods: what a recipe asks for under `methods:`, one file each.

A new method is one file with a `METHOD` and a row here; it is imported when a recipe names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.calibrate.methods.base import Method
    from quantkit.checkpoint.effects import Vectors
    from quantkit.checkpoint.reader import Source
    from quantkit.recipe import Recipe
    from quantkit.spec.transform import MethodOptions

METHODS: Mapping[str, str] = {
    "balance": "balance",
    "bias": "bias",
    "clip": "clip",
    "gptq": "gptq",
    "rotate": "rotate",
    "smooth": "smooth",
}
"""Name in a recipe -> module in this package whose `METHOD` serves it."""


def method(name: str) -> Method:
    """Row of a method.

    Raises:
        UsageError: there is none of this name.
    """
    from quantkit.calibrate.methods.base import Method

    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}", choices=sorted(METHODS))
    found = importlib.import_module(f"quantkit.calibrate.methods.{METHODS[name]}").METHOD
    assert isinstance(found, Method)
    return found


def learning(methods: Sequence[MethodOptions]) -> list[str]:
    """Names of the methods that need text."""
    return [options.name for options in methods if method(options.name).learns]


def require_artifact(methods: Sequence[MethodOptions], artifact: Path | None) -> None:
    """Refuse to go on without what a calibration found.

    Raises:
        UsageError: a method needs an artifact and there is none.
    """
    names = learning(methods)
    if names and artifact is None:
        raise UsageError(
            f"the method{'s' * (len(names) > 1)} {', '.join(names)} of the recipe learn{'s' * (len(names) == 1)} from "
            "text, and no calibration is given",
            "run `quantkit calibrate` with this recipe, and pass its folder with --calibration",
        )


def view_of(
    source: Source,
    methods: Sequence[MethodOptions],
    *,
    artifact: Path | None = None,
    without_drafts: bool = False,
    planning: bool = False,
    threads: int = 1,
    device: str = "cpu",
    written: Recipe | None = None,
) -> Source:
    """The source as a recipe's methods transform it; the source itself when none of them does.

    Args:
        methods: `Recipe.methods`, or the first of them.
        artifact: calibration that holds what methods found in text.
        without_drafts: draft layers are dropped (`Recipe.mtp`).
        planning: what methods will find in text is not known yet; until then it is left as it is.
        threads: that share the work on a tensor.
        device: that does it.
        written: recipe with all that was decided, for the weights as they will be written; None: without what makes up
            for the errors of rounding, which is the float model.

    Raises:
        UsageError: the model cannot be transformed so (every reason is listed), or a method needs an artifact.
    """
    from quantkit.checkpoint.transformed import TransformedSource
    from quantkit.spec.transform import CorrectBias, ScalePair, Transforms

    if not planning:
        require_artifact(methods, artifact)
    steps = Transforms().steps
    sets: dict[str, Vectors] = {}
    view = source
    for options in methods:
        row = method(options.name)
        if row.corrects and written and artifact:
            built = row.corrects(view, artifact, written)
        else:
            built = row.build(view, options, artifact)
        if not built.steps:
            continue
        steps += built.steps
        sets |= {step.vectors: built.vectors for step in built.steps if isinstance(step, ScalePair | CorrectBias)}
        view = TransformedSource(
            source,
            Transforms(steps=steps),
            _joined(dict(sets)),
            without_drafts=without_drafts,
            threads=threads,
            device=device,
        )
    return view


def _joined(sets: dict[str, Vectors]) -> Vectors:
    return lambda name, key: sets[name](name, key)
