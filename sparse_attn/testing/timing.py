"""Time GPU calls inside a CUDA graph, and the floors no implementation gets below."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from sparse_attn import roofline, workspace
from sparse_attn.framework import streams

GRAPH_US = 600.0  # length of one replay, so that what starts and ends it, some 20 us, does not count
MOST_CALLS = 512  # in one replay


def time_graph(
    calls: Sequence[Callable[[], object]], *, target_ms: float = 40.0, rest_s: float = 0.0, min_replays: int = 5
) -> float:
    """Median microseconds per call.

    calls: one per rotating input set (see ``rotations``), all doing the same work. They are captured in order, repeated
    until a replay is long enough, and replayed for about ``target_ms`` after a pause of ``rest_s``. Ops take scratch
    from a workspace that the warm-up sizes, so nothing is allocated or cleared inside the graph but what they return.
    """
    if not calls:
        raise ValueError("calls: got none, allowed: at least one")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream), workspace.use(workspace.Workspace((0, 0), "cuda")):
        for call in calls:
            call()
        stream.synchronize()
        rounds, one, graph = _captured(calls, stream)
        time.sleep(rest_s)
        replays = max(min_replays, min(2000, int(target_ms * 1e3 / one)))
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for begin, end in pairs:
            begin.record()
            graph.replay()
            end.record()
        stream.synchronize()
        median = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        del graph
    return median * 1e3 / (rounds * len(calls))


def _captured(
    calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream
) -> tuple[int, float, torch.cuda.CUDAGraph]:
    """(rounds of calls, microseconds, graph) of a replay. How long a call takes is known from replays alone: to launch
    a small one takes the host longer."""
    most = max(1, MOST_CALLS // len(calls))
    rounds, wanted = 0, 1
    while 4 * wanted > 5 * rounds:
        rounds = wanted
        graph = torch.cuda.CUDAGraph()
        with streams.garbage_kept(), torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        one = _elapsed_us(graph.replay)
        wanted = min(most, math.ceil(rounds * GRAPH_US / one))
    return rounds, one, graph


def _elapsed_us(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return max(begin.elapsed_time(end) * 1e3, 1e-3)


def rotations(footprint: int, *, most: int = 64) -> int:
    """How many input sets of ``footprint`` bytes make three times the L2, so that none is found there."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(most, math.ceil(3 * cache / max(footprint, 1))))


def floor_us(work: roofline.Work) -> float | None:
    """Microseconds below which no implementation gets on this GPU; None for a GPU that was not measured."""
    gpu = roofline.gpu_named(torch.cuda.get_device_name())
    if gpu is None or not gpu.measured:
        return None
    return max(roofline.floors(work, gpu)[1:3])
