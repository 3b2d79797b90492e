"""Attention under load: a second on end instead of a burst, and batches that grow by a request."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks import decode, prefill, windowed
from benchmarks.inputs import BLOCK, LATENT_LAYOUT, distinct_rows, filled_cache, normal, packed
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn.layout import Layout
from sparse_attn.ops.attention.sparse import sparse_attn_decode

SECOND = 1000.0  # ms
MOST = 133  # requests; one more than an H200 has multiprocessors


@suite("sustained")
def sustained(run: Run) -> Iterator[Record]:
    "Prefill and decode attention for a second on end, ours, then the peer's: clocks are what the power budget leaves."
    run = run._replace(sustained_ms=SECOND)
    for case in run.pick([prefill.V32[1], prefill.V4[1], prefill.RAGGED[0]], [prefill.Case(576, 4, 128, 300)]):
        record = prefill.measure(run, case)
        yield replace(record, case=f"prefill, {record.case}")
    latents = [decode.Case(128, 1, 64), decode.Case(64, 1, 8), decode.Case(16, 1, 64)]
    two = [windowed.Case(128, 1024, 1, 64)]
    for part in (
        decode.latent_cases(run, run.pick(latents, [decode.Case(4, 1, 3)])),
        windowed.decode_cases(run, run.pick(two, [windowed.Case(4, 64, 1, 3)])),
    ):
        yield from (replace(record, case=f"decode, {record.case}") for record in part)


@suite("decode_growth")
def decode_growth(run: Run) -> Iterator[Record]:
    "The largest step in time from a batch (peer_us) to one of a request more (us), of all batches up to 133."
    full = [(LATENT_LAYOUT, heads, 2048) for heads in (16, 64, 128)] + [(windowed.LAYOUT, 128, 1152)]
    for layout, heads, top_k in run.pick(full, [(LATENT_LAYOUT, 4, 64), (windowed.LAYOUT, 4, 64)]):
        yield _steepest(run, layout, heads, top_k, run.pick(MOST, 3))


class Batch(NamedTuple):
    """Input sets of a batch over one cache; a request's tokens lie in one of eight stretches."""

    q: torch.Tensor  # [sets, requests, heads, layout.dim]
    slots: torch.Tensor  # int32 [sets, requests, top_k]
    cache: torch.Tensor
    layout: Layout

    def calls(self, requests: int, **options):
        """A call per set, of the first ``requests``."""
        attend = functools.partial(sparse_attn_decode, scale=decode.SCALE, layout=self.layout, **options)
        rows = [packed(slots[:requests].contiguous()) for slots in self.slots]
        return [functools.partial(attend, q[:requests], self.cache, some) for q, some in zip(self.q, rows)]


def _batch(run: Run, layout: Layout, heads: int, top_k: int, most: int) -> Batch:
    stretch, sets = run.pick((32768, 3), (256, 1))
    cache = filled_cache(layout, 8 * stretch // BLOCK, run.device)
    slots = distinct_rows(sets * most, stretch, top_k, run.device).view(sets, most, top_k)
    slots += (torch.arange(most, device=run.device, dtype=torch.int32) % 8 * stretch).view(1, most, 1)
    return Batch(normal(sets, most, heads, layout.dim, device=run.device), slots, cache, layout)


def _steepest(run: Run, layout: Layout, heads: int, top_k: int, most: int) -> Record:
    batch = _batch(run, layout, heads, top_k, most)
    times = [run.time(batch.calls(requests), target_ms=6) for requests in range(1, most + 1)]
    name = f"{layout.name}, heads {heads}, top-k {top_k}"
    if run.dry:
        return Record(name, 0.0)
    before, after = max(zip(times, times[1:]), key=lambda step: step[1] / step[0])
    return Record(name, after, f"{times.index(before) + 1} requests", before)


@suite("decode_invariant")
def decode_invariant(run: Run) -> Iterator[Record]:
    "sparse_attn_decode with batch_invariant=True (us) beside the default (peer_us)."
    full = [(LATENT_LAYOUT, heads, 2048) for heads in (16, 128)] + [(windowed.LAYOUT, 128, 1152)]
    for layout, heads, top_k in run.pick(full, [(LATENT_LAYOUT, 4, 64)]):
        batch = _batch(run, layout, heads, top_k, run.pick(128, 3))
        for requests in run.pick(decode.REQUESTS, (2, 3)):
            name = f"{layout.name}, heads {heads}, requests {requests}"
            default = None if run.dry else batch.calls(requests)
            yield run.compare(name, batch.calls(requests, batch_invariant=True), "default", default, None)
