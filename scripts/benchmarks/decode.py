"""Sparse attention of a decode step over a paged cache, L2-cold, beside FlashMLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_attention
from benchmarks.inputs import BLOCK, D_QK, D_V, LATENT_LAYOUT, distinct_rows, filled_cache, normal, packed
from benchmarks.peers import own_heads, padded_heads
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.layout import Layout, PlainLayout
from sparse_attn.ops.attention.sparse import sparse_attn_decode
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT
from sparse_attn.types import AttentionOutput

SCALE = D_QK**-0.5
BF16_LAYOUT = PlainLayout("bf16", 512, 64)
REQUESTS = (1, 8, 32, 64, 128)
FEW_HEADS = (8, 16, 32)


class Case(NamedTuple):
    heads: int
    s_q: int
    requests: int


class Pool(NamedTuple):
    """A cache in which a request's tokens lie in a stretch of their own."""

    layout: Layout
    cache: torch.Tensor
    stretch: int  # tokens
    top_k: int

    @property
    def stretches(self) -> int:
        return self.cache.shape[0] * BLOCK // self.stretch


Attended = tuple[torch.Tensor, torch.Tensor | None]  # out, lse or None
# A peer's attention over one set: (q [requests, s_q, heads, D_QK], slots [requests, s_q, top_k]).
Peer = Callable[[torch.Tensor, torch.Tensor], Attended]


@suite("decode_v32")
def decode_v32(run: Run) -> Iterator[Record]:
    "sparse_attn_decode over the 656-byte fp8 cache, top-k 2048: DeepSeek-V3.2."
    full = [Case(heads, s_q, requests) for heads in (128, 64) for s_q in (1, 2) for requests in REQUESTS]
    yield from latent_cases(run, run.pick(full, [Case(4, 1, 3), Case(4, 2, 2)]))


def few_heads(run: Run) -> Iterator[Record]:
    """The part of decode_few_heads that reads latents."""
    full = [Case(heads, 1, requests) for heads in FEW_HEADS for requests in REQUESTS] + [Case(16, 2, 32)]
    yield from latent_cases(run, run.pick(full, [Case(3, 1, 3)]))


def latent_cases(run: Run, cases: list[Case]) -> Iterator[Record]:
    pool = _pool(run, LATENT_LAYOUT, 128)
    for case in cases:
        peer = None
        if run.peers is not None:
            plan = run.peers.decode_plan()  # filled by the check: vLLM, too, plans once per step
            peer = functools.partial(_fp8_peer, run, pool.cache, plan)
        yield _measure(run, pool, case, "FlashMLA decode", peer)


@suite("decode_bf16")
def decode_bf16(run: Run) -> Iterator[Record]:
    "sparse_attn_decode over a bf16 cache, top-k 2048; the peer is FlashMLA's prefill kernel, as vLLM calls it."
    pool = _pool(run, BF16_LAYOUT, 64)
    full = [Case(heads, 1, requests) for heads in (128, 64) for requests in REQUESTS]
    for case in run.pick(full, [Case(4, 1, 3)]):
        peer = run.peers and functools.partial(_bf16_peer, run, pool.cache)
        yield _measure(run, pool, case, "FlashMLA sparse_fwd", peer)


def _pool(run: Run, layout: Layout, stretches: int) -> Pool:
    stretch, stretches, top_k = run.pick((32768, stretches, 2048), (256, 4, 128))
    return Pool(layout, filled_cache(layout, stretches * stretch // BLOCK, run.device), stretch, top_k)


def _fp8_peer(run, cache, plan, q, slots):
    return run.peers.decode(q, cache, slots, plan, SCALE), None


def _bf16_peer(run, cache, q, slots):
    return run.peers.sparse_prefill(q.flatten(0, 1), cache.flatten(0, 1), slots.flatten(0, 1), SCALE)


def _measure(run: Run, pool: Pool, case: Case, peer_name: str, peer: Peer | None) -> Record:
    heads, s_q, requests = case
    tokens, top_k = requests * s_q, pool.top_k
    row_bytes = pool.layout.row * pool.cache.element_size()
    query_bytes = 2 * tokens * heads * (D_QK + D_V)
    sets = run.sets(tokens * top_k * row_bytes + query_bytes)
    q = normal(sets, requests, s_q, heads, D_QK, device=run.device)
    own = torch.arange(sets * requests, device=run.device, dtype=torch.int32) % pool.stretches * pool.stretch
    slots = distinct_rows(sets * tokens, pool.stretch, top_k, run.device).view(sets, requests, s_q, top_k)
    slots += own.view(sets, requests, 1, 1)
    ragged = [packed(one.flatten(0, 1)) for one in slots]

    def ours(index, q):
        return sparse_attn_decode(q, pool.cache, ragged[index], scale=SCALE, layout=pool.layout)

    def reference(q, rows):
        some = packed(slots[0].flatten(0, 1)[rows])
        return sparse_attn_decode(q[rows], pool.cache, some, scale=SCALE, layout=pool.layout, impl="reference")

    key_bytes = int(slots[0].unique().numel()) * row_bytes
    return compare_sets(
        run, f"heads {heads}, requests {requests}, s_q {s_q}", q, ours, reference, peer_name,
        peer and (lambda index, q: peer(q, slots[index])),
        run.floor(roofline.attention((tokens, heads, D_QK), D_V, tokens * top_k, key_bytes)),
    )  # fmt: skip


def compare_sets(
    run: Run,
    case: str,
    q: torch.Tensor,
    ours: Callable[[int, torch.Tensor], AttentionOutput],
    reference: Callable[[torch.Tensor, torch.Tensor], AttentionOutput],
    peer_name: str,
    peer: Callable[[int, torch.Tensor], Attended] | None,
    floor: float | None,
) -> Record:
    """Check the first set of a decode step and time all of them. q: [sets, requests, s_q, heads, dim].

    ours(set, q), reference(q, rows): of tokens' q [tokens, heads, dim]. peer(set, q): of requests' q, padded heads
    included.
    """
    sets, heads = q.shape[0], q.shape[3]
    rows = q.flatten(1, 2)
    check_attention(
        rows[0],
        functools.partial(ours, 0),
        reference,
        peer and (lambda some: own_heads(peer(0, padded_heads(some.view(q.shape[1:]))), heads)),
        (DECODE_OUT, DECODE_LSE),
    )
    their_q = peer and padded_heads(q)
    return run.compare(
        case,
        [functools.partial(ours, index, rows[index]) for index in range(sets)],
        peer_name,
        peer and [functools.partial(peer, index, their_q[index]) for index in range(sets)],
        floor,
    )
