"""What this host has left: memory within the control group that this process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can still be allocated, by the host and by a container's limit."""
    return min(int(psutil.virtual_memory().available), _cgroup_free())


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
