"""The indexer's fp8 scores, beside DeepGEMM's mqa_logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.checks import check_scores, sampled
from benchmarks.inputs import BLOCK, INDEX_DIM, INDEX_LAYOUT, decode_index, filled_cache, prefill_index
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.ops.indexer.scores import fp8_mqa_logits, fp8_paged_mqa_logits

HEADS, TINY_HEADS = 64, 4
CHECKED_ROWS = 32


@suite("prefill_scores")
def prefill_scores(run: Run) -> Iterator[Record]:
    "fp8_mqa_logits, 64 heads of 128: the last rows of a context over all of it, causal."
    full = [(rows, context) for rows in (2048, 4096) for context in (8192, 32768, 131072)]
    for rows, context in run.pick(full, [(5, 192)]):
        heads = run.pick(HEADS, TINY_HEADS)
        inputs = prefill_index(rows, context, heads, run.device)
        ours = functools.partial(fp8_mqa_logits, *inputs)
        theirs = run.peers and functools.partial(run.peers.scores, *inputs)

        some = sampled(rows, CHECKED_ROWS, run.device)
        start, end = inputs.kv_start[some], inputs.kv_end[some]
        got = ours()[some]
        q, k = inputs.q.view(torch.uint8)[some], inputs.k.view(torch.uint8)
        want = fp8_mqa_logits(q, k, inputs.k_scale, inputs.weights[some], start, end, impl="reference")
        check_scores(got, want, start, end)
        if theirs:
            check_scores(got, theirs()[some], start, end)

        pairs = int((inputs.kv_end - inputs.kv_start).sum())
        floor = run.floor(roofline.scores(inputs.q.shape, pairs, context * (INDEX_DIM + 4)))
        yield run.compare(
            f"rows {rows}, context {context}",
            [ours],
            "DeepGEMM mqa_logits",
            theirs and [theirs],
            floor,
            target_ms=20,
            rest_s=0.4,
        )


@suite("paged_scores")
def paged_scores(run: Run) -> Iterator[Record]:
    "fp8_paged_mqa_logits, 64 heads of 128, blocks of 64, L2-cold."
    pool = run.pick(128 * 131072 // BLOCK, 64)
    cache = filled_cache(INDEX_LAYOUT, pool, run.device)
    full = [(n, context, b) for n in (1, 2) for context in (4096, 32768, 131072) for b in (1, 8, 32, 64, 128)]
    for next_n, context, requests in run.pick(full, [(1, 128, 3), (2, 192, 2)]):
        yield _paged(run, cache, requests, next_n, context)


def _paged(run: Run, cache: torch.Tensor, requests: int, next_n: int, context: int) -> Record:
    heads = run.pick(HEADS, TINY_HEADS)
    cached = requests * context
    sets = run.sets(cached * (INDEX_LAYOUT.row + 4 * next_n))
    inputs = decode_index(sets, requests, next_n, context, cache.shape[0], heads, run.device)
    lengths = inputs.context_lens

    def ours(index):
        q, weights, table = inputs.q[index], inputs.weights[index], inputs.tables[index]
        return fp8_paged_mqa_logits(q, cache, weights, lengths, table, context, INDEX_LAYOUT)

    few = sampled(requests, 2, run.device)
    rows = (few.unsqueeze(1) * next_n + torch.arange(next_n, device=run.device)).flatten()
    want = fp8_paged_mqa_logits(
        inputs.q[0].view(torch.uint8)[few],
        cache,
        inputs.weights[0][rows],
        lengths[few],
        inputs.tables[0][few],
        context,
        INDEX_LAYOUT,
        impl="reference",
    )
    got, ends = ours(0), lengths.flatten()
    check_scores(got[rows], want, None, ends[rows])

    theirs = None
    if run.peers is not None:
        plan = run.peers.paged_plan(lengths, BLOCK)  # vLLM, too, plans once per step

        def theirs(index):
            q, weights, table = inputs.q[index], inputs.weights[index], inputs.tables[index]
            return run.peers.paged_scores(q, cache, weights, lengths, table, plan, context)

        rows = sampled(requests * next_n, CHECKED_ROWS, run.device)
        check_scores(got[rows], theirs(0)[rows], None, ends[rows])

    pairs = cached * next_n
    return run.compare(
        f"requests {requests}, next_n {next_n}, context {context}",
        [functools.partial(ours, index) for index in range(sets)],
        "DeepGEMM paged_mqa_logits",
        theirs and [functools.partial(theirs, index) for index in range(sets)],
        run.floor(roofline.scores(inputs.q[0].shape, pairs, cached * INDEX_LAYOUT.row)),
        target_ms=20,
    )
