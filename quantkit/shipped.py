"""Folders of data that come with quantkit: packages of their own once installed, folders of a checkout before."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


def shipped_folder(name: str) -> Traversable:
    """`recipes` or `calibration_data`, installed or in the checkout that this file lies in."""
    try:
        return resources.files(f"quantkit.{name}")
    except ModuleNotFoundError:
        return Path(__file__).resolve().parent.parent / name
