"""What this host has: memory left here and on its cards, within the control group that this process runs in, and the
software it runs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from quantkit import __version__

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
DRIVERS = ("amdgpu", "hydcu", "hycu", "nvidia")
"""Kernel modules of the cards that the runtime knows."""
_SOURCES = (".py", ".hip", ".cpp", ".h", ".json")
_TRITONS = ("triton", "pytorch-triton-rocm", "pytorch-triton")
"""Distributions that bring the package `triton`."""


def free_memory() -> int:
    """Bytes that can still be allocated, by the host and by a container's limit."""
    return min(int(psutil.virtual_memory().available), _cgroup_free())


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated where tensors of a device lie."""
    if device.type == "cpu":
        return free_memory()
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _cgroup_free() -> int:
    """Memory left under a container's limit (control groups version 2); a huge number without one."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    if limit == "max":
        return 2**63
    return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))


@cache
def versions() -> dict[str, str]:
    """The software of this process by the names of `spec.environment.NAMES`; imports torch."""
    import torch

    return {
        "quantkit": __version__,
        "kernels": _kernels_digest(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "stack": torch_stack(),
        "driver": ", ".join(driver_versions()),
        "triton": triton_version(),
        **{name: _version(name) for name in ("transformers", "safetensors", "numpy")},
    }


def torch_stack() -> str:
    """What torch is built for: `HIP 6.3`, `CUDA 12.8` or `CPU`."""
    import torch

    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def driver_versions(root: Path = Path("/")) -> Iterator[str]:
    """`nvidia 550.54` for each loaded driver; one that is part of the kernel has the kernel's version."""
    for name in DRIVERS:
        module = root / "sys/module" / name
        if module.is_dir():
            version = _read(module / "version") or f"of Linux {_read(root / 'proc/sys/kernel/osrelease')}"
            yield f"{name} {version}"


def triton_version() -> str:
    """Version of Triton, "" when it cannot be imported."""
    if util.find_spec("triton") is None:
        return ""
    return next((found for name in _TRITONS if (found := _version(name))), "of an unknown version")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _kernels_digest() -> str:
    """sha256 over names and bytes of the runtime's kernels, which are read and not imported; "" without them."""
    runtime = util.find_spec("quantkit_runtime")
    folders = [Path(place) / "kernels" for place in (runtime.submodule_search_locations or ())] if runtime else []
    digest, found = hashlib.sha256(), False
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
            found = True
    return digest.hexdigest() if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
