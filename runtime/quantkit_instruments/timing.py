"""Times on a card: graph replay over several sets of operands, so that no cache is warm; the median in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]

COLD_BYTES = 400_000_000
"""Operands that are rotated through add up to this: several times any card's last cache."""


def copies(nbytes: int, most: int = 64) -> int:
    """Sets of operands of `nbytes` each that keep the caches cold."""
    return max(2, min(most, -(-COLD_BYTES // max(1, nbytes))))


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, each of which has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def median_us(call: Call, repeats: int = 15) -> float:
    """Median time of a call, such as the replay of a graph, after two for warming up."""
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(median(times[2:]))


def call_us(calls: Sequence[Call]) -> float:
    """Median time of one of the calls, which do the same on different operands."""
    return median_us(capture(calls).replay) / len(calls)
