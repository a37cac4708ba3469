"""What software and drivers something was made with, and what has changed since.

What a conversion computes follows from source and options alone, so an environment identifies nothing: it says where to
look when a folder that ran yesterday runs differently today. It holds versions, never names of hosts, paths or times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quantkit.spec.document import Strict

NAMES = {
    "quantkit": "version of this toolkit and its runtime",
    "kernels": "sha256 over the sources of the runtime's kernels and their tuning table",
    "python": "version of the interpreter",
    "torch": "version of torch, with its build",
    "stack": "what torch is built for: `HIP 6.3`, `CUDA 12.8` or `CPU`",
    "driver": "kernel modules of the cards with their versions",
    "triton": "version of Triton, whichever package brings it",
    "transformers": "version",
    "safetensors": "version",
    "numpy": "version",
}
"""Keys of `Environment.versions`, in the order in which they are shown; a value is "" where there is no such thing."""


class Environment(Strict):
    """One machine's software.

    Attributes:
        versions: by the names of `NAMES`.
        digest: sha256 over `versions` as canonical JSON, so that a changed record is found.
    """

    versions: dict[str, str]
    digest: str

    @classmethod
    def of(cls, versions: Mapping[str, str]) -> Environment:
        """The environment of these versions, with its digest."""
        return cls(versions=dict(sorted(versions.items())), digest=_digest(versions))

    @property
    def intact(self) -> bool:
        return self.digest == _digest(self.versions)


class Change(NamedTuple):
    """A version that is another one now, as it is shown; several recorded ones are joined by " / "."""

    name: str
    recorded: str
    now: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.recorded}, now {self.now}"


def distinct(found: Iterable[Mapping[str, str]]) -> tuple[Environment, ...]:
    """Every environment once, in an order that depends on nothing else."""
    every = {environment.digest: environment for environment in map(Environment.of, found)}
    return tuple(every[digest] for digest in sorted(every))


def changes(recorded: Iterable[Environment], now: Mapping[str, str]) -> list[Change]:
    """What differs between any of the recorded environments and `now`; names that a record lacks are left out."""
    return [
        Change(name, " / ".join(_shown(name, value) for value in there), _shown(name, now.get(name, "")))
        for name, there in _values(recorded).items()
        if there != [now.get(name, "")]
    ]


def mixed(recorded: Iterable[Environment]) -> list[str]:
    """`torch 2.9.0 / 2.10.0` for each name of which the environments have several versions."""
    return [
        f"{name} {' / '.join(_shown(name, value) for value in there)}"
        for name, there in _values(recorded).items()
        if len(there) > 1
    ]


def _values(recorded: Iterable[Environment]) -> dict[str, list[str]]:
    """Every name of a record, those of `NAMES` first, and its distinct values."""
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for environment in recorded:
        for name, value in environment.versions.items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items() if values}


def _shown(name: str, value: str) -> str:
    return (value[:12] if name == "kernels" else value) or "none"


def _digest(versions: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(versions), sort_keys=True, ensure_ascii=False).encode()).hexdigest()
