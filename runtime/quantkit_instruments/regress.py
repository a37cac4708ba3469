"""`quantkit-runtime regress`: a saved comparison run again after an upgrade, and what moved since."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quantkit.compare.limits import Kind
from quantkit.compare.result import Comparison
from quantkit.compare.saved import Moved, Saved, baseline_digest, figures, movements, read_saved, save
from quantkit.console import quoted
from quantkit.errors import InputError, UsageError
from quantkit.host import versions
from quantkit.spec.baseline import BASELINE_NAME
from quantkit.spec.environment import Change, Environment, changes
from quantkit.spec.files import exists, is_file
from quantkit.spec.manifest import COMPARISON_NAME, manifest_path, read_manifest
from quantkit_instruments import compare
from quantkit_runtime import device as devices
from quantkit_runtime.loader import require_folder


@dataclass(frozen=True)
class Outcome:
    """A comparison then and now.

    Attributes:
        saved: the one that was kept.
        result: today's.
        moved: every figure of either.
        changed: versions, and facts of the run such as the device, that are others now.
    """

    saved: Saved
    result: Comparison
    moved: tuple[Moved, ...]
    changed: tuple[Change, ...]

    @property
    def passed(self) -> bool:
        return self.result.passed and all(row.passed for row in self.moved)


def run(folder: Path, baseline: Path | None = None, factor: float = 1.0) -> Outcome:
    """Run the comparison that is saved in a folder again, with its options and limits.

    Args:
        baseline: where it lies now; None: beside the folder, under the name that it had.
        factor: on all tolerances.

    Raises:
        UsageError: nothing is saved, or the baseline or the device of the saved comparison is not there.
        InputError: candidate or baseline are not those of the saved comparison, or cannot be read.
    """
    require_folder(folder)
    saved = read_saved(folder)
    there = _baseline(folder, saved, baseline)
    if _digest(folder) != saved.candidate_digest:
        raise InputError(
            f"{folder} was converted again since its comparison was saved, or the comparison is of another folder",
            f"compare it anew: quantkit-runtime compare {quoted(there)} {quoted(folder)} --save",
        )
    _require_device(folder, there, saved)
    options = compare.Options(there, folder, saved.device, saved.dtype, saved.limits, verify=saved.verify)
    result = compare.run(options)
    facts = [
        Change(name, value or "none", result.candidate.get(name) or "none")
        for name, value in saved.facts.items()
        if result.candidate.get(name) != value
    ]
    changed = (*changes([saved.environment], versions()), *facts)
    return Outcome(saved, result, tuple(movements(saved.figures, figures(result), factor)), changed)


def check_savable(folder: Path) -> None:
    """Before a comparison runs: it can be kept in its candidate's folder.

    Raises:
        UsageError: the folder was not converted by quantkit, or cannot be written to.
    """
    require_folder(folder)
    if manifest_path(folder) is None:
        raise UsageError(
            f"--save: {folder} has no manifest, so that nothing identifies what was compared",
            "give a folder that `quantkit convert` wrote, or compare without --save",
        )
    place = folder / COMPARISON_NAME
    if exists(place) and not is_file(place):
        raise UsageError(f"--save: {place} is in the way: it is no file", "move it away, or compare without --save")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--save: no right to write to {folder}", "compare a copy, or without --save")


def keep(options: compare.Options, result: Comparison) -> Path:
    """Save a comparison that passed in its candidate's folder; the path of the file."""
    kind: Kind = "int8" if result.candidate["weights"] == "int8" else "float"
    saved = Saved(
        baseline=options.baseline.resolve().name,
        baseline_digest=baseline_digest(options.baseline),
        candidate_digest=_digest(options.candidate),
        device=devices.resolve(options.device).family,
        dtype=result.candidate["dtype"],
        verify=options.verify,
        limits=compare.limits_for(kind, options.limits),
        facts=result.candidate,
        figures=figures(result),
        environment=Environment.of(versions()),
    )
    return save(options.candidate, saved)


def _digest(folder: Path) -> str:
    path = manifest_path(folder)
    if path is None:
        raise InputError(f"{folder} has no manifest any more", "copy it back, or convert again")
    return read_manifest(path).digest


def _require_device(folder: Path, baseline: Path, saved: Saved) -> None:
    """Figures of another kind of device say nothing about what an upgrade changed.

    Raises:
        UsageError: what the comparison was saved on is not here.
    """
    try:
        devices.resolve(saved.device)
    except UsageError as error:
        raise UsageError(
            f"the comparison in {folder} was saved on {saved.device} ({saved.facts.get('device', 'unknown')}), and "
            f"torch {versions()['torch']} sees no such device here",
            "run this where there is one; to go on with what is here, compare anew: "
            f"quantkit-runtime compare {quoted(baseline)} {quoted(folder)} --save",
        ) from error


def _baseline(folder: Path, saved: Saved, given: Path | None) -> Path:
    there = given or folder.resolve().parent / saved.baseline
    if not is_file(there / BASELINE_NAME):
        raise UsageError(
            f"the baseline of the saved comparison is not at {there}",
            "name its folder: --baseline FOLDER; if it is lost, make it again with `quantkit baseline MODEL -o FOLDER`",
        )
    if baseline_digest(there) != saved.baseline_digest:
        raise InputError(
            f"{there} is not the baseline of the saved comparison",
            "give that one with --baseline, or compare anew: "
            f"quantkit-runtime compare {quoted(there)} {quoted(folder)} --save",
        )
    return there
