"""What a verification reports: rows with counts and failures."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from quantkit.errors import QuantkitError


class Check(BaseModel):
    """One kind of check.

    Attributes:
        name: what was checked.
        count: how many things were looked at.
        failures: one sentence for each that is wrong; empty when the check passed.
        note: what a reader should know about it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    count: int
    failures: tuple[str, ...] = ()
    note: str = ""


class VerifyReport(BaseModel):
    """Outcome of a verification.

    Attributes:
        folder: as given.
        form: "checkpoint" or "sharded".
        quick: sizes and headers only.
        compared: tensors whose values were held against the source; fewer than `tensors` when a sample was.
        tensors: tensors that could be compared; both are 0 without a source.
        checks: in the order in which they ran.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    form: str
    quick: bool
    compared: int = 0
    tensors: int = 0
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f"{check.name}: {failure}" for check in self.checks for failure in check.failures)


class Checks:
    """Collects rows; an expected error inside a check is its failure."""

    def __init__(self) -> None:
        self.rows: list[Check] = []
        self.compared = self.tensors = 0

    def run(self, name: str, check: Callable[[], tuple[int, list[str], str]]) -> bool:
        try:
            count, failures, note = check()
        except QuantkitError as error:
            count, failures, note = 0, [error.message, *error.items], ""
        self.rows.append(Check(name=name, count=count, failures=tuple(failures), note=note))
        return not failures
