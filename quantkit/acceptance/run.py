"""`quantkit acceptance`: the table of checks, run in order, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from quantkit import __version__
from quantkit.acceptance import accuracy, capability, function, performance, stability, structured
from quantkit.acceptance.outcome import AcceptanceReport, Check
from quantkit.acceptance.session import CheckSpec, Session, run_check
from quantkit.checkpoint.writer import write_atomic
from quantkit.errors import UsageError
from quantkit.spec.baseline import read_baseline
from quantkit.spec.files import exists

HTML_NAME, JSON_NAME = "acceptance.html", "acceptance.json"

CHECKS = (
    CheckSpec("function", "single_turn", function.single_turn),
    CheckSpec("function", "multi_turn", function.multi_turn),
    CheckSpec("function", "finish_reason", function.finish_reason),
    CheckSpec("function", "streaming", function.streaming),
    CheckSpec("function", "stop", function.stop),
    CheckSpec("function", "tools_named", structured.tools_named, optional=True),
    CheckSpec("function", "tools_auto", structured.tools_auto, optional=True),
    CheckSpec("function", "tool_result", structured.tool_result, optional=True),
    CheckSpec("function", "structured_output", structured.structured_output, optional=True),
    CheckSpec("function", "bad_request", function.bad_request),
    CheckSpec("function", "long_input", function.long_input),
    CheckSpec("accuracy", "greedy", accuracy.greedy, optional=True),
    CheckSpec("accuracy", "perplexity", accuracy.perplexity, optional=True),
    CheckSpec("capability", "needles", capability.needles),
    CheckSpec("capability", "tasks", capability.tasks),
    CheckSpec("performance", "short", partial(performance.run_load, name="short")),
    CheckSpec("performance", "long", partial(performance.run_load, name="long")),
    CheckSpec("performance", "mixed", partial(performance.run_load, name="mixed")),
    CheckSpec("stability", "soak", stability.soak),
    CheckSpec("stability", "restart", stability.restart),
)
"""All checks in the order of running: later ones lean on what earlier ones measured."""

DIMENSIONS = tuple(dict.fromkeys(spec.dimension for spec in CHECKS))


def accept(
    session: Session, dimensions: Sequence[str] = DIMENSIONS, progress: Callable[[Check], None] = lambda _: None
) -> AcceptanceReport:
    """Run the checks of some dimensions; `progress` sees each as it is done."""
    checks = []
    for spec in CHECKS:
        if spec.dimension in dimensions:
            checks.append(run_check(spec, session))
            progress(checks[-1])
    return AcceptanceReport(
        tool_version=__version__,
        endpoint=session.endpoint.shown,
        model=session.endpoint.model,
        context=session.endpoint.context,
        settings=session.settings.model_dump(mode="json"),
        checks=tuple(checks),
        series={name: tuple(points) for name, points in session.series.items()},
    )


def check_given(baseline: Path | None, tasks: Path | None, pid: int | None) -> None:
    """Read what was given before the server is asked anything.

    Raises:
        InputError: a baseline or tasks that cannot be used.
        UsageError: no process of that number.
    """
    if baseline is not None:
        read_baseline(baseline)
    if tasks is not None:
        capability.read_tasks(tasks)
    if pid is not None and not psutil.pid_exists(pid):
        raise UsageError(f"there is no process {pid} on this machine", "give the server's own --pid, or leave it out")


def check_out(out: Path) -> None:
    """Make the folder of the report before hours of work go into it.

    Raises:
        UsageError: it holds a report already, or cannot be made.
    """
    if exists(out / JSON_NAME):
        raise UsageError(f"{out} holds the report of an earlier acceptance", "give another folder with -o")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", "give another folder with -o") from error


def write_report(out: Path, report: AcceptanceReport) -> None:
    """`acceptance.json` and `acceptance.html` in the folder."""
    from quantkit.report.acceptance import render

    text = json.dumps(report.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(out / HTML_NAME, [render(report).encode()])
    write_atomic(out / JSON_NAME, [f"{text}\n".encode()])
