"""What the checks of one run share, and how a check is run: every way to fail becomes a named row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.acceptance.bounds import Endless
from quantkit.acceptance.endpoint import BAD_FORM, Endpoint, said
from quantkit.acceptance.outcome import Check, Finding, Stopped, Value, excerpt, failed, unsupported
from quantkit.acceptance.settings import Settings

UNSUPPORTED_STATUS = frozenset({400, 404, 405, 422, 501})
"""Refusals that mean, for an optional feature, that the server does not have it."""


@dataclass
class Session:
    """Attributes:
    endpoint: under test.
    settings: as resolved.
    baseline: folder of the source model's baseline.
    tasks: file of the user's tasks.
    soak_hours: length of the soak, 0 for none.
    restart_command: kills the server and starts it again; "" for none.
    pid: of the server on this machine, for its memory.
    rate: requests per second of the mixed load, once measured.
    series: of the soak.
    """

    endpoint: Endpoint
    settings: Settings
    baseline: Path | None = None
    tasks: Path | None = None
    soak_hours: float = 0.0
    restart_command: str = ""
    pid: int | None = None
    rate: float = 0.0
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A check that passed: a sentence with its values, evidence, figures."""

    key: str
    values: dict[str, Value] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckSpec:
    """A check of the table. `optional`: a refusal with 400, 404, ... means that the server has no such feature."""

    dimension: str
    name: str
    run: Callable[[Session], Found]
    optional: bool = False


def run_check(spec: CheckSpec, session: Session) -> Check:
    """Run one check; nothing that a server can do ends the run."""
    try:
        found = _guarded(spec, session)
    except Stopped as stop:
        return Check(
            dimension=spec.dimension,
            name=spec.name,
            status=stop.status,
            findings=stop.findings,
            measured=stop.measured,
            evidence=stop.evidence,
        )
    return Check(
        dimension=spec.dimension,
        name=spec.name,
        status="pass",
        findings=(Finding(key=found.key, values=found.values),),
        measured=found.measured,
        evidence=tuple(map(excerpt, found.evidence)),
    )


def _guarded(spec: CheckSpec, session: Session) -> Found:
    """The check, with the client's exceptions as reasons."""
    import openai

    try:
        return spec.run(session)
    except openai.APIStatusError as error:
        if error.status_code >= 500 and error.status_code != 501:
            raise failed("server_error", said(error), status=error.status_code) from error
        if spec.optional and error.status_code in UNSUPPORTED_STATUS:
            raise unsupported("unsupported", said(error)) from error
        raise failed("refused", said(error), status=error.status_code) from error
    except openai.APITimeoutError as error:
        raise failed("timeout", seconds=session.settings.timeout_s) from error
    except openai.APIConnectionError as error:
        raise failed("connection_lost", str(error.__cause__ or error)) from error
    except openai.APIError as error:
        raise failed("server_error_event", said(error)) from error
    except Endless as error:
        raise failed("endless", str(error)) from error
    except Exception as error:
        # A stream that breaks raises what the client's HTTP library raises; which library depends on its version.
        if isinstance(error, BAD_FORM) and _inside_the_client(error):
            raise failed("malformed_answer", what=repr(error)) from error
        if not type(error).__module__.startswith("httpx"):
            raise
        if "Timeout" in type(error).__name__:
            raise failed("timeout", seconds=session.settings.timeout_s) from error
        raise failed("connection_lost", f"{type(error).__name__}: {error}") from error


def _inside_the_client(error: Exception) -> bool:
    """Whether the client was at work: it takes answers apart too, and trusts them."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").startswith("openai."):
            return True
        frame = frame.tb_next
    return False
