"""Orthogonal matrices of any size that spread every channel over all others, applied without being formed.

Q = diag(signs) (R kron H) for n = m 2^k with m odd: H the Hadamard matrix of size 2^k, R the discrete Hartley matrix
of size m, `R_ij = (cos(2 pi i j / m) + sin(2 pi i j / m)) / sqrt(m)`, both symmetric and orthogonal, and random signs.
No entry of Q exceeds sqrt(2 / n), so a single large channel is spread evenly; the signs keep channels with a common
offset from adding up in one output. (A random orthogonal R has entries of 3 / sqrt(m) and needs a QR decomposition,
whose last bits differ between libraries; this one is the same everywhere.)

Only sums, differences and products of float64 in a fixed order are used, no matrix library: rows of a result are bit
for bit those of the whole, whatever the number of rows and threads, and on an accelerator those of the CPU.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class Rotation:
    """The orthogonal matrix of one size and seed.

    Args:
        size: n, at least 1.
        seed: of the signs.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.power = size & -size
        self.odd = size // self.power
        self._placed: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}

    @cached_property
    def _signs(self) -> Tensor:
        bits = np.random.default_rng(self.seed).integers(0, 2, self.size)
        return torch.from_numpy(1.0 - 2.0 * bits)

    @cached_property
    def _hartley(self) -> list[Tensor]:
        """Rows of R, times the norm of H."""
        m, norm = self.odd, 1 / math.sqrt(self.size)
        angles = [2 * math.pi * turn / m for turn in range(m)]
        values = [(math.cos(angle) + math.sin(angle)) * norm for angle in angles]
        return [torch.tensor([[values[i * j % m]] for j in range(m)], dtype=torch.float64) for i in range(m)]

    def __call__(self, x: Tensor) -> Tensor:
        """x Q for float64 `[..., n]`; x is left as it is."""
        signs, columns = self._on(x.device)
        x = (x * signs).unflatten(-1, (self.odd, self.power))
        result = x[..., :1, :] * columns[0]
        for index in range(1, self.odd):
            result += x[..., index : index + 1, :] * columns[index]
        return self._hadamard(result).flatten(-2)

    def _on(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Signs and rows of R on a device."""
        if device not in self._placed:
            self._placed[device] = self._signs.to(device), [row.to(device) for row in self._hartley]
        return self._placed[device]

    def _hadamard(self, x: Tensor) -> Tensor:
        """Butterflies along the last dimension of a contiguous tensor, which is used as a buffer; the norm is in R."""
        other, width = torch.empty_like(x), 1
        while width < self.power:
            pairs, result = (buffer.unflatten(-1, (-1, 2, width)) for buffer in (x, other))
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            torch.add(first, second, out=result[..., 0, :])
            torch.sub(first, second, out=result[..., 1, :])
            x, other, width = other, x, width * 2
        return x

    def matrix(self) -> Tensor:
        """Q as float64 `[n, n]`."""
        return self(torch.eye(self.size, dtype=torch.float64))
