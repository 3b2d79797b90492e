"""A scheduler's own work on the host, beside what it launches; and what batch-invariant loops cost."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.loops import BLOCK, four_layers, model_of, state_of, wall_us
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import Batching, DecodeGraph, Model, Sampling
from sparse_attn.generation import scheduler as scheduling
from sparse_attn.models.deepseek_v32 import allocate_caches
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, deepseek_v4_flash, tiny_v4

PIECE, MAX_ROWS = 8, 64
INVARIANT_ROWS = (1, 8, 64)


@suite("arrivals")
def arrivals(run: Run) -> Iterator[Record]:
    "Host time of a scheduler: an arrival until its row is live; its tokens and its end; a replay."
    v32 = four_layers(run)
    v4 = tiny_v4()
    kinds = deepseek_v4_flash().layer_kinds
    if not run.dry:  # the caches of all layers, small: their number is what the host sees
        v4 = dataclasses.replace(v4, num_layers=len(kinds), layer_kinds=kinds, hash_layers=(False,) * len(kinds))
    for title, model in (
        ("V3.2, 4 layers", model_of(v32, run.device)),
        (f"V4, {v4.num_layers} layers", Model(v4, random_params(v4, 0, run.device), cache_layouts(v4, "fp8"))),
    ):
        for options in run.pick([{}, dict(penalties=True, logprobs=True)], [dict(penalties=True, logprobs=True)]):
            yield from _measured(run, title + (", penalties, logprobs" if options else ""), model, options)


def _measured(run: Run, title: str, model: Model, options: dict[str, Any]) -> Iterator[Record]:
    """Three records, each with its parts in its name.

    an arrival: the bookkeeping of a request until its row is live: submit, what is done in steps (admit, keep, and
    begin, of which start is a part), and settle, which writes the row. Beside it runs prefill, which is not counted.
    its tokens and its end: asking for decode steps (decode), handing out the tokens (deliver), and letting go of the
    request (sweep, and free in either). a replay: a decode step of 8 rows; of it launches.
    """
    length, common = run.pick((512, 256), (40, 16))
    windowed = isinstance(model.spec, CompressedSpec)
    count = run.pick(8 if windowed else 30, 1)  # a prompt through V4's layers takes half a second
    scheduler = Batching(
        model, rows=8, num_blocks=run.pick(256, 64), max_context=run.pick(1024, 96), snapshots=8,
        block_size=128 if windowed else run.pick(BLOCK, 8), prefill_tokens=length, piece=PIECE, graph=not run.dry,
        **options,
    )  # fmt: skip
    spent: defaultdict[str, float] = defaultdict(float)
    begins, ends = ("admit", "keep", "start", "begin"), ("decode", "deliver", "sweep", "free")
    held = {name: getattr(scheduler.admission, name, None) or getattr(scheduler, "_" + name) for name in begins + ends}
    # the log-probability of what a step draws is the step's own, as its draw is
    with (
        mock.patch.object(scheduling, "prefill_step", _timed(spent, "prefill", scheduling.prefill_step)),
        mock.patch.object(scheduling, "token_logprobs", _timed(spent, "prefill", scheduling.token_logprobs)),
    ):
        loop: Any = scheduler.loop
        loop.run, loop._settle = _launches_of(spent, loop.run), _timed(spent, "settle", loop._settle)
        for name, method in held.items():
            setattr(method.__self__, method.__name__, _timed(spent, name, method))
        draw = random.Random(0)
        prefix = [draw.randrange(256) for _ in range(common)]
        found = []
        for _ in range(count + run.pick(3, 0)):
            prompt = prefix + [draw.randrange(256) for _ in range(length - common)]
            spent.clear()
            host = _one(run, scheduler, prompt, spent)
            end = spent["decode"] + spent["deliver"] + spent["sweep"]
            found.append({"arrival": host - spent["prefill"] - spent["run"] - end, "end": end, **spent})
        parts = {name: 1e6 * statistics.median(one.get(name, 0.0) for one in found[-count:]) for name in found[-1]}
        own, launches = _without_arrivals(run, scheduler, spent, run.pick(60, 1))
        said = [f"{name} {parts[name]:.0f}" for name in ("submit", *begins, "settle", "prefill", *ends)]
        yield Record(f"{title}: an arrival ({', '.join(said[: -len(ends)])})", parts["arrival"])
        yield Record(f"{title}: its {PIECE + 1} tokens and its end ({', '.join(said[-len(ends) :])})", parts["end"])
        yield Record(f"{title}: a replay, 8 rows", own + launches, "of it launches", launches)


def _one(run: Run, scheduler: Batching, prompt: list[int], spent: defaultdict[str, float]) -> float:
    """Host seconds of a request that takes one prefill step and one piece of decode steps; the device is idle
    between, and an operation that waits for it is an error."""
    sampling, begin = Sampling(temperature=0.8, top_k=20), time.perf_counter()
    scheduler.submit(prompt, max_new_tokens=PIECE + 1, sampling=sampling, seed=3)
    host = spent["submit"] = time.perf_counter() - begin
    while not scheduler.idle:
        host += _unwaiting(run, scheduler.step)
    return host


def _without_arrivals(
    run: Run, scheduler: Batching, spent: defaultdict[str, float], pieces: int
) -> tuple[float, float]:
    """Microseconds a replay of the scheduler's own work, and of its launches, while 8 rows decode."""
    for row in range(run.pick(8, 1)):
        scheduler.submit([row + 1, 2], max_new_tokens=run.pick(900, 8), sampling=Sampling(temperature=0.8))
    for _ in range(run.pick(12, 1)):
        _unwaiting(run, scheduler.step)
    spent.clear()
    host, before = 0.0, scheduler.loop._taken
    for _ in range(pieces):
        host += _unwaiting(run, scheduler.step)
    steps = max(1, scheduler.loop._taken - before)
    for number in list(scheduler._unfinished):
        scheduler.cancel(number)
    scheduler.drain()
    return 1e6 * (host - spent["run"]) / steps, 1e6 * spent["run"] / steps


