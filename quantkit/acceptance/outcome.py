"""What a check finds: a status, a sentence from the table of strings with its values, and the evidence as it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self,
        status: Status,
        findings: Sequence[Finding],
        evidence: Sequence[object] = (),
        measured: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(", ".join(finding.key for finding in findings))
        self.status = status
        self.findings = tuple(findings)
        self.evidence = tuple(excerpt(str(item)) for item in evidence)
        self.measured = dict(measured or {})


def failed(key: str, *evidence: object, **values: Value) -> Stopped:
    """The check failed, for this reason."""
    shown = {name: excerpt(value) if isinstance(value, str) else value for name, value in values.items()}
    return Stopped("fail", (Finding(key=key, values=shown),), evidence)


def missed(findings: Sequence[Finding], measured: Mapping[str, float], *evidence: str) -> Stopped:
    """The check failed, for one or several reasons, and its figures are of use all the same."""
    return Stopped("fail", findings, evidence, measured)


def unsupported(key: str, *evidence: object) -> Stopped:
    """The server does not have what the check needs."""
    return Stopped("unsupported", (Finding(key=key),), evidence)


def skipped(key: str, **values: Value) -> Stopped:
    """The check needs something that was not given."""
    return Stopped("skipped", (Finding(key=key, values=values),))


def excerpt(text: str) -> str:
    """Evidence of bounded length; halves of characters, which no file can hold, as escapes."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_EVIDENCE else f"{text[: _MAX_EVIDENCE - 20]} ... ({len(text)} characters)"
