"""Scores and top-k in one call, beside the best peers' two in one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.chains import FULL, TINY, peer_select
from benchmarks.checks import check_selection, sampled
from benchmarks.inputs import BLOCK, INDEX_DIM, INDEX_LAYOUT, decode_index, filled_cache, prefill_index
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.ops.topk.fused import index_topk_decode, index_topk_prefill

PEER = "DeepGEMM+vLLM"
RATIO = 4  # tokens of an entry of V4


@suite("select_decode")
def select_decode(run: Run) -> Iterator[Record]:
    "index_topk_decode, 64 heads of 128, top-k 2048, blocks of 64, L2-cold."
    pool = run.pick(128 * 131072 // BLOCK, 32)
    cache = filled_cache(INDEX_LAYOUT, pool, run.device)
    full = [(requests, context) for context in (32768, 131072) for requests in (1, 8, 32, 64, 128)]
    for requests, context in run.pick(full, [(3, 256)]):
        yield _decode(run, cache, requests, context)


@suite("select_few")
def select_few(run: Run) -> Iterator[Record]:
    "index_topk_decode of 1 to 8 requests, 64 heads of 128, L2-cold: V3.2's keys, top-k 2048; V4's entries, top-k 512."
    requests = (1, 2, 4, 8)
    cache = filled_cache(INDEX_LAYOUT, run.pick(max(requests) * 131072 // BLOCK, 32), run.device)
    models = ("V3.2", 1, 2048), ("V4", RATIO, 512)
    for model, ratio, top_k in run.pick(models, (("V3.2", 1, TINY.top_k), ("V4", RATIO, 32))):
        for context in run.pick((4096, 16384, 32768, 131072), (256,)):
            for number in run.pick(requests, (3,)):
                name = f"{model}, requests {number}, context {context}"
                yield _decode(run, cache, number, context // ratio, top_k, name, most=64)


def _decode(
    run: Run,
    cache: torch.Tensor,
    requests: int,
    context: int,
    top_k: int | None = None,
    name: str | None = None,
    most: int = 8,
) -> Record:
    """context: in keys. most: input sets."""
    heads, _, usual = run.pick(FULL, TINY)
    top_k = usual if top_k is None else top_k
    sets = run.sets(requests * context * (INDEX_LAYOUT.row + 4), most=most)
    inputs = decode_index(sets, requests, 1, context, cache.shape[0], heads, run.device)

    def select(index, some=slice(None), impl="auto"):
        return index_topk_decode(
            inputs.q[index].view(torch.uint8)[some], inputs.weights[index][some], cache, inputs.context_lens[some],
            inputs.tables[index][some], top_k, context, INDEX_LAYOUT, impl=impl,
        )  # fmt: skip

    few = sampled(requests, 2, run.device)
    chosen = select(0)
    check_selection(chosen[few], select(0, few, "reference"), "selection")
    theirs = None
    if run.peers is not None:
        theirs = peer_select(run, inputs, cache, requests, top_k, context)
        check_selection(chosen, theirs(0), "selection beside the peers'")
    pairs = requests * context
    floor = run.floor(roofline.selected_scores(inputs.q[0].shape, pairs, pairs * INDEX_LAYOUT.row, requests * top_k))
    return run.compare(
        f"requests {requests}, context {context}" if name is None else name,
        [lambda at=at: select(at) for at in range(sets)],
        PEER,
        theirs and [lambda at=at: theirs(at) for at in range(sets)],
        floor,
        target_ms=30,
    )


@suite("select_prefill")
def select_prefill(run: Run) -> Iterator[Record]:
    "index_topk_prefill of a 4096-token chunk at the end of a context, top-k 2048, gathered fp8 keys."
    for tokens, context in run.pick([(4096, 8192), (4096, 32768), (4096, 131072)], [(5, 200)]):
        yield _prefill(run, tokens, context)


def _prefill(run: Run, tokens: int, context: int) -> Record:
    heads, _, top_k = run.pick(FULL, TINY)
    inputs = prefill_index(tokens, context, heads, run.device)

    def select(some=slice(None), impl="auto"):
        queries, keys, k_scale, weights, start, end = inputs
        queries, keys = queries.view(torch.uint8), keys.view(torch.uint8)
        return index_topk_prefill(queries[some], weights[some], keys, k_scale, start[some], end[some], top_k, impl=impl)

    few = sampled(tokens, 8, run.device)
    chosen = select()
    check_selection(chosen[few], select(few, "reference"), "selection")
    theirs = None
    if run.peers is not None:
        out = torch.empty(tokens, top_k, dtype=torch.int32, device=run.device)

        def theirs():
            out.fill_(-1)
            return run.peers.top_k_prefill(run.peers.scores(*inputs), inputs.kv_start, inputs.kv_end, out)

        check_selection(chosen, theirs(), "selection beside the peers'")
    pairs = int((inputs.kv_end - inputs.kv_start).sum())
    floor = run.floor(roofline.selected_scores(inputs.q.shape, pairs, context * (INDEX_DIM + 4), tokens * top_k))
    return run.compare(f"tokens {tokens}, context {context}", [select], PEER, theirs and [theirs], floor, target_ms=60)