def _unwaiting(run: Run, work: Callable[[], object]) -> float:
    """Host seconds of ``work``, behind which the device is waited for."""
    if not run.dry:
        torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    try:
        work()
    finally:
        took = time.perf_counter() - begin
        if not run.dry:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    return took


def _launches_of(spent: defaultdict[str, float], run: Callable[[int], Any]) -> Callable[[int], Any]:
    """``run`` timed without what it settles first, which is of arrivals; and as no part of "decode", which asks."""

    def launches(steps: int) -> Any:
        settled, begin = spent["settle"], time.perf_counter()
        stream = run(steps)
        took = time.perf_counter() - begin
        spent["run"] += took - (spent["settle"] - settled)
        spent["decode"] -= took
        return stream

    return launches


def _timed(spent: defaultdict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] += time.perf_counter() - begin

    return timed


@suite("loop_invariant")
def loop_invariant(run: Run) -> Iterator[Record]:
    "A captured step of a loop of 64 rows with batch_invariant (us) beside the default (peer_us), few rows live."
    spec = four_layers(run)
    context, steps = run.pick(8192, 128), run.pick(50, 2)
    width = context // BLOCK
    if run.dry:
        yield Record("1 row", 0.0)
        return
    model = model_of(spec, run.device)
    caches = allocate_caches(spec, model.layouts, MAX_ROWS * width, BLOCK, run.device)
    loops = []
    for invariant in (True, False):
        buckets = (MAX_ROWS,) if invariant else INVARIANT_ROWS
        own = model.invariant() if invariant else model
        loops.append(
            DecodeGraph(own, caches, max_context=context, max_blocks=width, buckets=buckets, batch_invariant=invariant)
        )
    for rows in INVARIANT_ROWS:
        state = state_of(rows, context // 2, width, run.device)
        times = []
        for loop in loops:
            loop.load(state.tokens, state.seq_lens, state.block_table)
            times.append(wall_us(lambda loop=loop: loop.run(steps), steps))
        yield Record(f"V3.2 dims, 4 layers, {rows} of {MAX_ROWS} rows", times[0], "default", times[1])
