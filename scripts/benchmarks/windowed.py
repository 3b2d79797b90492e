"""Attention over a window and compressed entries, as DeepSeek-V4 has it: a kernel, a layer, two forms of prefill."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_attention, check_selection, sampled
from benchmarks.decode import FEW_HEADS, REQUESTS, compare_sets
from benchmarks.inputs import (
    BLOCK,
    INDEX_LAYOUT,
    MXFP4_LAYOUT,
    decode_index,
    distinct_rows,
    filled_cache,
    mxfp4_query,
    normal,
    packed,
)
from benchmarks.peers import TOP_K_SCRATCH, padded_heads
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run, total
from sparse_attn import roofline
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlanarFp8Layout
from sparse_attn.ops.attention.kv_cache import gather_kv_cache
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.ragged.lists import (
    combine_topk_swa_indices_ragged,
    compute_global_topk_ragged_indices_and_indptr,
    window_indices,
)
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT

LAYOUT = PlanarFp8Layout(448, 64)
DIM, RING, RATIO = LAYOUT.dim, 256, 4
SCALE = DIM**-0.5
PEER = "DeepGEMM+vLLM+FlashMLA"


class Case(NamedTuple):
    heads: int
    top_k: int
    s_q: int
    requests: int


class Caches(NamedTuple):
    """Rings of RING raw keys each, and stretches of entries; a request owns one of either."""

    rings: torch.Tensor
    entries: torch.Tensor
    stretch: int
    window: int

    @property
    def owners(self) -> int:
        return self.rings.shape[0] * BLOCK // RING


def _caches(run: Run) -> Caches:
    owners, stretches, stretch, window = run.pick((1024, 128, 16384, 128), (4, 2, 256, 16))
    rings, entries = (filled_cache(LAYOUT, n // BLOCK, run.device) for n in (owners * RING, stretches * stretch))
    return Caches(rings, entries, stretch, window)


@suite("decode_v4")
def decode_v4(run: Run) -> Iterator[Record]:
    "sparse_attn_decode over two 584-byte fp8 caches, window 128 and top-k 512 or 1024, with a sink: DeepSeek-V4."
    full = [Case(h, k, s_q, b) for h, k in ((64, 512), (128, 1024)) for s_q in (1, 2) for b in (1, 8, 32, 64, 128)]
    full += [Case(64, 1024, 1, 64), Case(128, 512, 1, 64)]
    yield from decode_cases(run, run.pick(full, [Case(4, 64, 1, 3), Case(4, 64, 2, 2)]))


def few_heads(run: Run) -> Iterator[Record]:
    """The part of decode_few_heads that reads two caches."""
    full = [Case(heads, 512, 1, requests) for heads in FEW_HEADS for requests in REQUESTS] + [Case(16, 1024, 1, 64)]
    yield from decode_cases(run, run.pick(full, [Case(3, 64, 1, 3)]))


def decode_cases(run: Run, cases: list[Case]) -> Iterator[Record]:
    caches = _caches(run)
    for case in cases:
        yield _decode(run, caches, case)


def _decode(run: Run, caches: Caches, case: Case) -> Record:
    heads, top_k, s_q, requests = case
    tokens, window = requests * s_q, caches.window
    sets = run.sets(tokens * (window + top_k) * LAYOUT.row + 4 * tokens * heads * DIM)
    q = normal(sets, requests, s_q, heads, DIM, device=run.device)
    sink = torch.randn(heads, dtype=torch.float32, device=run.device)
    owner = torch.arange(sets * requests, device=run.device).view(sets, requests, 1, 1)
    first = torch.randint(0, RING - window, (sets, requests, s_q, 1), device=run.device)
    near = (owner % caches.owners * RING + first + torch.arange(window, device=run.device)).int().contiguous()
    stretches = caches.entries.shape[0] * BLOCK // caches.stretch
    far = distinct_rows(sets * tokens, caches.stretch, top_k, run.device).view(sets, requests, s_q, top_k)
    far += (owner % stretches * caches.stretch).int()
    ragged = [(packed(a.flatten(0, 1)), packed(b.flatten(0, 1))) for a, b in zip(near, far)]
    options = dict(scale=SCALE, layout=LAYOUT, extra_cache=caches.entries, extra_layout=LAYOUT, sink=sink)

    def ours(index, q):
        return sparse_attn_decode(q, caches.rings, ragged[index][0], extra_ragged=ragged[index][1], **options)

    def reference(q, rows):
        some, more = (packed(part[0].flatten(0, 1)[rows]) for part in (near, far))
        return sparse_attn_decode(q[rows], caches.rings, some, extra_ragged=more, **options, impl="reference")

    peer = None
    if run.peers is not None:
        peers, plan, their_sink = run.peers, run.peers.decode_plan(), padded_heads(sink, dim=0)

        def peer(index, q):
            pair = caches.entries, far[index]
            return peers.decode(q, caches.rings, near[index], plan, SCALE, their_sink, *pair), None

    keys = int(near[0].unique().numel() + far[0].unique().numel())
    pairs = tokens * (window + top_k)
    return compare_sets(
        run, f"heads {heads}, top-k {window}+{top_k}, requests {requests}, s_q {s_q}", q, ours, reference,
        "FlashMLA decode", peer, run.floor(roofline.attention((tokens, heads, DIM), DIM, pairs, keys * LAYOUT.row)),
    )  # fmt: skip


@suite("layer_v4")
def layer_v4(run: Run) -> Iterator[Record]:
    "Decode step of a ratio-4 layer: index_topk_decode_slots over context / 4 entries, sparse_attn_decode; fp8 caches."
    yield from _layers(run, INDEX_LAYOUT)


@suite("layer_v4_mxfp4")
def layer_v4_mxfp4(run: Run) -> Iterator[Record]:
    "The same with MXFP4 index keys and queries; the peers' are fp8."
    yield from _layers(run, MXFP4_LAYOUT)


def _layers(run: Run, layout: IndexFp8Layout | IndexMxfp4Layout) -> Iterator[Record]:
    pool = run.pick(64 * 131072 // RATIO // BLOCK, 32)
    index_cache = filled_cache(layout, pool, run.device)
    theirs = (
        index_cache if layout == INDEX_LAYOUT or run.peers is None else filled_cache(INDEX_LAYOUT, pool, run.device)
    )
    caches = _caches(run)
    full = [
        (heads, top_k, requests, context)
        for heads, top_k in ((64, 512), (128, 1024))
        for requests, context in ((1, 32768), (1, 131072), (8, 131072), (64, 32768), (64, 131072))
    ]
    for heads, top_k, requests, context in run.pick(full, [(4, 32, 3, 512)]):
        yield _layer(run, layout, index_cache, theirs, caches, heads, top_k, requests, context)


def _layer(run, layout, index_cache, their_index_cache, caches, heads, top_k, requests, context) -> Record:
    """layout: of our index cache; the peers' has fp8 keys, the same ones where ours has."""
    entries, index_heads = context // RATIO, run.pick(64, 4)
    sets = run.sets(requests * entries * (layout.row + 4), most=8)
    blocks = min(index_cache.shape[0], caches.entries.shape[0])
    inputs = decode_index(sets, requests, 1, entries, blocks, index_heads, run.device)
    fp8 = layout == INDEX_LAYOUT
    index_q = inputs.q.view(torch.uint8) if fp8 else mxfp4_query(sets, requests, 1, index_heads, device=run.device)
    q = normal(sets, requests, heads, DIM, device=run.device)
    sink = torch.randn(heads, dtype=torch.float32, device=run.device)
    request_ids = torch.arange(requests, dtype=torch.int32, device=run.device)
    rings = (torch.arange(requests * RING // BLOCK, device=run.device, dtype=torch.int32)).view(requests, -1)
    positions = torch.full((requests,), context - 1, dtype=torch.int32, device=run.device)
    seen = window_indices(positions, request_ids, rings, BLOCK, caches.window)  # once per step, for all layers
    near = seen.indices.view(requests, 1, caches.window)
    options = dict(scale=SCALE, layout=LAYOUT, extra_cache=caches.entries, extra_layout=LAYOUT, sink=sink)

    def select(index, some=slice(None), impl="auto", op=index_topk_decode):
        return op(
            index_q[index][some], inputs.weights[index][some], index_cache,
            inputs.context_lens[some], inputs.tables[index][some], top_k, entries, layout, impl=impl,
        )  # fmt: skip

    def ours(index, q):
        far = select(index, op=index_topk_decode_slots)
        return sparse_attn_decode(q, caches.rings, seen, extra_ragged=far, **options)

    def reference(chosen, q, rows):
        local = chosen[rows].long()
        slots = inputs.tables[0][rows].gather(1, local // BLOCK) * BLOCK + local % BLOCK
        some = packed(near.squeeze(1)[rows])
        far = packed(slots.to(torch.int32))
        return sparse_attn_decode(q[rows], caches.rings, some, extra_ragged=far, **options, impl="reference")

    few = sampled(requests, 2, run.device)
    chosen = select(0)
    check_selection(chosen[few], select(0, few, "reference"), "selection")
    their_select = their_attend = None
    if run.peers is not None:
        peers = run.peers
        plan, attention_plan = peers.paged_plan(inputs.context_lens, BLOCK), peers.decode_plan()
        ends = inputs.context_lens.flatten()
        out = torch.empty(requests, top_k, dtype=torch.int32, device=run.device)
        scratch = torch.zeros(TOP_K_SCRATCH, dtype=torch.uint8, device=run.device)

        def their_select(index):
            out.fill_(-1)
            logits = peers.paged_scores(
                inputs.q[index], their_index_cache, inputs.weights[index], inputs.context_lens, inputs.tables[index],
                plan, entries,
            )  # fmt: skip
            return peers.top_k_decode(logits, ends, out, scratch)

        def their_attend(index, chosen, q):
            far = peers.slots(request_ids, inputs.tables[index], chosen, BLOCK).unsqueeze(1)
            return peers.decode(q.unsqueeze(1), caches.rings, near, attention_plan, SCALE, sink, caches.entries, far)

        if fp8:
            check_selection(chosen, their_select(0), "selection beside the peer's")
    check_attention(
        q[0],
        functools.partial(ours, 0),
        functools.partial(reference, chosen),
        their_attend and (lambda q: (their_attend(0, chosen, q), None)),
        (DECODE_OUT, DECODE_LSE),
    )
    keys, scored = requests * (caches.window + top_k), requests * entries
    floor = total(
        run.floor(roofline.selected_scores(inputs.q[0].shape, scored, scored * layout.row, 0)),
        run.floor(roofline.attention((requests, heads, DIM), DIM, keys, keys * LAYOUT.row, listed=False)),
    )
    return run.compare(
        f"heads {heads}, top-k {caches.window}+{top_k}, requests {requests}, context {context}",
        [lambda at=at: ours(at, q[at]) for at in range(sets)],
        PEER,
        their_attend and [lambda at=at: their_attend(at, their_select(at), q[at]) for at in range(sets)],
        floor,
        target_ms=60,
    )


@suite("prefill_forms")
def prefill_forms(run: Run) -> Iterator[Record]:
    "Prefill rows of a ratio-4 layer from paged fp8 caches: gathered into one matrix (us) or in place (peer_us)."
    caches = _caches(run)
    full = [(64, 512, 4096, 32768), (128, 1024, 4096, 131072), (64, 512, 256, 131072), (64, 512, 16, 131072)]
    for heads, top_k, tokens, context in run.pick(full, [(4, 32, 5, 512)]):
        yield _prefill(run, caches, heads, top_k, tokens, context)


def _prefill(run, caches, heads, top_k, tokens, context) -> Record:
    entries, window = context // RATIO, caches.window
    q = normal(tokens, heads, DIM, device=run.device)
    sink = torch.randn(heads, dtype=torch.float32, device=run.device)
    topk = distinct_rows(tokens, entries, top_k, run.device)
    positions = torch.arange(context - tokens, context, dtype=torch.int32, device=run.device)
    request_ids = torch.zeros_like(positions)
    span = tokens + window - 1
    table = torch.arange(entries // BLOCK, dtype=torch.int32, device=run.device).unsqueeze(0)
    ring = torch.arange(-(-span // BLOCK) + 1, dtype=torch.int32, device=run.device).unsqueeze(0)
    one = torch.ones(1, dtype=torch.int32, device=run.device)
    indptr, window_indptr = (torch.cat([0 * one, one * n]) for n in (entries, span))
    starts = one * (context - span)
    zero = torch.zeros_like(positions)
    limits, offsets = zero + entries, zero + entries - (context - span)

    def gathered():
        pooled = gather_kv_cache(caches.entries, table, indptr, entries, LAYOUT)
        raw = gather_kv_cache(caches.rings, ring, window_indptr, span, LAYOUT, starts=starts)
        rows = combine_topk_swa_indices_ragged(
            topk, limits, positions, zero, offsets, window=window, max_entries=0, num_rows=entries + span
        )
        return sparse_attn_prefill(q, torch.cat([pooled, raw]), rows, scale=SCALE, d_v=DIM, sink=sink)

    def in_place():
        near = window_indices(positions, request_ids, ring, BLOCK, window)
        far = compute_global_topk_ragged_indices_and_indptr(topk, request_ids, table, BLOCK)
        return sparse_attn_decode(
            q, caches.rings, near, scale=SCALE, layout=LAYOUT, extra_cache=caches.entries, extra_ragged=far,
            extra_layout=LAYOUT, sink=sink,
        )  # fmt: skip

    a, b = gathered(), in_place()
    torch.testing.assert_close(a.out, b.out, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-3, atol=1e-3)
    keys = tokens * (window + top_k)
    floor = run.floor(roofline.attention((tokens, heads, DIM), DIM, keys, (entries + span) * LAYOUT.row, listed=False))
    case = f"heads {heads}, top-k {window}+{top_k}, tokens {tokens}, context {context}"
    return run.compare(case, [gathered], "in place", None if run.dry else [in_place], floor)
