"""What a check finds: a status, a sentence from the table of strings with its values, and the evidence as it came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from quantkit.spec.document import Strict

Status = Literal["pass", "fail", "unsupported", "skipped"]
Value = str | int | float

_MAX_EVIDENCE = 600


class Finding(Strict):
    """A sentence: key in `report/strings/acceptance.yaml` and the values of its placeholders."""

    key: str
    values: dict[str, Value] = Field(default_factory=dict)


class Check(Strict):
    """Result of one check.

    Attributes:
        dimension: function, accuracy, capability, performance or stability.
        name: key of its title is `check_NAME`.
        status: unsupported: the server refuses the feature as a whole; skipped: it was not asked for.
        findings: what was found; for a failure, every reason.
        measured: figures by name; the unit is the name's ending (`_s`, `_mib`, `_per_s`).
        evidence: excerpts of what was sent and received.
    """

    dimension: str
    name: str
    status: Status
    findings: tuple[Finding, ...] = ()
    measured: dict[str, float] = Field(default_factory=dict)
    evidence: tuple[str, ...] = ()


class AcceptanceReport(Strict):
    """All of `acceptance.json`.

    Attributes:
        endpoint: its address without user and password.
        model: name that was asked for.
        context: tokens of prompt and answer together, None when unknown.
        settings: as resolved.
        checks: in the order of running.
        series: of the soak, by name: (seconds, value) points.
    """

    format_version: int = 1
    tool_version: str
    endpoint: str
    model: str
    context: int | None
    settings: dict[str, Any]
    checks: tuple[Check, ...]
    series: dict[str, tuple[tuple[float, float], ...]] = Field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.status != "fail" for check in self.checks)


class Stopped(Exception):
    """Ends a check with this status; carries everything that `Check` shows."""

    def __init__(
        self, status: Status, key: str, values: Mapping[str, Value] | None = None, evidence: tuple[str, ...] = ()
    ) -> None:
        super().__init__(key)
        self.status = status
        self.findings: tuple[Finding, ...] = (Finding(key=key, values=dict(values or {})),)
        self.evidence = tuple(map(excerpt, evidence))
        self.measured: dict[str, float] = {}


def failed(key: str, *evidence: object, **values: Value) -> Stopped:
    """The check failed, for this reason."""
    return Stopped("fail", key, values, tuple(map(str, evidence)))


def several(findings: list[Finding], measured: dict[str, float], *evidence: str) -> Stopped:
    """The check failed for several reasons at once."""
    stop = Stopped("fail", "", evidence=evidence)
    stop.findings, stop.measured = tuple(findings), measured
    return stop


def skipped(key: str, **values: Value) -> Stopped:
    """The check needs something that was not given."""
    return Stopped("skipped", key, values)


def excerpt(text: str) -> str:
    """Evidence of bounded length."""
    return text if len(text) <= _MAX_EVIDENCE else f"{text[: _MAX_EVIDENCE - 20]} ... ({len(text)} characters)"
