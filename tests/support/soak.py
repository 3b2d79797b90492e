"""A scheduler under random load: arrivals, lengths, cancellations, preemptions and shared prefixes.

Every so many decode steps some are taken eagerly as well, from copies of the state and the caches, and must draw the
same tokens, give them the same log-probabilities and write the same bytes. The books are checked after every call.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.batching import ids
from support.ledger import check_ledger

from sparse_attn import Batching, Sampling, workspace
from sparse_attn.generation.steps import Decode, decode_step
from sparse_attn.generation.stream import TokenStream
from sparse_attn.ops.layers.sampling import token_logprobs


class Soak:
    """``batching`` under load, compared every ``every`` decode steps. steps: taken so far. compared: those taken
    eagerly, too. spent: seconds by what took them."""

    def __init__(self, batching: Batching, seed: int, every: int):
        self.batching, self.random, self.every = batching, random.Random(seed), every
        self.steps = self.compared = self.calls = 0
        self.asked: dict[int, dict[str, Any]] = {}
        self.finished: dict[int, Any] = {}
        self.spent: Counter[str] = Counter()
        self._common, self._next, self._piece = ids(40, 1), 0, batching.piece
        self._run, batching.loop.run = batching.loop.run, self._checked_run
        self._prefill, batching._prefill = batching._prefill, self._timed_prefill

    def until(self, steps: int) -> None:
        """Submit, cancel and step until ``steps`` decode steps were taken, then until all is finished."""
        while self.steps < steps:
            if self.steps >= self._next or self.batching.idle:
                self._submit()
                self._next = self.steps + self.random.randint(1, 24)
            self._step()
        while not self.batching.idle:
            self._step()

    def summary(self) -> dict[str, Any]:
        counts, reasons = self.batching.occupancy(), Counter(one.reason for one in self.finished.values())
        own = self.spent["calls"] - sum(self.spent[part] for part in ("replays", "comparisons", "prefill"))
        seconds = {name: round(value, 2) for name, value in (self.spent | Counter(bookkeeping=own)).items()}
        del seconds["calls"]
        return dict(
            steps=self.steps, compared=self.compared, calls=self.calls, requests=dict(reasons), tokens=counts.tokens,
            preempted=counts.preempted, reused=counts.reused, seconds=seconds,
        )  # fmt: skip

    def _submit(self) -> None:
        draw = self.random
        if self.batching.occupancy().waiting > 8:
            return
        prompt = self._common[: draw.choice((0, 0, 8, 16, 24, 40))] + ids(draw.randint(1, 24), draw.randrange(50))
        sampling = Sampling(
            draw.choice((0.0, 0.8)), top_k=draw.choice((0, 20)), presence=draw.choice((0.0, 0.4)), stop_ids=(1, 2)
        )
        asked = dict(prompt=prompt, max_new_tokens=draw.randint(1, 120), seed=draw.randrange(9), sampling=sampling)
        self.asked[self.batching.submit(**asked)] = asked
        if draw.random() < 0.1:
            self.batching.cancel(draw.choice(list(self.batching._unfinished)))

    def _step(self) -> None:
        before = self.steps, len(self.finished)
        near = self.steps % self.every >= self.every - self._piece  # what is compared is a step alone
        self.batching.piece = 1 if near else self._piece
        with self._timed("calls"), waiting("error"):
            for one in self.batching.step():
                assert one.request not in self.finished
                self.finished[one.request] = one
        with self._timed("ledger"):
            check_ledger(self.batching)
        self.calls += 1
        if before == (self.steps, len(self.finished)):
            with self._timed("idle"):
                time.sleep(50e-6)

    def _checked_run(self, steps: int) -> TokenStream:
        due = (self.steps + steps) // self.every > self.steps // self.every
        self.steps += steps
        if not due:
            with self._timed("replays"):
                return self._run(steps)
        with self._timed("comparisons"), waiting("default"):
            loop = self.batching.loop
            copies = copied(loop.state), copied(self.batching.caches)
            stream = self._run(steps)
            compare(self.batching, copies, stream)
        self.compared += steps
        return stream

    def _timed_prefill(self, unfinished: int) -> None:
        with self._timed("prefill"):
            self._prefill(unfinished)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent[what] += time.perf_counter() - begin


@contextmanager
def waiting(mode: str) -> Iterator[None]:
    """What an operation that waits for a GPU is, for torch: "default", or "error"."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def copied(value: Any) -> Any:
    """A copy of every tensor of nested tuples."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format)
    if not isinstance(value, tuple):
        return value
    parts = [copied(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def compare(batching: Batching, copies: tuple[Decode, Any], stream: TokenStream) -> None:
    """Take the steps of ``stream`` eagerly, from ``copies`` of what they began with."""
    (state, caches), model, loop = copies, batching.model, batching.loop
    tokens = stream.wait()
    stream.arrived()
    with workspace.use(workspace.Workspace((0, 0), model.device)):
        for number in range(len(stream)):
            live = (state.seq_lens > 0).cpu()[: tokens.shape[1]]
            logits = decode_step(model, caches, state, Sampling(), loop.max_context)
            mine, scores = stream.step(number)
            assert torch.equal(mine[live], state.tokens.cpu()[: len(live)][live])
            if scores is not None:
                want = token_logprobs(logits, state.tokens).drawn.cpu()[: len(live)]
                assert torch.equal(scores[live], want[live])
    assert torch.equal(loop.state.seq_lens, state.seq_lens)
    for layers, others in zip(batching.caches, caches):
        for cache, other in zip(layers, others):
            assert cache is None or torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
