"""The source as a recipe's methods transform it, and what a source that was converted before already went through."""

from __future__ import annotations

from pathlib import Path

from quantkit.calibrate.methods import view_of
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.transformed import transforms_of
from quantkit.convert.shard_source import open_source
from quantkit.errors import QuantkitError, UsageError
from quantkit.recipe import Recipe
from quantkit.spec.manifest import Manifest, manifest_path, read_manifest
from quantkit.spec.transform import Step


def open_transformed(root: Path, recipe: Recipe, *, ignore_index: bool = False, artifact: Path | None = None) -> Source:
    """A checkpoint or rank shards, as the recipe's methods transform them.

    Biases are corrected for the schemes of this recipe, so it holds all that a calibration decided.

    An output of quantkit whose weights went through the same methods before is taken as it is, so that sharding again
    and merging are slicing, whatever the recipe.

    Raises:
        InputError: no source there.
        UsageError: the model cannot be transformed so, or was transformed by other methods already.
    """
    source = open_source(root, ignore_index=ignore_index, extra_roles=recipe.roles)
    if not recipe.methods:
        return source
    made = made_by(root)
    if made is None or not made.recipe.get("methods"):
        return view_of(source, recipe.methods, artifact=artifact, without_drafts=recipe.mtp == "drop", written=recipe)
    if made.recipe.get("methods") != recipe.model_dump(mode="json")["methods"]:
        raise UsageError(
            f"the weights of {root} were transformed by other methods than those of the recipe {recipe.name}",
            "use the recipe of that conversion, one without methods, or the model that it was made from",
        )
    return source


def steps_of(source: Source) -> tuple[Step, ...]:
    """All steps that the weights of a source went through, now or in the conversion that made it."""
    now = transforms_of(source).steps
    made = None if now else made_by(source.root)
    return now if made is None else made.transforms


def made_by(root: Path) -> Manifest | None:
    """Manifest of the conversion that made a folder."""
    path = manifest_path(root)
    try:
        return read_manifest(path) if path else None
    except QuantkitError:
        return None  # not one of ours, or damaged: `verify` is there for that
