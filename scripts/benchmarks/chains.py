"""The sparse part of one DeepSeek-V3.2 layer in one CUDA graph, beside the chain vLLM runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_attention, check_selection, sampled
from benchmarks.inputs import (
    BLOCK,
    D_QK,
    D_V,
    INDEX_DIM,
    INDEX_LAYOUT,
    LATENT_LAYOUT,
    decode_index,
    filled_cache,
    normal,
    packed,
    prefill_index,
)
from benchmarks.peers import TOP_K_SCRATCH
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run, total
from sparse_attn import roofline
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_decode_slots, index_topk_prefill
from sparse_attn.testing.compare import DECODE_LSE, DECODE_OUT, PREFILL_LSE, PREFILL_OUT

PEER = "DeepGEMM+vLLM+FlashMLA"
SCALE = D_QK**-0.5


class Sizes(NamedTuple):
    index_heads: int
    heads: int
    top_k: int


FULL, TINY = Sizes(64, 128, 2048), Sizes(4, 4, 128)


@suite("layer_v32")
def layer_v32(run: Run) -> Iterator[Record]:
    "A decode step's index_topk_decode_slots and sparse_attn_decode; fp8 caches."
    pool = run.pick(64 * 131072 // BLOCK, 32)
    index_cache, cache = (filled_cache(layout, pool, run.device) for layout in (INDEX_LAYOUT, LATENT_LAYOUT))
    full = [(64, 32768), (64, 131072), (1, 32768), (1, 131072), (8, 32768), (8, 131072), (32, 32768)]
    for requests, context in run.pick(full, [(3, 256)]):
        yield _layer(run, index_cache, cache, requests, context)


def _layer(run: Run, index_cache: torch.Tensor, cache: torch.Tensor, requests: int, context: int) -> Record:
    index_heads, heads, top_k = run.pick(FULL, TINY)
    sets = run.sets(requests * context * (INDEX_LAYOUT.row + 4), most=8)
    inputs = decode_index(sets, requests, 1, context, cache.shape[0], index_heads, run.device)
    q = normal(sets, requests, heads, D_QK, device=run.device)
    request_ids = torch.arange(requests, dtype=torch.int32, device=run.device)

    def select(index, some=slice(None), impl="auto", op=index_topk_decode):
        return op(
            inputs.q[index].view(torch.uint8)[some], inputs.weights[index][some], index_cache,
            inputs.context_lens[some], inputs.tables[index][some], top_k, context, INDEX_LAYOUT, impl=impl,
        )  # fmt: skip

    def ours(index, q):
        slots = select(index, op=index_topk_decode_slots)
        return sparse_attn_decode(q, cache, slots, scale=SCALE, layout=LATENT_LAYOUT)

    def reference(chosen, q, rows):
        positions = chosen[rows].long()
        slots = inputs.tables[0][rows].gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
        ragged = packed(slots.to(torch.int32))
        return sparse_attn_decode(q[rows], cache, ragged, scale=SCALE, layout=LATENT_LAYOUT, impl="reference")

    few = sampled(requests, 2, run.device)
    chosen = select(0)
    check_selection(chosen[few], select(0, few, "reference"), "selection")
    their_select = their_attend = None
    if run.peers is not None:
        shape = (requests, top_k, context)
        their_select, their_attend = _peer_layer(run, inputs, index_cache, cache, request_ids, *shape)
        check_selection(chosen, their_select(0), "selection beside the peer's")
    check_attention(
        q[0],
        functools.partial(ours, 0),
        functools.partial(reference, chosen),
        their_attend and (lambda q: (their_attend(0, chosen, q), None)),
        (DECODE_OUT, DECODE_LSE),
    )
    scored, attended = requests * context, requests * top_k
    floor = total(
        run.floor(roofline.selected_scores(inputs.q[0].shape, scored, scored * INDEX_LAYOUT.row, 0)),
        run.floor(roofline.attention(q[0].shape, D_V, attended, attended * LATENT_LAYOUT.row, listed=False)),
    )
    return run.compare(
        f"requests {requests}, context {context}",
        [lambda at=at: ours(at, q[at]) for at in range(sets)],
        PEER,
        their_attend and [lambda at=at: their_attend(at, their_select(at), q[at]) for at in range(sets)],
        floor,
        target_ms=60,
    )


def peer_select(run, inputs, index_cache, requests, top_k, context):
    """select(index) as vLLM 0.25 chains it: fill, scores, top-k; the plan is made once, outside."""
    peers, ends = run.peers, inputs.context_lens.flatten()
    plan = peers.paged_plan(inputs.context_lens, BLOCK)
    out = torch.empty(requests, top_k, dtype=torch.int32, device=run.device)
    scratch = torch.zeros(TOP_K_SCRATCH, dtype=torch.uint8, device=run.device)

    def select(index):
        out.fill_(-1)
        q, weights, table = inputs.q[index], inputs.weights[index], inputs.tables[index]
        logits = peers.paged_scores(q, index_cache, weights, inputs.context_lens, table, plan, context)
        return peers.top_k_decode(logits, ends, out, scratch)

    return select


def _peer_layer(run, inputs, index_cache, cache, request_ids, requests, top_k, context):
    """(select(index), attend(index, chosen, q)); attention's plan, too, is made once."""
    plan = run.peers.decode_plan()

    def attend(index, chosen, q):
        slots = run.peers.slots(request_ids, inputs.tables[index], chosen, BLOCK)
        return run.peers.decode(q.unsqueeze(1), cache, slots.unsqueeze(1), plan, SCALE)

    return peer_select(run, inputs, index_cache, requests, top_k, context), attend


