"""The `quantkit-runtime` command: a group whose commands are imported on use.

Exit codes: 0 done, 2 bad use, 3 bad input, 4 verification failed (see `quantkit.errors`).
"""

from __future__ import annotations

from quantkit import __version__
from quantkit.console import LazyGroup, version_option

COMMANDS = {
    "bench": "quantkit_instruments.commands.bench",
    "commcheck": "quantkit_instruments.commands.commcheck",
    "compare": "quantkit_instruments.commands.compare",
    "doctor": "quantkit_instruments.commands.doctor",
    "generate": "quantkit_instruments.commands.generate",
    "regress": "quantkit_instruments.commands.regress",
    "smoke-load": "quantkit_instruments.commands.smoke_load",
    "tune": "quantkit_instruments.commands.tune",
}
"""Command -> module whose `command` implements it."""

main = LazyGroup(
    name="quantkit-runtime",
    commands_by_module=COMMANDS,
    help="""Run converted weights and prove that they run in INT8.

    \b
    Example:
      quantkit-runtime doctor OUT
      quantkit-runtime smoke-load OUT --prompt "Once upon a time"
      quantkit-runtime bench OUT
    """,
    params=[version_option("quantkit-runtime", __version__)],
)

if __name__ == "__main__":
    main()
