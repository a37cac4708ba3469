"""A comparison that passed, kept beside the weights, and how far its figures may move before something is wrong.

`quantkit_comparison.json` in the candidate's folder holds what a rerun needs: digests of baseline and candidate,
options, limits, figures and the environment. After an upgrade `quantkit-runtime regress` runs the same again. Limits
alone would not do: they are wide, so that every sound conversion passes, and a kernel that is a few percent off too.

How far a figure moves without a fault: the same weights on the same inputs, so only the rounding of floating-point sums
differs. It flips an INT8 rounding here and there. Layers on the source's input hardly notice: their errors moved by 0.5
percent of themselves at most where every sum of two trained mixtures was taken in another order, or in float64. Figures
of whole texts add up what flips in all layers, by chance, so they move the more the fewer tokens there are: by up to 8
percent of a KL divergence and 0.8 percent of a perplexity over 40 tokens. The tolerances are about ten times the one
and twice the other. Both directions count: figures that suddenly improve are those of another arithmetic, such as
weights that run in BF16.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from quantkit.checkpoint.writer import write_atomic
from quantkit.compare.limits import Limits
from quantkit.compare.result import Comparison
from quantkit.errors import InputError, UsageError
from quantkit.spec.baseline import BASELINE_NAME
from quantkit.spec.document import Strict, problems_of
from quantkit.spec.environment import Environment
from quantkit.spec.files import file_sha256, is_inside, read_whole
from quantkit.spec.manifest import COMPARISON_NAME


class Figure(Strict):
    """A number of a comparison; `tokens` that it is a mean or a percentile over, 0 where chance has no part in it."""

    value: float
    tokens: int = 0


class Tolerance(NamedTuple):
    """A figure may move by `share` of what it was, by `spread` / sqrt(tokens) of it, and by `floor`."""

    share: float
    spread: float
    floor: float

    def allowed(self, then: Figure) -> float:
        chance = self.spread / math.sqrt(then.tokens) if then.tokens else 0.0
        return abs(then.value) * (self.share + chance) + self.floor


TOLERANCES = {
    "kl_mean": Tolerance(0.05, 1.0, 1e-4),
    "kl_p99": Tolerance(0.2, 1.0, 1e-3),
    "cosine_loss": Tolerance(0.05, 1.0, 1e-4),
    "perplexity_ratio": Tolerance(0.001, 0.1, 0.0),
    "decided_agreement": Tolerance(0.005, 0.3, 0.0),
    "needle": Tolerance(0.05, 0.0, 0.05),
    "embeddings": Tolerance(0.05, 0.0, 1e-5),
    "head_kl": Tolerance(0.05, 0.0, 1e-6),
    "layer_error": Tolerance(0.05, 0.0, 1e-4),
    "own_error": Tolerance(0.1, 0.0, 1e-3),
    "routing": Tolerance(0.0, 0.0, 0.01),
}
"""By the first part of a figure's name. `cosine_loss` is 1 - cosine; `needle` the nats a token of the candidate."""


class Saved(Strict):
    """All of `quantkit_comparison.json`.

    Attributes:
        format_version: of this model.
        baseline: name of the baseline's folder, which is looked for beside the candidate's.
        baseline_digest: sha256 of its `baseline.json`.
        candidate_digest: `Manifest.digest` of the candidate.
        device: that it ran on, "cpu", "cuda" or "hip"; a rerun takes the same.
        dtype: in which was computed all that is not INT8.
        verify: whether checksums were checked.
        limits: that were kept to.
        facts: `Comparison.candidate`.
        figures: by name, see `figures`.
        environment: software of the run.
        digest: sha256 over this document with an empty digest.
    """

    format_version: Literal[1] = 1
    baseline: str
    baseline_digest: str
    candidate_digest: str
    device: str
    dtype: str
    verify: bool
    limits: Limits
    facts: dict[str, str]
    figures: dict[str, Figure]
    environment: Environment
    digest: str = ""

    def sealed(self) -> bytes:
        """Canonical JSON with the digest filled in."""
        empty = _canonical(self.model_copy(update={"digest": ""}))
        return _canonical(self.model_copy(update={"digest": hashlib.sha256(empty).hexdigest()}))


