"""The start-up self-test of every kernel on the card at hand."""

from __future__ import annotations

import time

import common

from quantkit_runtime import device
from quantkit_runtime.kernels import registry


def main() -> None:
    print(f"from {common.ROOT.name}")
    family = device.resolve().family
    for op in sorted({row.op for row in registry.ROWS}):
        start = time.time()
        registry.names(op, family)
        print(f"{op}: {time.time() - start:.1f} s", flush=True)
    print("skipped:", registry.skipped(family))


if __name__ == "__main__":
    main()
