"""The indexer's MXFP4 scores, beside our own fp8 scores of as many keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.checks import check_scores, sampled
from benchmarks.inputs import (
    BLOCK,
    INDEX_DIM,
    INDEX_LAYOUT,
    decode_index,
    filled_cache,
    mxfp4_query,
    prefill_index,
)
from benchmarks.inputs import MXFP4_LAYOUT as LAYOUT
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from benchmarks.scores import CHECKED_ROWS, HEADS, TINY_HEADS
from sparse_attn import roofline
from sparse_attn.mxfp4 import mxfp4_quantise
from sparse_attn.ops.indexer.scores import (
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    mxfp4_mqa_logits,
    mxfp4_paged_mqa_logits,
)

VALUE_BYTES = LAYOUT.row / INDEX_DIM
PEER = "our fp8 scores"


@suite("prefill_scores_mxfp4")
def prefill_scores_mxfp4(run: Run) -> Iterator[Record]:
    "mxfp4_mqa_logits, 64 heads of 128: the last rows of a context over all of it, causal; beside fp8_mqa_logits."
    full = [(rows, context) for rows in (2048, 4096) for context in (8192, 32768, 131072)]
    for rows, context in run.pick(full, [(5, 192)]):
        heads = run.pick(HEADS, TINY_HEADS)
        fp8 = prefill_index(rows, context, heads, run.device)
        q, weights, start, end = mxfp4_query(rows, heads, device=run.device), fp8.weights, fp8.kv_start, fp8.kv_end
        k, k_scale = mxfp4_quantise(torch.randn(context, INDEX_DIM, dtype=torch.float32, device=run.device))
        ours = functools.partial(mxfp4_mqa_logits, q, k, k_scale, weights, start, end)
        theirs = functools.partial(fp8_mqa_logits, *fp8)

        some = sampled(rows, CHECKED_ROWS, run.device)
        want = mxfp4_mqa_logits(q[some], k, k_scale, weights[some], start[some], end[some], impl="reference")
        check_scores(ours()[some], want, start[some], end[some])

        pairs = int((end - start).sum())
        floor = run.floor(roofline.scores((rows, heads, INDEX_DIM), pairs, context * LAYOUT.row, VALUE_BYTES))
        yield run.compare(f"rows {rows}, context {context}", [ours], PEER, [theirs], floor, target_ms=20, rest_s=0.4)


@suite("paged_scores_mxfp4")
def paged_scores_mxfp4(run: Run) -> Iterator[Record]:
    "mxfp4_paged_mqa_logits, 64 heads of 128, blocks of 64, L2-cold; beside fp8_paged_mqa_logits."
    pool = run.pick(128 * 131072 // BLOCK, 64)
    cache, fp8_cache = (filled_cache(layout, pool, run.device) for layout in (LAYOUT, INDEX_LAYOUT))
    full = [(n, context, b) for n in (1, 2) for context in (4096, 32768, 131072) for b in (1, 8, 32, 64, 128)]
    for next_n, context, requests in run.pick(full, [(1, 128, 3), (2, 192, 2)]):
        yield _paged(run, cache, fp8_cache, requests, next_n, context)


def _paged(run: Run, cache: torch.Tensor, fp8_cache: torch.Tensor, requests: int, next_n: int, context: int) -> Record:
    heads = run.pick(HEADS, TINY_HEADS)
    cached = requests * context
    sets = run.sets(cached * (LAYOUT.row + 4 * next_n))
    inputs = decode_index(sets, requests, next_n, context, cache.shape[0], heads, run.device)
    queries = mxfp4_query(sets, requests, next_n, heads, device=run.device)
    lengths = inputs.context_lens

    def ours(index):
        return mxfp4_paged_mqa_logits(
            queries[index], cache, inputs.weights[index], lengths, inputs.tables[index], context, LAYOUT
        )

    def theirs(index):
        return fp8_paged_mqa_logits(
            inputs.q[index], fp8_cache, inputs.weights[index], lengths, inputs.tables[index], context, INDEX_LAYOUT
        )

    few = sampled(requests, 2, run.device)
    rows = (few.unsqueeze(1) * next_n + torch.arange(next_n, device=run.device)).flatten()
    want = mxfp4_paged_mqa_logits(
        queries[0][few], cache, inputs.weights[0][rows], lengths[few], inputs.tables[0][few], context, LAYOUT,
        impl="reference",
    )  # fmt: skip
    check_scores(ours(0)[rows], want, None, lengths.flatten()[rows])

    shape = (requests, next_n, heads, INDEX_DIM)
    return run.compare(
        f"requests {requests}, next_n {next_n}, context {context}",
        [functools.partial(ours, index) for index in range(sets)],
        PEER,
        [functools.partial(theirs, index) for index in range(sets)],
        run.floor(roofline.scores(shape, cached * next_n, cached * LAYOUT.row, VALUE_BYTES)),
        target_ms=20,
    )
