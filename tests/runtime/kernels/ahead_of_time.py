"""Compile a Triton kernel for a card that is not there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx908": GPUTarget("hip", "gfx908", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}


def assembly(kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """Assembly (PTX for sm_90) of a kernel whose pointers and integers are multiples of 16 where they are one.

    Args:
        types: Triton's type of every argument that is no constant: "*i8", "i32", ...; a name ending in "=16" tells that
            the integer is a multiple of 16.
        constants: values of `tl.constexpr` arguments, and of pointers that are None.
    """
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else types[name]
        kind, _, aligned = kind.partition("=")
        signature[name] = kind
        if kind.startswith("*") or aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    where = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=where, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    return str(compiled.asm["amdgcn" if target.startswith("gfx") else "ptx"])
