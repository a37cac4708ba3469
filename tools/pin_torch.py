"""Write the constraints of an environment that already has torch, so that pip can never replace it.

    python tools/pin_torch.py constraints.txt > .venv/constraints.txt
    pip install -e . -c .venv/constraints.txt

A vendor's torch (ROCm, DTK) exists for one driver and comes with its own Triton and a NumPy that it was built
against. pip knows none of this: one requirement that it does not meet, or one tested pin such as
`torch==2.13.0`, and pip puts a CUDA build in front of it. Four rules, the first that applies:

1. torch, and everything installed whose version has a local label (`3.1.0+das.opt1`), is pinned to what is
   installed: these are the vendor's builds, and no package index has them.
2. A distribution that the system provides to a virtual environment keeps its version: its tested pin is left out.
3. With another release of torch than the tested one, the tested pins of packages that follow torch's releases are
   left out, and pip finds the newest that accepts this torch.
4. Every other tested pin stays.

Run it with the interpreter whose environment is meant. Needs the standard library only.
Exit code 1 when torch is not installed there.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

# compressed-tensors 0.20 needs torch 2.10, later than some vendors' builds; accelerate raises its bound likewise.
FOLLOW_TORCH = frozenset({"accelerate", "compressed-tensors"})

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)")


@dataclass(frozen=True)
class Installed:
    """One visible distribution; `inherited` when it lies outside the virtual environment."""

    version: str
    inherited: bool


def canonical(name: str) -> str:
    """`Typing_Extensions` -> `typing-extensions` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_distributions() -> dict[str, Installed]:
    """Canonical name -> what this interpreter would import; the first on `sys.path` wins, as on import."""
    in_venv = sys.prefix != sys.base_prefix
    prefix = Path(sys.prefix).resolve()
    found: dict[str, Installed] = {}
    for dist in distributions():
        if not dist.metadata["Name"] or not dist.version:
            continue  # what an interrupted install or removal leaves behind; pip ignores it too
        location = Path(str(dist.locate_file(""))).resolve()
        inherited = in_venv and not location.is_relative_to(prefix)
        found.setdefault(canonical(dist.metadata["Name"]), Installed(dist.version, inherited))
    return found


def constraints(tested: Iterable[str], installed: dict[str, Installed]) -> Iterator[str]:
    """The lines of the constraints file: exact pins of vendor builds, then the tested pins that still apply."""
    vendor = {name: d.version for name, d in installed.items() if name == "torch" or "+" in d.version}
    pins = {canonical(match["name"]): match["version"] for line in tested if (match := PIN.match(line))}
    dropped = vendor.keys() | {name for name, d in installed.items() if d.inherited}
    if vendor["torch"].partition("+")[0] != pins.get("torch"):
        dropped |= FOLLOW_TORCH
    yield from (f"{name}=={version}" for name, version in sorted(vendor.items()))
    yield from (f"{name}=={version}" for name, version in pins.items() if name not in dropped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tested", type=Path, help="constraints file with the tested versions")
    args = parser.parse_args()
    installed = installed_distributions()
    if "torch" not in installed:
        print(
            f"error: torch is not installed for {sys.executable}.\n"
            "hint: install the vendor's wheel for the interpreter that PYTHON names (make venv SYSTEM_TORCH=1 "
            "PYTHON=/path/to/python3), or run make venv without SYSTEM_TORCH.",
            file=sys.stderr,
        )
        return 1
    with args.tested.open(encoding="utf-8") as lines:
        print("\n".join(constraints(lines, installed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
