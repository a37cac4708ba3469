"""Which device and dtype are chosen, and what is free there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit import host
from quantkit.errors import UsageError
from quantkit_runtime import device as devices


@pytest.fixture
def hip_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is built for HIP and sees one card."""
    properties = SimpleNamespace(name="K100_AI", gcnArchName="gfx928:sramecc+:xnack-", major=9, minor=2)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))


@pytest.mark.parametrize("choice", ["auto", "hip"])
def test_a_hip_card_is_named_by_its_architecture(hip_card: None, choice: str) -> None:
    device = devices.resolve(choice)
    assert (device.family, device.arch, device.name) == ("hip", "gfx928", "K100_AI")
    assert device.torch == torch.device("cuda", 0)
    assert "HIP 6.3" in device.line
    assert device.free_memory() == 7
    assert devices.compute_dtype("auto", device) == torch.bfloat16


def test_cuda_on_a_hip_build_is_refused_with_the_choices(hip_card: None) -> None:
    with pytest.raises(UsageError, match=r"built for HIP[\s\S]*auto, cpu, hip"):
        devices.resolve("cuda")


def test_the_cpu_computes_in_float32(hip_card: None) -> None:
    device = devices.resolve("cpu")
    assert device.family == "cpu"
    assert devices.compute_dtype("auto", device) == torch.float32
    assert devices.compute_dtype("bfloat16", device) == torch.bfloat16
    assert device.used_memory() > 0


def test_free_memory_respects_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert devices.resolve("cpu").free_memory() == 1000 - 700 + 200
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.resolve("cpu").free_memory() > 1000
