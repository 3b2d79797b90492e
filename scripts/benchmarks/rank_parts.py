"""A decode layer's selection and attention by part, on rank 0 of 8 context ranks: beside a rank of 8 tensor ranks, each
of which scores all keys (the indexer is replicated) and attends with its heads. Collectives are copies of the right
size within the GPU, so the wire is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.checks import check_selection, sampled
from benchmarks.inputs import BLOCK, INDEX_LAYOUT, LATENT_LAYOUT, DecodeIndex, decode_index, filled_cache, normal
from benchmarks.ranks import RANKS, SIZE, copies
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Calls, Run
from benchmarks.windowed import LAYOUT as WINDOWED_LAYOUT
from sparse_attn import roofline
from sparse_attn.layout import KvLayout
from sparse_attn.ops.attention.sparse import sparse_attn_decode
from sparse_attn.ops.indexer.scores import fp8_paged_mqa_logits
from sparse_attn.ops.topk.fused import index_topk_decode_slots
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.ranks import merge_over_ranks
from sparse_attn.pipeline.select import Search, choose_over_ranks
from sparse_attn.types import AttentionOutput, CompressedPlan, QuantisedQuery, Ragged

PEER = "indexer replicated"


class Dims(NamedTuple):
    """ratio: tokens that a key stands for."""

    name: str
    heads: int
    index_heads: int
    top_k: int
    layout: KvLayout
    ratio: int


FULL = Dims("V3.2", 128, 64, 2048, LATENT_LAYOUT, 1), Dims("V4-Flash", 64, 64, 512, WINDOWED_LAYOUT, 4)
TINY = (Dims("tiny", 8, 4, 16, LATENT_LAYOUT, 1),)


@suite("rank_parts")
def rank_parts(run: Run) -> Iterator[Record]:
    "Scores, selection, attention and merge of rank 0 of 8 context ranks, against tensor ranks that score all keys."
    pool = run.pick(32768, 64)
    index_cache = filled_cache(INDEX_LAYOUT, pool, run.device)
    for dims in run.pick(FULL, TINY):
        cache = filled_cache(dims.layout, pool, run.device)
        for context in run.pick((32768, 131072), (1024,)):
            for requests in run.pick((1, 8, 64), (3,)):
                yield from _layer(run, dims, index_cache, cache, requests, context // dims.ratio)
        del cache


def _layer(
    run: Run, dims: Dims, index_cache: torch.Tensor, cache: torch.Tensor, requests: int, keys: int
) -> Iterator[Record]:
    device, own, case = run.device, keys // SIZE, f"{dims.name}, requests {requests}, keys {keys}"
    sets = run.sets(requests * keys * INDEX_LAYOUT.row, most=4)
    whole, part = (
        _inputs(sets, requests, count, index_cache.shape[0], dims.index_heads, device) for count in (keys, own)
    )

    def scores(inputs: DecodeIndex, count: int, at: int) -> torch.Tensor:
        return fp8_paged_mqa_logits(
            inputs.q[at], index_cache, inputs.weights[at], inputs.context_lens, inputs.tables[at], count, INDEX_LAYOUT
        )

    def calls(work: Callable[[int], object]) -> list[Callable[[], object]]:
        return [lambda at=at: work(at) for at in range(sets)]

    pairs = requests * own
    floor = run.floor(roofline.scores(part.q[0].shape, pairs, pairs * INDEX_LAYOUT.row))
    replicated = calls(lambda at: scores(whole, keys, at))
    yield _beside(run, f"scores, {case}", calls(lambda at: scores(part, own, at)), replicated, floor)

    def select(at: int, some: slice | torch.Tensor = slice(None), impl: str = "auto") -> torch.Tensor:
        query = QuantisedQuery(part.q[at].view(torch.uint8)[some].flatten(0, 1), part.weights[at][some])
        with copies():
            plan = _plan(part.context_lens[some], own)
            search = Search(query, index_cache, part.tables[at][some], plan, INDEX_LAYOUT, dims.top_k, Options(impl))
            chosen, _ = choose_over_ranks(search, RANKS)
        assert chosen is not None
        return chosen

    few = sampled(requests, 2, device)
    check_selection(select(0)[few], select(0, few, "reference"), "selection over ranks")

    def select_whole(at: int) -> Ragged:
        return index_topk_decode_slots(
            whole.q[at].view(torch.uint8), whole.weights[at], index_cache, whole.context_lens, whole.tables[at],
            dims.top_k, keys, INDEX_LAYOUT,
        )  # fmt: skip

    yield _beside(run, f"scores and selection, {case}", calls(select), calls(select_whole))

    dim = dims.layout.dim
    q = normal(sets, requests, dims.heads, dim, device=device)
    own_rows = _rows(sets, requests, dims.top_k // SIZE, dims.top_k, cache, device)
    rows = _rows(sets, requests, dims.top_k, dims.top_k, cache, device)

    def attend(at: int, heads: int, ragged: Ragged) -> AttentionOutput:
        return sparse_attn_decode(q[at][:, :heads], cache, ragged, scale=dim**-0.5, layout=dims.layout)

    def attend_own(at: int) -> AttentionOutput:
        return attend(at, dims.heads, own_rows[at])

    def attend_and_merge(at: int) -> AttentionOutput:
        with copies():
            return merge_over_ranks(attend_own(at), RANKS)

    sharded = calls(lambda at: attend(at, dims.heads // SIZE, rows[at]))
    yield _beside(run, f"attention, {case}", calls(attend_own), sharded)
    yield _beside(run, f"attention and merge, {case}", calls(attend_and_merge), sharded)


def _beside(run: Run, case: str, ours: Calls, theirs: Calls, floor_us: float | None = None) -> Record:
    """Theirs is a way of our own kernels, which a dry run takes, too."""
    if run.dry:
        run.time(theirs)
    return run.compare(case, ours, PEER, None if run.dry else theirs, floor_us)


def _inputs(sets: int, requests: int, keys: int, pool: int, heads: int, device: str) -> DecodeIndex:
    """Where there are fewer blocks than all requests have keys for, they share some."""
    inputs = decode_index(sets, requests, 1, keys, pool, heads, device) if requests * keys <= pool * BLOCK else None
    if inputs is not None:
        return inputs
    inputs = decode_index(sets, requests, 1, BLOCK, pool, heads, device)
    tables = [torch.randint(pool, (requests, keys // BLOCK), device=device, dtype=torch.int32) for _ in range(sets)]
    return inputs._replace(tables=tables, context_lens=torch.full_like(inputs.context_lens, keys))


def _plan(context_lens: torch.Tensor, keys: int) -> CompressedPlan:
    """Of decode rows alone."""
    none = context_lens.new_zeros(0)
    return CompressedPlan(
        context_lens.flatten(), context_lens, none.long(), context_lens.new_zeros(1), none, none, 0, keys
    )


def _rows(sets: int, requests: int, taken: int, capacity: int, cache: torch.Tensor, device: str) -> list[Ragged]:
    """``taken`` random slots a row, in room for ``capacity``."""
    slots = cache.shape[0] * cache.shape[1]
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * taken
    found = []
    for _ in range(sets):
        indices = torch.full((requests * capacity,), -1, dtype=torch.int32, device=device)
        indices[: requests * taken] = torch.randint(slots, (requests * taken,), device=device, dtype=torch.int32)
        found.append(Ragged(indices, indptr))
    return found