@suite("prefill_chain")
def prefill_chain(run: Run) -> Iterator[Record]:
    "A 4096-token chunk's index_topk_prefill, ragged indices and sparse_attn_prefill; gathered fp8 keys, bf16 latents."
    for tokens, context in run.pick([(4096, 8192), (4096, 32768), (4096, 131072)], [(5, 200)]):
        yield _chunk(run, tokens, context)


def _chunk(run: Run, tokens: int, context: int) -> Record:
    index_heads, heads, top_k = run.pick(FULL, TINY)
    inputs = prefill_index(tokens, context, index_heads, run.device)
    kv = normal(context, D_QK, device=run.device)
    q = normal(tokens, heads, D_QK, device=run.device)
    options = {"scale": SCALE, "d_v": D_V}

    def select(some=slice(None), impl="auto"):
        queries, keys, k_scale, weights, start, end = inputs
        queries, keys = queries.view(torch.uint8), keys.view(torch.uint8)
        return index_topk_prefill(queries[some], weights[some], keys, k_scale, start[some], end[some], top_k, impl=impl)

    def attend(chosen, q):
        ragged = build_ragged_indices_from_dense(chosen, num_rows=context, row_offsets=inputs.kv_start)
        return sparse_attn_prefill(q, kv, ragged, **options)

    def reference(chosen, q, rows):
        return sparse_attn_prefill(q[rows], kv, packed(chosen[rows]), **options, impl="reference")

    few = sampled(tokens, 8, run.device)
    chosen = select()
    check_selection(chosen[few], select(few, "reference"), "selection")
    their_select = their_attend = None
    if run.peers is not None:
        out = torch.empty(tokens, top_k, dtype=torch.int32, device=run.device)

        def their_select():
            out.fill_(-1)
            return run.peers.top_k_prefill(run.peers.scores(*inputs), inputs.kv_start, inputs.kv_end, out)

        def their_attend(chosen, q):
            return run.peers.sparse_prefill(q, kv, chosen, SCALE)

        check_selection(chosen, their_select(), "selection beside the peer's")
    check_attention(
        q,
        functools.partial(attend, chosen),
        functools.partial(reference, chosen),
        their_attend and functools.partial(their_attend, chosen),
        (PREFILL_OUT, PREFILL_LSE),
    )
    pairs = int((inputs.kv_end - inputs.kv_start).sum())
    floor = total(
        run.floor(roofline.selected_scores(inputs.q.shape, pairs, context * (INDEX_DIM + 4), 0)),
        run.floor(roofline.attention(q.shape, D_V, tokens * top_k, kv.nbytes, listed=False)),
    )
    return run.compare(
        f"tokens {tokens}, context {context}",
        [lambda: attend(select(), q)],
        PEER,
        their_attend and [lambda: their_attend(their_select(), q)],
        floor,
        target_ms=150,
    )
