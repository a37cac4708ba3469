"""What stands between this machine and a run: each check says what it found, what is wrong, and what to do about it.

Nothing here needs a card, and no remedy replaces the vendor's torch: on DCU hosts that is the only one that works.
Cards are looked for on the PCI bus as well as through torch, because the gap between the two is the trouble.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from quantkit import __version__
from quantkit.errors import QuantkitError, first_line
from quantkit.host import driver_versions, torch_stack, triton_version
from quantkit.spec.files import exists
from quantkit.spec.manifest import manifest_path, read_manifest
from quantkit_instruments.since import since
from quantkit_runtime.device import card_arch
from quantkit_runtime.loader import require_folder

VENDORS = {"0x1002": "AMD", "0x1d94": "Hygon", "0x10de": "NVIDIA"}
_DISPLAY, _ACCELERATOR = "0x03", "0x12"  # PCI base classes; processing accelerators are 0x12, and 0x0b40 on Hygon
MASKS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
CODES = {"torch": 10, "driver": 11, "cards": 12, "compute": 13, "memory": 14, "ecc": 15, "manifest": 16}
"""Check -> exit code of its problem; with several problems the first one's."""
ANSWER = 10.0
"""Seconds that a tool of the driver may take."""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is set where something is wrong, `code` where that stops a run."""

    check: str
    found: str
    remedy: str = ""
    code: int = 0


def _problem(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, found, remedy, CODES[check])


def examine(folder: Path | None = None, root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings, in the order in which a run would meet them.

    Args:
        folder: a converted folder whose manifest is held against this machine.
        root: where `sys`, `proc` and `dev` lie.
        env: environment variables.

    Raises:
        InputError: there is no such folder.
    """
    if folder is not None:
        require_folder(folder)
    cards = _pci_cards(root)
    found = [*_torch(cards), *_driver(cards, root), *_cards(cards, env), *_tools(env), *_ecc(cards, root)]
    return [*found, *(_manifest(folder) if folder is not None else ())]


def exit_code(findings: list[Finding]) -> int:
    return next((finding.code for finding in findings if finding.code), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _pci_cards(root: Path) -> list[tuple[str, str, str]]:
    """(PCI address, vendor, device id) of every card that could compute."""
    cards = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = VENDORS.get(_read(path / "vendor")), _read(path / "class")
        if vendor and kind.startswith((_DISPLAY, _ACCELERATOR, "0x0b40")):
            cards.append((path.name, vendor, _read(path / "device")))
    return cards


def _torch(cards: list[tuple[str, str, str]]) -> Iterator[Finding]:
    built = "the CPU only" if (stack := torch_stack()) == "CPU" else stack
    line = (
        f"torch {torch.__version__}, built for {built}; transformers {version('transformers')}; quantkit {__version__}"
    )
    vendors = {vendor for _, vendor, _ in cards}
    wanted = "CUDA" if vendors == {"NVIDIA"} else "HIP" if vendors else ""
    if wanted and wanted not in built:
        yield _problem(
            "torch",
            f"{line}, on a host with cards of {', '.join(sorted(vendors))}",
            "start from the environment or container image of the card's vendor, whose torch is built for it, and "
            "install quantkit there with --no-deps; do not install another torch over the vendor's",
        )
    else:
        yield Finding("torch", line)


def _driver(cards: list[tuple[str, str, str]], root: Path) -> Iterator[Finding]:
    for address, vendor, device in cards:
        yield Finding("PCI", f"{address}: {vendor} {device}")
    if not cards:
        yield Finding("PCI", "no card of AMD, Hygon or NVIDIA; runs use the CPU")
        return
    versions = list(driver_versions(root))
    nodes = [
        root / "dev" / ("nvidiactl" if vendor == "NVIDIA" else "kfd") for vendor in sorted({card[1] for card in cards})
    ]
    missing = [node for node in nodes if not exists(node)]
    closed = [node for node in nodes if exists(node) and not os.access(node, os.R_OK | os.W_OK)]
    if not versions:
        yield _problem("driver", "no driver of these cards is loaded", "load it on the host (modprobe), see `dmesg`")
    elif missing:
        yield _problem(
            "driver",
            f"{', '.join(versions)}; there is no {', '.join(map(str, missing))}",
            "start the container with --device /dev/kfd --device /dev/dri (NVIDIA: --gpus all)",
        )
    elif closed:
        yield _problem(
            "driver", f"no right to open {', '.join(map(str, closed))}", "add the user to the groups render and video"
        )
    else:
        yield Finding("driver", ", ".join(versions))


def _cards(cards: list[tuple[str, str, str]], env: Mapping[str, str]) -> Iterator[Finding]:
    masks = {name: env[name] for name in MASKS if name in env}
    said = ", ".join(f"{name}={value!r}" for name, value in masks.items()) or "none is set"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Finding("masks", said)
    if cards and not count:
        remedy = f"unset or correct {', '.join(masks)}" if masks else "see the torch and driver lines above"
        yield _problem("cards", f"{len(cards)} on the PCI bus, torch sees none", remedy)
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        arch, where = card_arch(card), f"{getattr(card, 'pci_domain_id', 0):04x}:{getattr(card, 'pci_bus_id', 0):02x}"
        line = f"card {index}: {card.name}, {arch}, PCI {where}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        yield Finding("cards", line)
        if free < 0.5 * total:
            yield _problem("memory", f"card {index}: more than half is taken", "end the processes that hold it")
        yield from _compute(index)


def _compute(index: int) -> Iterator[Finding]:
    """An INT8 product of the card against exact integers."""
    from quantkit_runtime.kernels.int_mm import int32_product
    from quantkit_runtime.kernels.reference import int32_product as exact

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-127, 128, (rows, 256), dtype=torch.int8, generator=generator) for rows in (33, 64))
    try:
        right = torch.equal(int32_product(x.cuda(index), w.cuda(index)).cpu(), exact(x, w))
    except RuntimeError as error:
        remedy = "this torch has no kernels for the card's architecture: use the vendor's environment made for it"
        yield _problem("compute", f"card {index}: {first_line(error)}", remedy)
        return
    if not right:
        yield _problem("compute", f"card {index}: an INT8 product is wrong", "take the card out of service")


