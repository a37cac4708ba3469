"""The two trials of a calibration: one to decide on, one to check what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quantkit.calibrate.decisions import ALL, ANCHOR, Decider, is_anchored, schemes_of, to_run_alone
from quantkit.calibrate.fake_quant import BF16, Rounding
from quantkit.calibrate.groups import groups_of
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.rounding import rounds_to_nearest
from quantkit.calibrate.trial import TrialPass, Variant
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.sealed import read_note, write_note
from quantkit.outdir import WORK_NAME
from quantkit.spec.decisions import Decisions, FormDecisions, HeldOut

YARDSTICK = "bf16"
"""Name of the stream of the source in BF16 arithmetic."""

_DECISIONS, _HELD_OUT = "decisions.json", "held-out.json"
"""Files of the work folder; `calibration.json` holds both in the end."""


class DecisionPass(TrialPass):
    """Every group alone and all together; then the recipe's budgets decide.

    Args:
        rounded: layer -> how its weights were rounded.
    """

    title = "decide"

    def __init__(self, plan: Plan, source: Source, rounded: Callable[[int], Rounding] = rounds_to_nearest) -> None:
        self._groups = groups_of(source, plan.recipe)
        everything = schemes_of(self._groups)
        variants = [
            Variant(ALL, lambda layer: everything.get(layer, {})),
            Variant(ANCHOR, lambda layer: everything.get(layer, {}) if is_anchored(layer) else {}),
        ]
        alone = to_run_alone(plan.recipe, self._groups)
        super().__init__(plan, source, "decide", variants, alone, rounded=rounded)

    def finish(self, records: Sequence[Path], out: Path) -> None:
        path = out / WORK_NAME / _DECISIONS
        if read_note(path) is None:
            held_out, results = self.held_out(records), self.results(records)
            decider = Decider(self.plan.recipe, self.source.arch, self._groups, results, held_out, self.samples.kinds)
            write_note(path, decider.decide().model_dump_json())


class CheckPass(TrialPass):
    """What will be written, beside the source; one stream for each form whose exceptions differ.

    Args:
        work: folder that holds the decisions, if there are any.
        rounded: layer -> how its weights were rounded.
    """

    title = "check"

    def __init__(
        self,
        plan: Plan,
        source: Source,
        work: Path,
        rounded: Callable[[int], Rounding] = rounds_to_nearest,
    ) -> None:
        groups, decided = groups_of(source, plan.recipe), decisions_in(work)
        tables = (
            {ALL: schemes_of(groups)}
            if decided is None
            else {form: schemes_of(groups, row.exceptions) for form, row in decided.forms.items()}
        )
        variants = [Variant(name, lambda layer, table=table: table.get(layer, {})) for name, table in tables.items()]  # type: ignore[misc]
        if plan.dtype == torch.float32:  # else the source is run in BF16 itself
            variants.append(Variant(YARDSTICK, lambda _layer: BF16))
        super().__init__(plan, source, "check", variants, rounded=rounded)

    def finish(self, records: Sequence[Path], out: Path) -> None:
        path = out / WORK_NAME / _HELD_OUT
        if read_note(path) is None:
            write_note(path, self.held_out(records).model_dump_json())


def decisions_in(work: Path) -> Decisions | None:
    """What a `DecisionPass` decided, None when there was none."""
    note = read_note(work / _DECISIONS)
    return None if note is None else Decisions.model_validate_json(note)


def held_out_in(work: Path) -> HeldOut | None:
    """What a `CheckPass` measured, None when there was none."""
    note = read_note(work / _HELD_OUT)
    return None if note is None else HeldOut.model_validate_json(note)


def checked(decided: Decisions, held_out: HeldOut) -> Decisions:
    """Decisions with what was measured with them."""

    def one(form: str, row: FormDecisions) -> FormDecisions:
        kl = held_out.kl[form]
        return row.model_copy(update={"measured_kl": kl, "within_budget": max(kl.values()) <= row.budget})

    return decided.model_copy(update={"forms": {form: one(form, row) for form, row in decided.forms.items()}})