class Moved(NamedTuple):
    """A figure then and now; `allowed` is by how much it may differ. None: one of both runs has no such figure."""

    name: str
    then: float | None
    now: float | None
    allowed: float

    @property
    def change(self) -> float:
        return 0.0 if self.then is None or self.now is None else self.now - self.then

    @property
    def passed(self) -> bool:
        return self.then is not None and self.now is not None and abs(self.change) <= self.allowed


def figures(result: Comparison) -> dict[str, Figure]:
    """What is held against a later run: `FIGURE` or `FIGURE WHERE`, FIGURE of `TOLERANCES`."""
    found: dict[str, Figure] = {}
    for row in result.kinds:
        values = {"kl_mean": row.kl_mean, "kl_p99": row.kl_p99, "cosine_loss": 1 - row.cosine_mean}
        values["perplexity_ratio"] = row.perplexity_ratio
        for name, value in values.items():
            found[f"{name} {row.kind or 'all'}"] = Figure(value=value, tokens=row.tokens)
    every = max((row.tokens for row in result.kinds), default=0)
    for check in result.checks:
        if check.name in ("decided_agreement", "embeddings", "head_kl") and check.value is not None:
            tokens = every if check.name == "decided_agreement" else 0
            found[check.name] = Figure(value=check.value, tokens=tokens)
    found |= {f"needle {needle.name}": Figure(value=needle.candidate) for needle in result.needles}
    for layer in result.layers:
        where = f"layers.{layer.layer}"
        found[f"layer_error {where}"] = Figure(value=layer.error)
        found[f"own_error {where}"] = Figure(value=layer.own_error)
        if layer.routing is not None:
            found[f"routing {where}"] = Figure(value=layer.routing)
    return found


def movements(then: Mapping[str, Figure], now: Mapping[str, Figure], factor: float = 1.0) -> Iterator[Moved]:
    """Every figure of both runs; `factor` widens all tolerances."""
    for name in dict.fromkeys([*then, *now]):
        old, new = then.get(name), now.get(name)
        allowed = factor * TOLERANCES[name.partition(" ")[0]].allowed(old) if old else 0.0
        yield Moved(name, old.value if old else None, new.value if new else None, allowed)


def save(folder: Path, saved: Saved) -> Path:
    """Keep a comparison in the candidate's folder; an earlier one is replaced."""
    path = folder / COMPARISON_NAME
    write_atomic(path, [saved.sealed()])
    return path


def read_saved(folder: Path) -> Saved:
    """The comparison that is kept in a folder.

    Raises:
        UsageError: there is none.
        InputError: it is unreadable, or was changed since it was written.
    """
    path = folder / COMPARISON_NAME
    again = f"run `quantkit-runtime compare BASELINE {folder} --save` again"
    try:
        raw = read_whole(path)
        saved = Saved.model_validate_json(raw)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} holds no saved comparison",
            f"save one while all is well: quantkit-runtime compare BASELINE {folder} --save",
        ) from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", again) from error
    except ValidationError as error:
        raise InputError(f"{path} is no saved comparison", again, items=problems_of(error)) from error
    if raw != saved.sealed() or not saved.environment.intact:
        raise InputError(f"{path} was changed or damaged since it was written", again)
    unknown = [
        name for name, figure in saved.figures.items() if name.partition(" ")[0] not in TOLERANCES or figure.tokens < 0
    ]
    if unknown or "/" in saved.baseline or not is_inside(saved.baseline):
        raise InputError(f"{path} is of another version of quantkit", again, items=unknown)
    return saved


def baseline_digest(folder: Path) -> str:
    """What identifies a baseline: sha256 of its `baseline.json`, which has the checksums of its other files."""
    return file_sha256(folder / BASELINE_NAME)


def _canonical(saved: Saved) -> bytes:
    return (json.dumps(saved.model_dump(mode="json"), sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