def _tools(env: Mapping[str, str]) -> Iterator[Finding]:
    triton = triton_version()
    yield Finding(
        "Triton", triton or "not installed", "" if triton else "torch's kernels serve; the vendor's Triton is faster"
    )
    roots = [env[name] for name in ("ROCM_PATH", "HIP_PATH", "DTKROOT", "CUDA_HOME") if name in env]
    path = os.pathsep.join([env.get("PATH", ""), *(str(Path(root) / "bin") for root in roots)])
    found = [tool for name in ("hipcc", "nvcc") if (tool := shutil.which(name, path=path))]
    yield Finding(
        "compiler", ", ".join(found) or "no hipcc, no nvcc", "" if found else "kernels that need one are passed over"
    )


def _ecc(cards: list[tuple[str, str, str]], root: Path) -> Iterator[Finding]:
    for address, vendor, _ in cards:
        counts = _read(root / "sys/bus/pci/devices" / address / "ras/umc_err_count")
        if vendor == "NVIDIA" and shutil.which("nvidia-smi"):
            counts = _nvidia_ecc(address)
        wrong = [line for line in counts.splitlines() if line.startswith("ue:") and line.split(":")[1].strip() != "0"]
        if wrong:
            yield _problem("ecc", f"{address}: {wrong[0]} (memory errors that were not corrected)", "reset the card")
        else:
            yield Finding("ECC", f"{address}: {'no uncorrected errors' if counts else 'not readable'}")


def _nvidia_ecc(address: str) -> str:
    """As a `umc_err_count` file; empty where nvidia-smi does not say, or does not answer (a driver that hangs)."""
    query = ["nvidia-smi", "-i", address, "--query-gpu=ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return ""
    return f"ue: {done.stdout.strip()}" if done.stdout.strip().isdigit() else ""


def _manifest(folder: Path) -> Iterator[Finding]:
    path = manifest_path(folder)
    if path is None:
        yield Finding("manifest", f"{folder} has none", "convert with `quantkit convert`, so that it can be checked")
        return
    try:
        manifest = read_manifest(path)
    except QuantkitError as error:
        yield _problem("manifest", error.message, error.hint)
        return
    targets = {record.target for record in manifest.tensors if record.target}
    if targets:  # of whatever card: the loader takes plain weights only
        yield _problem(
            "manifest", f"weights are packed for {', '.join(sorted(targets))}", "convert with --layout plain"
        )
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < cards < manifest.mesh.world:
        yield Finding("manifest", f"made for {manifest.mesh.world} ranks, {cards} cards here", "start it on more nodes")
    yield Finding("manifest", f"{manifest.form}, {len(manifest.files)} files, quantkit {manifest.tool_version}")
    for event in since(folder, manifest.environments, manifest.mesh.world):
        yield Finding("changed", event.line, event.command)
