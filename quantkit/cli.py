"""The `quantkit` command: a group whose commands are imported on use.

Exit codes: 0 done, 2 bad use, 3 bad input, 4 verification failed (see `quantkit.errors`).
"""

from __future__ import annotations

from quantkit import __version__
from quantkit.console import LazyGroup, version_option

COMMANDS = {
    "acceptance": "quantkit.commands.acceptance",
    "baseline": "quantkit.commands.baseline",
    "calibrate": "quantkit.commands.calibrate",
    "convert": "quantkit.commands.convert",
    "inspect": "quantkit.commands.inspect",
    "ladder": "quantkit.commands.ladder",
    "merge": "quantkit.commands.merge",
    "merge-manifest": "quantkit.commands.merge_manifest",
    "plan": "quantkit.commands.plan",
    "verify": "quantkit.commands.verify",
}
"""Command -> module whose `command` implements it."""

main = LazyGroup(
    name="quantkit",
    commands_by_module=COMMANDS,
    help="""INT8 W8A8 quantization of large language models, proved step by step.

    \b
    The main job:
      quantkit inspect MODEL
      quantkit calibrate MODEL -o CALIBRATION
      quantkit convert MODEL -o OUT --calibration CALIBRATION
      quantkit verify OUT --source MODEL
      python runtime/smoke_load.py OUT --prompt "..."
    """,
    params=[version_option("quantkit", __version__)],
)

if __name__ == "__main__":
    main()
