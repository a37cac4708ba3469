"""What a rung makes of the source: the recipe with what a calibration decided, the view, how weights are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibrate.decisions import schemes_of
from quantkit.calibrate.fake_quant import Rounding, Schemes
from quantkit.calibrate.groups import groups_of
from quantkit.calibrate.methods import learning, view_of
from quantkit.calibrate.rounding import rounds_as_found, rounds_to_nearest
from quantkit.checkpoint.reader import Source
from quantkit.convert.decided import with_decisions
from quantkit.errors import QuantkitError, UsageError
from quantkit.ladder.rungs import Rung
from quantkit.recipe import Recipe, load_recipe, validated
from quantkit.spec.calibration import Artifact


@dataclass(frozen=True)
class Arithmetic:
    """Attributes:
    recipe: as its author wrote it, which is what `convert` takes.
    resolved: with a rule for every exception that the calibration decided on.
    calibration: folder of what methods learned from text, None where nothing was.
    digest: sha256 of the calibration's summary, "" without one.
    """

    recipe: Recipe
    resolved: Recipe
    calibration: Path | None = None
    digest: str = ""

    def view(self, source: Source) -> Source:
        return view_of(source, self.recipe.methods, artifact=self.calibration)

    def schemes(self, view: Source) -> dict[int, Schemes]:
        """Layer -> role -> scheme of the GEMMs that become INT8."""
        return schemes_of(groups_of(view, self.resolved))

    def rounded(self, view: Source) -> Callable[[int], Rounding]:
        """Layer -> how its weights are rounded."""
        if self.calibration is None:
            return rounds_to_nearest
        return rounds_as_found(view, self.calibration, self.recipe.methods)


def arithmetic_of(rungs: Sequence[Rung], source: Source) -> dict[str, Arithmetic]:
    """Rung -> its arithmetic; all rungs are checked before one runs.

    Raises:
        UsageError: recipes or calibrations that cannot be used (all listed).
    """
    found, problems = {}, []
    for rung in rungs:
        try:
            found[rung.name] = _calibrated(rung, source) if rung.calibration else _plain(rung, source)
            found[rung.name].view(source)  # says now what cannot be transformed
        except QuantkitError as error:
            problems.append(f"{rung.name}: {error.message}{''.join(f'; {item}' for item in error.items)}")
    if problems:
        raise UsageError("rungs of the ladder cannot be run", "correct or leave them out", items=problems)
    return found


def _plain(rung: Rung, source: Source) -> Arithmetic:
    recipe = load_recipe(rung.recipe)
    if names := learning(recipe.methods):
        raise UsageError(f"{', '.join(names)} of the recipe {recipe.name} learn from text: give the rung a calibration")
    return Arithmetic(recipe, with_decisions(recipe, source, rung.form, None))


def _calibrated(rung: Rung, source: Source) -> Arithmetic:
    artifact = Artifact.read(Path(rung.calibration))
    if artifact.summary.source_digest != source.digest():
        raise UsageError(f"{artifact.folder} was calibrated on another source")
    artifact.check_files()
    recipe = validated(artifact.summary.recipe, str(artifact.folder))
    resolved = with_decisions(recipe, source, rung.form, artifact)
    return Arithmetic(recipe, resolved, artifact.folder, artifact.digest())
