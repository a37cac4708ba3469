"""`quantkit-runtime doctor`: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from quantkit.console import console, json_option, print_json
from quantkit_instruments.commands.common import print_table


@click.command("doctor")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@json_option
def command(folder: Path | None, as_json: bool) -> None:
    """Examine driver, torch, Triton, compilers, cards, masks, memory and ECC; with a FOLDER its manifest as well.

    Works without a card. Exit code 0: nothing stops a run. Otherwise that of the first problem: 10 torch is not built
    for the cards, 11 driver, 12 torch sees no card, 13 a card computes wrongly or not at all, 14 its memory is taken,
    15 memory errors, 16 the manifest does not fit this machine.

    \b
    Example:
      quantkit-runtime doctor OUT
    """
    from dataclasses import asdict

    from quantkit_instruments import doctor

    findings = doctor.examine(folder)
    code = doctor.exit_code(findings)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings], "exit_code": code})
    out = console(as_json)
    rows = [[finding.check, finding.found] for finding in findings]
    print_table(out, "This machine", ["what", "found"], rows)
    for finding in findings:
        if finding.remedy:
            kind = f"problem ({finding.code})" if finding.code else "note"
            out.print(f"{kind}: {finding.check}: {finding.found}\n  next: {finding.remedy}", markup=False)
    if not code:
        out.print("nothing here stops a run")
    sys.exit(code)
