"""Several machines, one output folder: each does its part of the units of work, one writes the manifest at the end.

Every machine makes the same plan, and the assignment follows from the plan alone, so the machines exchange nothing but
the journal in the output folder, which lies on a file system that all of them share. A unit is noted under its own
name, so whoever did it, it counts as done.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from quantkit.convert.execute import Job, execute_units, finished_units, local, units
from quantkit.convert.run import Form, Prepared, default_jobs, open_output, prepare, run
from quantkit.errors import QuantkitError, UsageError
from quantkit.outdir import OutputFolder, check_place, create_once, exclusive_part, recorded_options
from quantkit.recipe import Recipe
from quantkit.spec.document import problems_of
from quantkit.spec.files import is_file
from quantkit.spec.manifest import Manifest
from quantkit.spec.mesh import Mesh

_PARTS = "parts"


@dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Part of "i/n".

        Raises:
            UsageError: it is none.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
        part = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise UsageError(f"--part {text!r} is no part", "write it as i/n with i from 1 to n, as in 1/4")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class PartResult:
    """What a part came to: its units of work, the bytes of output among them, and units of other parts left."""

    units: int
    nbytes: int
    left: int


def assign(todo: list[Job], count: int) -> list[list[Job]]:
    """Distribute units over `count` parts, even by bytes; depends on nothing but its arguments.

    Longest first to the part with the least (Graham 1969: at most 4/3 of the best possible). Units that hash a source
    file stay with the output that reads it, whose machine has the bytes in memory, while that does not make a bundle
    larger than a part's share.
    """
    share = sum(job.size for job in todo) // count
    bundles = _bundles(todo, share)
    order = sorted(range(len(bundles)), key=lambda index: (-_size(bundles[index]), index))
    loads, owners = [0] * count, [0] * len(bundles)
    for index in order:
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += _size(bundles[index])
    return [
        [job for bundle, owner in zip(bundles, owners, strict=True) if owner == number for job in bundle]
        for number in range(count)
    ]


def _bundles(todo: list[Job], share: int) -> list[list[Job]]:
    bundles: list[list[Job]] = []
    for job in todo:
        joins = job.hashed and bundles and bundles[-1][0].planned and _size(bundles[-1]) + job.size <= share
        if joins:
            bundles[-1].append(job)
        else:
            bundles.append([job])
    return bundles


def _size(jobs: list[Job]) -> int:
    return sum(job.size for job in jobs)


def run_part(prepared: Prepared, out: Path, part: Part, jobs: int = 0) -> PartResult:
    """Do one part of a planned conversion; never writes the manifest.

    Raises:
        UsageError: the folder is divided into another number of parts, or this part is being done.
        QuantkitError: as `convert`; the same call continues.
    """
    folder = open_output(prepared, out)
    if folder.finished:
        return PartResult(0, 0, 0)
    with exclusive_part(folder, f"part-{part.number}"):
        if is_file(out / prepared.manifest_name):
            return PartResult(0, 0, 0)
        _agree_on_count(folder, part)
        todo = list(units(prepared.plan, prepared.source))
        own = assign(todo, part.count)[part.number - 1]
        execute_units(own, prepared.source, prepared.spec, folder, local(jobs or default_jobs()))
        left = len(todo) - len(finished_units(todo, folder))
    return PartResult(len(own), sum(job.size for job in own if not job.hashed), left)


def _agree_on_count(folder: OutputFolder, part: Part) -> None:
    """All parts of a folder are of one division: two divisions at once would write the same files."""
    path = folder.work / _PARTS
    create_once(path, f"{part.count}\n".encode())
    count = _recorded_count(folder)
    if count != part.count:
        raise UsageError(
            f"{folder.path} is being filled in {count} parts, not in {part.count}",
            f"use --part i/{count}; or convert without --part, which does on one machine what is left",
        )


def _recorded_count(folder: OutputFolder) -> int:
    try:
        return int((folder.work / _PARTS).read_text())
    except FileNotFoundError:
        return 1
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder.work / _PARTS} is unreadable: {error}", "convert into another folder") from error


def prepare_recorded(
    out: Path, source: Path, *, calibration: Path | None = None, ignore_index: bool = False
) -> Prepared:
    """Plan again what a folder is being filled with, by the options that it has recorded.

    Args:
        source, calibration, ignore_index: as given to the parts; these are not recorded, their content is.

    Raises:
        UsageError: the folder holds no conversion, or not of these inputs.
    """
    check_place(out, source)
    options = recorded_options(out)
    if not isinstance(options, dict) or options.get("command") != "convert":
        raise UsageError(f"{out} holds no conversion", "give the OUT of `quantkit convert MODEL -o OUT --part i/n`")
    if options.get("calibration") and calibration is None:
        raise UsageError(f"{out} is converted with a calibration", "name it: --calibration FOLDER")
    return prepare(source, calibration=calibration, ignore_index=ignore_index, **_arguments(out, options))


class _Recorded(BaseModel):
    """What of `Prepared.options` is an argument of `prepare`."""

    recipe: Recipe
    form: Form
    mesh: Mesh
    max_shard_bytes: Annotated[int, Field(ge=1)]
    layout: str

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}


def _arguments(out: Path, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return _Recorded.model_validate_json(json.dumps(options)).arguments()
    except ValidationError as error:
        raise UsageError(
            f"the options that {out} has recorded are damaged", "convert into another folder", items=problems_of(error)
        ) from error


def merge_manifest(prepared: Prepared, out: Path) -> Manifest:
    """Write the generated files and the manifest of a conversion whose parts are all done.

    The folder then equals that of one machine, byte for byte.

    Raises:
        UsageError: the options differ from those of the parts, or a part is running.
        QuantkitError: units are missing; they are listed by part.
    """
    folder = open_output(prepared, out)
    if not folder.finished:
        check_complete(prepared, folder)
    return run(prepared, out, 1)


def check_complete(prepared: Prepared, folder: OutputFolder) -> None:
    """Refuse unless every unit of work is done.

    Raises:
        QuantkitError: the missing ones, by part.
    """
    todo = list(units(prepared.plan, prepared.source))
    done = finished_units(todo, folder)
    if len(done) == len(todo):
        return
    count = _recorded_count(folder)
    missing = [
        f"part {number}/{count}: {_describe(job)}"
        for number, part in enumerate(assign(todo, count), 1)
        for job in part
        if job.label not in done
    ]
    raise QuantkitError(
        f"{folder.path}: {len(missing)} of {len(todo)} units of work are not done",
        "run the parts named here again, or convert without --part, which does what is left",
        items=missing,
    )


def _describe(job: Job) -> str:
    kind, _, name = job.label.partition(":")
    return f"{name} (checksum of the source)" if kind == "source" else name
