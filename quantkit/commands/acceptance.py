"""`quantkit acceptance`: five dimensions of a served model against any OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.console import FiniteRange, console, json_option, print_json

if TYPE_CHECKING:
    from quantkit.acceptance.outcome import AcceptanceReport, Check

_PATH = click.Path(path_type=Path)
_DIMENSIONS = ("function", "accuracy", "capability", "performance", "stability")
_MARKS = {"pass": "ok", "fail": "FAILED", "unsupported": "no support", "skipped": "not run"}

_EPILOG = """\b
Examples:
  vllm serve OUT                                                          in another terminal
  quantkit acceptance --endpoint http://localhost:8000/v1 -o ACCEPTANCE
  quantkit acceptance --endpoint URL -o ACCEPTANCE --baseline BASELINE --tasks my.jsonl --soak 8
  quantkit acceptance --endpoint URL -o ACCEPTANCE --only stability --only performance --soak 24 --pid 4242
      --restart-command 'systemctl restart vllm'
A task is a line of JSON: {"prompt": "2+2=", "contains": ["4"]}; also messages, regex, equals, max_tokens, kind.
The key of a server that wants one is read from OPENAI_API_KEY. Exit code 4 if a check fails.
"""


@click.command("acceptance", epilog=_EPILOG)
@click.option("--endpoint", required=True, metavar="URL", help="Address of the API, http://HOST:PORT/v1.")
@click.option("--model", default="", metavar="NAME", help="Served name; default: the only one that is served.")
@click.option("-o", "--out", type=_PATH, required=True, help="Folder for acceptance.html and acceptance.json.")
@click.option("--baseline", type=_PATH, help="Folder of `quantkit baseline` of the source model.")
@click.option("--tasks", type=_PATH, help="JSONL file of your own tasks.")
@click.option("--soak", type=FiniteRange(0), default=0.0, show_default=True, metavar="HOURS", help="0: off.")
@click.option("--restart-command", default="", metavar="SHELL", help="Kills the server and starts it again.")
@click.option(
    "--pid", type=click.IntRange(1), help="Of the server on this machine: its memory is watched, children included."
)
@click.option("--context", type=click.IntRange(16), help="Tokens, where the server does not say.")
@click.option("--thresholds", type=_PATH, help="YAML; replaces keys of quantkit/acceptance/default.yaml.")
@click.option("--only", multiple=True, type=click.Choice(_DIMENSIONS), help="Dimension; repeatable. Default: all.")
@json_option
def command(
    endpoint: str,
    model: str,
    out: Path,
    baseline: Path | None,
    tasks: Path | None,
    soak: float,
    restart_command: str,
    pid: int | None,
    context: int | None,
    thresholds: Path | None,
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Accept a served model: function, accuracy, capability, performance, stability."""
    from quantkit.acceptance.endpoint import connect
    from quantkit.acceptance.run import HTML_NAME, accept, check_given, check_out, write_report
    from quantkit.acceptance.session import Session
    from quantkit.acceptance.settings import load_settings

    settings = load_settings(thresholds)
    check_given(baseline, tasks, pid)
    check_out(out)
    server = connect(endpoint, model, timeout_s=settings.timeout_s, context=context, extra_body=settings.extra_body)
    session = Session(server, settings, baseline, tasks, soak, restart_command, pid)
    report = accept(session, only or _DIMENSIONS, lambda check: _show(check, as_json))
    write_report(out, report)
    if as_json:
        print_json({**report.model_dump(mode="json"), "passed": report.passed})
    else:
        _conclude(report, out / HTML_NAME)
    if not report.passed:
        raise SystemExit(4)


def _show(check: Check, as_json: bool) -> None:
    from quantkit.report.acceptance import sentences

    text = " ".join(sentences(check))
    line = f"{_MARKS[check.status]:10}  {check.dimension:11}  {check.name:17}  {text}"
    console(as_json).print(line, markup=False)


def _conclude(report: AcceptanceReport, page: Path) -> None:
    failures = [check.name for check in report.checks if check.status == "fail"]
    shown = console()
    shown.print(f"{report.model}: {f'{len(failures)} checks failed' if failures else 'accepted'}", markup=False)
    shown.print(f"report: {page}", markup=False)
