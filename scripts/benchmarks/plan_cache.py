"""What the host pays for a step's metadata: a planner's hit, its miss, and the device op fed from the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn.generation.plan_cache import HostPlanner
from sparse_attn.ops.ragged.step_plans import build_step_plan

MAX_BLOCKS, MAX_CONTEXT, KV_CAPACITY = 512, 1 << 17, 1 << 17
# decode requests, then tokens of each prefill request
CASES = ((1, ()), (8, ()), (128, ()), (0, (1024,) * 4), (64, (2048, 1000)))


@suite("plan_cache")
def plan_cache(run: Run) -> Iterator[Record]:
    "Host microseconds to plan a step from CPU lengths: hit, against a miss and against build_step_plan and its copies."
    for decodes, prompts in run.pick(CASES, ((2, (5,)),)):
        queries = torch.tensor([0] + [1] * decodes + list(prompts), dtype=torch.int32, device="cpu")
        starts = queries.cumsum(0, dtype=torch.int32)
        lens = [
            torch.tensor([40000 + n] * decodes + [p + n for p in prompts], dtype=torch.int32, device="cpu")
            for n in (0, 1)
        ]
        if not run.dry:
            starts, lens = starts.pin_memory(), [x.pin_memory() for x in lens]
        requests, tokens = decodes + len(prompts), int(starts[-1])
        table = torch.zeros(requests, MAX_BLOCKS, dtype=torch.int32, device=run.device)
        slots = torch.arange(tokens, device=run.device)
        bounds = dict(max_context=MAX_CONTEXT, kv_capacity=KV_CAPACITY)
        planner = HostPlanner(
            max_requests=requests, max_tokens=tokens, max_blocks=MAX_BLOCKS, device=run.device, **bounds
        )
        turns = itertools.cycle(lens)

        def hit() -> None:
            planner.plan(starts, lens[0], table, slots, num_decodes=decodes)

        def miss() -> None:
            planner.plan(starts, next(turns), table, slots, num_decodes=decodes)

        def device_op() -> None:
            on_device = (x.to(run.device, non_blocking=True) for x in (starts, lens[0]))
            build_step_plan(*on_device, table, slots, num_decodes=decodes, **bounds)

        calls = hit, miss, device_op
        hit_us, miss_us, op_us = (run.time([call]) if run.dry else host_us(call) for call in calls)
        name = f"{decodes} decodes, {sum(prompts)} prompt tokens: hit"
        yield Record(f"{name} against miss", hit_us, peer="a miss", peer_us=miss_us)
        yield Record(f"{name} against op", hit_us, peer="the device op", peer_us=op_us)


def host_us(call: Callable[[], None], *, calls: int = 50, rounds: int = 15) -> float:
    """Median microseconds of host time per call, while the device has room for more work."""
    taken = []
    for _ in range(rounds):
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(taken)
