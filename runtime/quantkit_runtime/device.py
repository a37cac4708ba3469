"""Which device runs the model, and what is printed about it.

HIP cards are `torch.cuda` devices of a torch that was built for HIP; `torch.version.hip` tells them apart.
"""

from __future__ import annotations

import gc
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from quantkit.errors import UsageError
from quantkit.host import free_bytes, torch_stack

CHOICES = ("auto", "cpu", "cuda", "hip")


@dataclass(frozen=True)
class Device:
    """A device and how it is named.

    Attributes:
        torch: torch's device.
        family: "cpu", "cuda" or "hip": the device column of the kernel registry.
        name: the card's or the processor's name.
        arch: `gfx928`, `sm_90`, or the processor architecture.
        stack: `torch 2.13.0, HIP 6.3` and the like.
    """

    torch: torch.device
    family: str
    name: str
    arch: str
    stack: str

    @property
    def line(self) -> str:
        return f"{self.name} ({self.arch}), {self.stack}"

    def free_memory(self) -> int:
        """Bytes that can still be allocated: of the card, or of the host within its control group."""
        return free_bytes(self.torch)

    def used_memory(self) -> int:
        """Bytes that this process holds: allocated on the card, or resident on the host."""
        if self.torch.type == "cuda":
            return int(torch.cuda.memory_allocated(self.torch))
        return int(psutil.Process().memory_info().rss)

    def peak_memory(self) -> int:
        """Most bytes that were allocated on the card at once; 0 on the host, where nothing counts it."""
        return int(torch.cuda.max_memory_allocated(self.torch)) if self.torch.type == "cuda" else 0


def forget() -> None:
    """Give freed memory back to the card and start counting its peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def resolve(choice: str = "auto") -> Device:
    """Device for `--device`.

    Raises:
        UsageError: the choice is unknown or this torch cannot see such a device.
    """
    if choice not in CHOICES:
        raise UsageError(f"unknown device {choice!r}", choices=CHOICES)
    available = torch.cuda.is_available()
    built_for = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    family = (built_for if available else "cpu") if choice == "auto" else choice
    if family == "cpu":
        stack = f"torch {torch.__version__}, CPU, {torch.get_num_threads()} threads"
        return Device(torch.device("cpu"), "cpu", _cpu_name(), platform.machine(), stack)
    if family != built_for or not available:
        seen = "sees no card" if family == built_for else f"is built for {built_for.upper()}"
        raise UsageError(
            f"--device {family}: this torch ({torch.__version__}) {seen}",
            "check the driver and HIP_VISIBLE_DEVICES / CUDA_VISIBLE_DEVICES, or use the environment with the "
            "vendor's torch",
            choices=("auto", "cpu", *((built_for,) if available else ())),
        )
    return _card(family)


def _card(family: str) -> Device:
    own = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))  # one card for each process of torchrun
    device = torch.device("cuda", own % torch.cuda.device_count())
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    stack = f"torch {torch.__version__}, {torch_stack()}"
    return Device(device, family, properties.name, card_arch(properties), stack)


def card_arch(properties: Any) -> str:
    """Architecture of a card, from torch's properties of it: `gfx928` or `sm_90`."""
    if torch.version.hip:
        # "gfx928:sramecc+:xnack-": the features after the colon do not select kernels
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def compute_dtype(choice: str, device: Device) -> torch.dtype:
    """dtype of everything that is not INT8, for `--dtype`.

    `auto` is bfloat16 on cards. On the CPU it is float32 everywhere: the CPU is where results are proved, and most
    CPUs multiply bfloat16 several times more slowly.

    Raises:
        UsageError: unknown choice.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtypes["auto"] = torch.float32 if device.family == "cpu" else torch.bfloat16
    if choice not in dtypes:
        raise UsageError(f"unknown dtype {choice!r}", choices=sorted(dtypes))
    return dtypes[choice]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "CPU"
