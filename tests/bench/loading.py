"""Loading against reading: tensors of a rank's files into their final memory, hashed, against plain reads of the bytes.

The files lie in the page cache, so the figure is that of the code and not that of a disk. On a card the tensors end
there. `--gib` is the size of the files; `--device cuda` needs a card.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import common
import torch
import xxhash
from safetensors.torch import save_file

from quantkit.spec.tensorfile import read_header
from quantkit_runtime import device as devices
from quantkit_runtime.reader import PIECE, Reader
from quantkit_runtime.shards import Stored

TENSOR = 256 * 2**20


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "hip"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = devices.resolve(options.device)
    report = common.Report(f"loading_{device.family}", options.small, {"gib": options.gib, "device": device.line})
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "loading.safetensors"
    stored = written(path, max(1, int((1 if options.small else options.gib) * 2**30) // TENSOR))
    rates: dict[str, list[float]] = {"raw": [], "raw, one buffer": [], "load": [], "load, no checksums": []}
    for _ in range(options.repeats):  # in turn, so that what else the machine does meets all of them
        rates["raw"].append(raw(path, stored))
        rates["raw, one buffer"].append(raw(path, stored, torch.zeros(TENSOR, dtype=torch.uint8)))
        rates["load"].append(load(path.parent, stored, device.torch, verify=True))
        rates["load, no checksums"].append(load(path.parent, stored, device.torch, verify=False))
    path.unlink()
    total = sum(one.info.nbytes for one in stored)
    found = {name: total / median(seconds) / 1e9 for name, seconds in rates.items()}
    common.table(["", "GB/s"], [[name, f"{rate:.2f}"] for name, rate in found.items()])
    report.data |= {"bytes": total, "gb_per_second": found}
    fair = (
        "raw, one buffer" if device.torch.type == "cuda" else "raw"
    )  # host memory that the load does not touch either
    report.target(f"loading with checksums against {fair}", found["load"] / found[fair], 0.8, at_most=False)
    report.write()


def written(path: Path, count: int) -> list[Stored]:
    """A file of `count` INT8 tensors, and where they lie."""
    tensor = torch.randint(-127, 128, (TENSOR,), dtype=torch.int8)
    digest = xxhash.xxh3_128_hexdigest(tensor.numpy().data)
    save_file({f"t{number:03}": tensor.clone() for number in range(count)}, path)
    return [Stored(path.name, info, digest) for info in read_header(path).tensors.values()]


def raw(path: Path, stored: list[Stored], buffer: torch.Tensor | None = None) -> float:
    """Seconds to read the bytes in the same pieces, into memory that is new, as a rank's is on a host, or into this."""
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    for one in stored:
        memory = (torch.empty(one.info.nbytes, dtype=torch.uint8) if buffer is None else buffer).numpy().data
        for first in range(0, one.info.nbytes, PIECE):
            os.preadv(descriptor, [memory[first : first + PIECE]], one.info.start + first)
    os.close(descriptor)
    return time.perf_counter() - start


def load(root: Path, stored: list[Stored], device: torch.device, *, verify: bool) -> float:
    start = time.perf_counter()
    with Reader(root, stored, device, verify=verify) as reader:
        for one in stored:
            assert reader.take(one) is not None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
