"""What a calibration decided, as rules of the recipe: after those of its author, which come first."""

from __future__ import annotations

from quantkit.checkpoint.reader import Source
from quantkit.convert.transforms import made_by
from quantkit.errors import UsageError
from quantkit.recipe import Recipe, Rule, validated
from quantkit.spec.calibration import Artifact
from quantkit.spec.decisions import Decision


def with_decisions(recipe: Recipe, source: Source, form: str, calibration: Artifact | None) -> Recipe:
    """The recipe with a rule for every exception of a form; the recipe itself when it leaves nothing to decide.

    A source that was made with the same recipe has the exceptions that were decided then.

    Args:
        form: "checkpoint" or "sharded".

    Raises:
        UsageError: there is no calibration, or it decided nothing for this form.
    """
    if not recipe.decides:
        return recipe
    if calibration is None:
        made = _as_made(recipe, source)
        if made is None:
            raise UsageError(
                f"the recipe {recipe.name} leaves exceptions to a calibration",
                "run `quantkit calibrate` with this recipe, and pass its folder with --calibration",
            )
        return made
    decisions = calibration.summary.decisions
    forms = decisions.forms if decisions else {}
    found = forms.get(form) or forms.get("checkpoint")  # what engines can load, shards can hold
    if found is None:
        raise UsageError(
            f"{calibration.folder} has no decisions for the {form} form: no engine loads activations per group from a "
            "checkpoint",
            "use --format sharded, or give the recipe auto_keep and calibrate again",
        )
    added = [rule for decision in found.exceptions for rule in _rules(source, decision)]
    return recipe.model_copy(update={"rules": (*recipe.rules, *added)})


def _rules(source: Source, decision: Decision) -> list[Rule]:
    """One rule for each role under which the source stores the weights of a group."""
    arch = source.arch
    stored = {key.role for key in source.layer_keys(decision.layer) if key.part == "weight"}
    wanted = [role for role in sorted(stored) if {role, *arch.role(role).parts} & {*decision.roles}]
    return [
        Rule(match=role, layers=(decision.layer,), scheme=decision.scheme, reason=decision.reason) for role in wanted
    ]


def _as_made(recipe: Recipe, source: Source) -> Recipe | None:
    """The resolved recipe of the conversion that made the source, when it was this recipe."""
    made = made_by(source.root)
    if made is None:
        return None
    resolved = validated(made.recipe, str(source.root))
    same = resolved.model_copy(update={"rules": resolved.rules[: len(recipe.rules)]})
    return resolved if same.model_dump() == recipe.model_dump() else None
