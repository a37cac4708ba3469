"""The streaming GEMV (`hip/gemv.hip`) through ctypes, on torch's current stream.

For one to eight tokens, dense or one expert per slot; K and group sizes in multiples of 16.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import UsageError
from quantkit_runtime import device
from quantkit_runtime.kernels import build
from quantkit_runtime.kernels.reference import check_accumulator
from quantkit_runtime.kernels.tuning import Streaming, tuning

MOST_TOKENS = 8
K_MULTIPLE = 16
OUTPUTS = (2, 4, 8)
THREADS = (64, 128, 256)
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Arguments(ctypes.Structure):
    """As `Arguments` in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "w", "w_scale", "bias", "out", "expert")),
        *(
            (name, ctypes.c_int)
            for name in ("tokens", "n", "k", "group", "experts", "share", "out_type", "bias_type", "x_type")
        ),
    )


class Gemv:
    """The built library.

    Args:
        path: of the shared library.
        compute_units: of the card, which the tuning's blocks are multiplied with.
    """

    def __init__(self, path: Path, compute_units: int) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._run, self._wave = library.quantkit_gemv, int(library.quantkit_wave())
        except (OSError, AttributeError) as error:
            raise build.BuildError(f"{path.name} cannot be loaded: {error}", f"remove {path.parent}") from error
        self._run.argtypes = [ctypes.POINTER(_Arguments), *[ctypes.c_int] * 4, ctypes.c_void_p]
        self._compute_units = compute_units

    def _threads(self, wanted: int, k: int) -> int:
        """The table's number, or three quarters of it where that leaves fewer threads without inputs (K = 1536)."""
        choices = [wanted, *([wanted * 3 // 4] if wanted * 3 // 4 % self._wave == 0 else [])]
        return min(choices, key=lambda threads: -k % (threads * K_MULTIPLE) / k)

    def __call__(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        w: Tensor,
        w_scale: Tensor,
        bias: Tensor | None,
        out: Tensor,
        expert: Tensor | None = None,
        share: int = 1,
        shape: Streaming | None = None,
    ) -> Tensor:
        """Fill `out` `[T, N]`, or `[S, N]` with `expert` int64 `[S]`; slots of other ranks' experts are left alone.

        Args:
            x, x_scale: int8 with its scales; or a float row with None, which the kernel quantizes.
            shape: overrides the device's table.
        """
        x = x.contiguous()
        x_scale = None if x_scale is None else x_scale.contiguous()
        k, groups = x.shape[1], 1 if x_scale is None else x_scale.shape[1]
        check_accumulator(k)
        if not w.is_contiguous() or w.data_ptr() % 16 or x.data_ptr() % 16 or w.shape[-1] != k:
            raise UsageError(f"the GEMV wants contiguous weights of {k} inputs, aligned to 16 bytes")
        tokens = 1 if expert is not None else x.shape[0]
        shape = shape or tuning().streaming(tokens)
        threads = self._threads(shape.threads, k)
        arguments = _Arguments(
            x.data_ptr(), None if x_scale is None else x_scale.data_ptr(), w.data_ptr(), w_scale.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), None if expert is None else expert.data_ptr(),
            tokens, w.shape[-2], k, k // groups if groups > 1 else 0,
            w.shape[0] if expert is not None else 0, share,
            _TYPES[out.dtype], _TYPES[out.dtype if bias is None else bias.dtype],
            -1 if x_scale is not None else _TYPES[x.dtype],
        )  # fmt: skip
        slots = 1 if expert is None else expert.numel()
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else None
        most_blocks = max(1, shape.blocks * self._compute_units // slots)
        status = self._run(ctypes.byref(arguments), slots, shape.outputs, threads, most_blocks, stream)
        if status:
            raise UsageError(f"the GEMV refused tokens {x.shape[0]}, weight {list(w.shape)}, groups {groups}: {status}")
        return out


@cache
def load() -> Gemv:
    """The library for the card at hand.

    Raises:
        BuildError: there is no card, or the build fails.
    """
    card = device.resolve()
    if card.family == "cpu":
        raise build.BuildError("there is no card")
    units = torch.cuda.get_device_properties(card.torch).multi_processor_count
    return Gemv(build.library(card.family, card.arch), units)


def w8a8_gemm(
    x_TK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    out = x_TK.new_empty((x_TK.shape[0], w_NK.shape[0]), dtype=out_dtype)
    return load()(x_TK, x_scale, w_NK, w_scale_N1, bias_N, out) if x_TK.shape[0] else out


def expert_gemm(
    x_RK: Tensor,
    x_scale: Tensor,
    w_ENK: Tensor,
    w_scale_EN1: Tensor,
    bias_EN: Tensor | None,
    index_Tk: Tensor,
    share: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `kernels.registry`.

    The index is read at the start of the kernel, which may be before its predecessor has ended: something else must run
    between whatever wrote it and this call.
    """
    if index_Tk.dtype != torch.int64 or not index_Tk.is_contiguous():
        raise UsageError("the GEMV by expert wants a contiguous int64 index")
    out = x_RK.new_empty((index_Tk.numel(), w_ENK.shape[1]), dtype=out_dtype)
    index = index_Tk.view(-1)
    return load()(x_RK, x_scale, w_ENK, w_scale_EN1, bias_EN, out, index, share) if out.shape[0] else out


def quantize_gemm(
    x_TK: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    out = x_TK.new_empty((x_TK.shape[0], w_NK.shape[0]), dtype=out_dtype)
    return load()(x_TK, None, w_NK, w_scale_N1, bias_N, out)
