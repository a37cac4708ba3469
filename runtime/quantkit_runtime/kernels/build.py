"""Builds the HIP source with the compiler at hand, once per source, compiler and card, into a cache.

hipcc or nvcc, a plain `-shared -fPIC`, called through ctypes: no torch headers, seconds instead of minutes. A C++
compiler for the CPU builds the same source through `cpu_shim.h`, for tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from quantkit.errors import InputError
from quantkit.spec.files import is_file
from quantkit_runtime.kernels.tuning import user_folder

SOURCES = Path(__file__).with_name("hip")
MAIN = SOURCES / "gemv.hip"
SECONDS = 300
"""Longest build; one takes 5 to 15 s."""

_COMMON = ("-std=c++17", "-O3", "-shared")
_FLAGS = {
    # -x hip and HIP_PLATFORM: with an nvcc on the PATH hipcc would pick it silently
    "hip": ("-x", "hip", *_COMMON, "-fPIC", "--offload-arch={arch}"),
    "cuda": ("-x", "cu", *_COMMON, "-Xcompiler", "-fPIC", "-arch={arch}"),
    "cpu": ("-x", "c++", *_COMMON, "-O1", "-fPIC", "-DQK_CPU", "-DQK_WAVE={arch}"),
}
_COMPILERS = {"hip": ("HIPCC", "hipcc"), "cuda": ("NVCC", "nvcc"), "cpu": ("CXX", "c++")}
_HOMES = {
    "hip": ("ROCM_PATH", "ROCM_HOME", "HIP_PATH", "/opt/rocm", "/opt/dtk"),
    "cuda": ("CUDA_HOME", "CUDA_PATH", "/usr/local/cuda"),
    "cpu": (),
}


class BuildError(InputError):
    """The source could not be built; the runtime then runs without it and says so."""


def find_compiler(family: str) -> str:
    """Path of a device family's compiler, from the variable (HIPCC, NVCC, CXX), the PATH, or the vendor's usual places.

    Raises:
        BuildError: there is none.
    """
    variable, name = _COMPILERS[family]
    homes = [Path(home if home.startswith("/") else os.environ.get(home, "")) for home in _HOMES[family]]
    candidates = [os.environ.get(variable, ""), name, *(str(home / "bin" / name) for home in homes if home.name)]
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise BuildError(f"no {name} was found", f"install it, or name it in the variable {variable}")


def cache_folder() -> Path:
    """Where built libraries lie."""
    return user_folder() / "kernels"


def library(family: str, arch: str, cache: Path | None = None) -> Path:
    """The shared library for a card, built unless the cache has it.

    Args:
        family: "hip", "cuda", or "cpu" for the shim.
        arch: `gfx928`, `sm_90`; for the shim the wave size.
        cache: folder; default `cache_folder()`.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = find_compiler(family)
    command = [compiler, *(flag.format(arch=arch) for flag in _FLAGS[family])]
    digest = hashlib.sha256("\0".join([*command, _version(compiler)]).encode())
    for source in [*sorted(SOURCES.glob("*.h")), MAIN]:
        digest.update(source.read_bytes())
    target = (cache or cache_folder()) / f"gemv-{family}-{arch}-{digest.hexdigest()[:16]}.so"
    if not is_file(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                built = Path(folder) / "built.so"
                compile_source([*command, str(MAIN), "-o", str(built)])
                built.replace(target)  # processes that build at the same time replace each other's equal files
        except OSError as error:
            raise BuildError(f"{target.parent}: {error.strerror}", "set XDG_CACHE_HOME to a writable folder") from error
    return target


def assembly(arch: str) -> str:
    """Assembly of the source for an AMD card, by hipcc.

    Raises:
        BuildError: no compiler, or it fails.
    """
    flags = ("-x", "hip", "-std=c++17", "-O3", f"--offload-arch={arch}", "-S", "--cuda-device-only")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "gemv.s"
        compile_source([find_compiler("hip"), *flags, str(MAIN), "-o", str(target)])
        return target.read_text(encoding="utf-8")


def compile_source(command: list[str]) -> None:
    """Run a compiler.

    Raises:
        BuildError: with the compiler's first complaint.
    """
    environment = {**os.environ, "HIP_PLATFORM": "amd"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line] or [f"exit {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {lines[0]}", f"the command was: {' '.join(command)}")


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return done.stdout
