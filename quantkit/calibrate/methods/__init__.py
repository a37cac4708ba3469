"""Calibration methods: exact transforms of the weights that a recipe asks for under `methods:`, one file each.

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
    from quantkit.spec.transform import MethodOptions

METHODS: Mapping[str, str] = {
    "balance": "balance",
    "rotate": "rotate",
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


def view_of(
    source: Source, methods: Sequence[MethodOptions], *, artifact: Path | None = None, without_drafts: bool = False
) -> Source:
    """The source as a recipe's methods transform it; the source itself when there are none.

    Args:
        methods: `Recipe.methods`.
        artifact: calibration that holds what data-driven methods found.
        without_drafts: draft layers are dropped (`Recipe.mtp`).

    Raises:
        UsageError: the model cannot be transformed so (every reason is listed), or a method needs an artifact.
    """
    from quantkit.checkpoint.transformed import TransformedSource
    from quantkit.spec.transform import Transforms

    if not methods:
        return source
    steps = Transforms().steps
    sets: dict[str, Vectors] = {}
    view = source
    for options in methods:
        built = method(options.name).build(view, options, artifact)
        steps += built.steps
        sets |= {step.vectors: built.vectors for step in built.steps if step.step == "scale_pair"}
        view = TransformedSource(source, Transforms(steps=steps), _joined(dict(sets)), without_drafts=without_drafts)
    return view


def _joined(sets: dict[str, Vectors]) -> Vectors:
    return lambda name, key: sets[name](name, key)
