"""The list of candidates: one YAML file, an unknown key is an error. The shipped one is `default.yaml` beside this."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from quantkit.checkpoint.reader import Source
from quantkit.errors import UsageError
from quantkit.spec.calibration import read_summary
from quantkit.spec.document import Strict, problems_of, read_yaml


class Rung(Strict):
    """One candidate.

    Attributes:
        name: in the tables, and of its files.
        after: the rung that it differs from in one thing; "" for the source.
        change, change_zh: what that thing is, for the report; in Chinese as well where it is given.
        recipe: shipped name or file; decides on views of the weights and on the scheme of every GEMM.
        calibration: folder of `quantkit calibrate`; its own recipe counts then, with what it found and decided.
        form: of output, whose exceptions it has where a calibration decided on some.
        weights: as the recipe says, or as stored.
        activations: as the recipe says, float, or FP8 (E4M3 per token and group of 128 inputs).
        compute: dtype of everything else.
        keys, values: of the attention, as the cache holds them: INT8 with one scale for each token and head. Latent
            attention keeps no keys; its latent goes with the values.
        only: "fp8": where the source's weights are FP8; else passed over.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
    after: str = ""
    change: str
    change_zh: str = ""
    recipe: str = "bf16"
    calibration: str = ""
    form: Literal["checkpoint", "sharded"] = "checkpoint"
    weights: Literal["recipe", "stored"] = "recipe"
    activations: Literal["recipe", "float", "fp8"] = "recipe"
    compute: Literal["float32", "bfloat16"] = "float32"
    keys: Literal["float", "int8"] = "float"
    values: Literal["float", "int8"] = "float"
    only: Literal["", "fp8"] = ""

    def applies(self, source: Source) -> bool:
        """Whether the source has what this rung is about."""
        formats = {entry.format.name for entry in source.entries.values()}
        return self.only != "fp8" or any("fp8" in name for name in formats)


class Rungs(Strict):
    """A whole list; every `after` names a rung before its own."""

    rungs: Annotated[tuple[Rung, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ordered(self) -> Rungs:
        seen: set[str] = set()
        for rung in self.rungs:
            if rung.name in seen:
                raise ValueError(f"two rungs are called {rung.name!r}")
            if rung.after and rung.after not in seen:
                raise ValueError(f"{rung.name}: `after` names {rung.after!r}, which does not stand before it")
            seen.add(rung.name)
        return self


def load_rungs(path: Path | None, only: tuple[str, ...] = ()) -> tuple[Rung, ...]:
    """The rungs of a file, or the shipped ones; with `only`, those of these names.

    Raises:
        UsageError: unreadable, not YAML, unknown keys, bad order, or names that the list does not have.
    """
    origin = str(path) if path else "the shipped ladder"
    file = path or resources.files("quantkit.ladder") / "default.yaml"
    try:
        found = Rungs.model_validate(read_yaml(file, origin, "a YAML file with a list `rungs`"))
    except ValidationError as error:
        raise UsageError(
            f"{origin} has {error.error_count()} problems",
            "correct it; every key is described in quantkit/ladder/rungs.py",
            items=problems_of(error),
        ) from error
    names = [rung.name for rung in found.rungs]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UsageError(f"{origin} has no rung {', '.join(unknown)}", "name its rungs", choices=names)
    return tuple(rung for rung in found.rungs if not only or rung.name in only)


def with_calibrations(rungs: tuple[Rung, ...], calibrations: Sequence[Path]) -> tuple[Rung, ...]:
    """The rungs, and one more for each calibration, named after its recipe and compared with `w8a8` where that is.

    Raises:
        InputError: a folder holds no finished calibration.
    """
    found = list(rungs)
    for folder in calibrations:
        recipe = read_summary(folder).recipe
        name, taken = str(recipe["name"]), {rung.name for rung in found}
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        unique = next(each for each in names if each not in taken)
        after = "w8a8" if "w8a8" in taken else ""
        change = str(recipe.get("description", name))
        found.append(Rung(name=unique, after=after, change=change, calibration=str(folder)))
    return tuple(found)
