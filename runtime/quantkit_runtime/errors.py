"""The four ways in which loading a model fails, each with its own next step."""

from __future__ import annotations

from quantkit.errors import InputError


class ShapeMismatch(InputError):
    """A stored tensor has another shape than the model built from config.json wants."""


class UnsupportedDtype(InputError):
    """A stored tensor has a dtype or a quantization that this runtime cannot execute."""


class BrokenShard(InputError):
    """A file or tensor is missing, has another size, or its bytes do not have the recorded checksum."""


class OutOfMemory(InputError):
    """The device has less memory than the weights, the cache and the workspace need."""
