"""What has changed since a folder was converted, and since a comparison of it was saved: versions, driver, kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from quantkit.compare.saved import read_saved
from quantkit.console import quoted
from quantkit.errors import QuantkitError, UsageError
from quantkit.host import versions
from quantkit.spec.environment import Environment, changes
from quantkit.spec.manifest import manifest_path, read_manifest


class Since(NamedTuple):
    """Changes since an event; `command` proves again what may no longer hold."""

    event: str
    changed: tuple[str, ...]
    command: str

    @property
    def line(self) -> str:
        return f"since {self.event}: {'; '.join(self.changed)}"


def since(folder: Path, converted: Iterable[Environment], ranks: int = 1) -> list[Since]:
    """Events after which something changed; none where all is as it was.

    Args:
        converted: `Manifest.environments` of the folder.
        ranks: that it was made for; a comparison is of one.
    """
    here = quoted(folder)
    merge, whole = (f"quantkit merge {here} -o WHOLE && ", "WHOLE") if ranks > 1 else ("", here)
    command = f"{merge}quantkit-runtime compare BASELINE {whole} --save"
    found = [Since("the conversion", _lines(converted), command)]
    try:
        saved = read_saved(folder)
    except UsageError:  # none was saved
        pass
    except QuantkitError as error:
        found.append(Since("the saved comparison", (error.message,), error.hint))
    else:
        if saved.candidate_digest != _digest(folder):
            what = "it is of another conversion: copied from another folder, or this one was converted again"
            return [row for row in (*found, Since("the saved comparison", (what,), command)) if row.changed]
        again = f"quantkit-runtime regress {here}"
        found[0] = found[0]._replace(command=again)
        found.append(Since("the saved comparison", _lines([saved.environment]), again))
    return [row for row in found if row.changed]


def _digest(folder: Path) -> str:
    path = manifest_path(folder)
    return read_manifest(path).digest if path is not None else ""


def _lines(recorded: Iterable[Environment]) -> tuple[str, ...]:
    return tuple(change.line for change in changes(recorded, versions()))
