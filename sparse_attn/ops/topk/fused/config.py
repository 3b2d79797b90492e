"""What the fused operators ask of the kernels that score and that select, and their scratch: the logits of some rows,
and the scratch of scoring, selecting and packing them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from sparse_attn.framework.target import Target
from sparse_attn.layout import IndexLayout
from sparse_attn.ops.indexer.scores import dispatch as scoring
from sparse_attn.ops.indexer.scores.plan import PagedProblem, PrefillProblem
from sparse_attn.ops.ragged.lists import config as ragged
from sparse_attn.ops.ragged.lists.reference import MOST_ROWS
from sparse_attn.ops.topk.fused.fake import padded, rows_at_once
from sparse_attn.ops.topk.select import dispatch
from sparse_attn.ops.topk.select.plan import WORD, Plan
from sparse_attn.ops.topk.select.plan import Problem as Selecting
from sparse_attn.workspace import Buffer, Scratch

# A little below 16 MiB: with fewer columns more rows are held at once, which must not take more.
CANDIDATE_BYTES = (16 << 20) - (1 << 16)
NOTHING = Scratch()


class Prefill(NamedTuple):
    """The arguments of index_topk_prefill."""

    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    kv_start: torch.Tensor
    kv_end: torch.Tensor
    top_k: int
    flavour: str
    logits_bytes: int


class Decode(NamedTuple):
    """Those of index_topk_decode and index_topk_decode_slots."""

    q: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    top_k: int
    max_context_len: int
    layout: str
    logits_bytes: int


class Problem(NamedTuple):
    """Of ``rows`` whose logits are ``width`` wide, ``step`` are held at once. scoring, selecting: the problems of those
    kernels, of ``step`` rows."""

    rows: int
    width: int
    step: int
    scoring: PrefillProblem | PagedProblem
    selecting: Selecting


def prefill_problem(call: Prefill) -> Problem:
    rows, width = call.q.shape[0], call.k.shape[0]
    step = rows_at_once(rows, width, call.logits_bytes)
    scored = scoring.prefill_problem(call.q, call.k, call.k_scale, call.weights, call.flavour, rows=step)
    return Problem(rows, width, step, scored, selecting(step, width, call.top_k))


def decode_problem(call: Decode) -> Problem:
    (requests, next_n), width = call.q.shape[:2], call.max_context_len
    step = rows_at_once(requests * next_n, width, call.logits_bytes, next_n)
    scored = scoring.paged_problem(call.q, call.cache, width, call.layout, requests=step // next_n)
    return Problem(requests * next_n, width, step, scored, selecting(step, width, call.top_k, group_maxima=True))


def selecting(rows: int, width: int, top_k: int, *, group_maxima: bool = False) -> Selecting:
    """Of ``rows`` held at once. group_maxima: of decode, whose scores come with them where those are of use."""
    return Selecting(rows, width, top_k, group_maxima, CANDIDATE_BYTES)


def scratch(
    rows: int,
    width: int,
    top_k: int,
    logits_bytes: int,
    target: Target,
    group: int = 1,
    *,
    slots: bool = False,
    heads: int = 0,
    layout: IndexLayout | None = None,
) -> Scratch:
    """rows: query rows, ``group`` of which stay together (next_n). width: keys a row may see (capacity or bound).
    slots: of index_topk_decode_slots. heads, layout: of index_topk_prefill, of keys gathered from a cache of this
    layout; without them, of whichever operator returns positions."""
    if rows == 0 or width == 0:
        return NOTHING
    step = rows_at_once(rows, width, logits_bytes, group)
    plan = dispatch.choose(selecting(step, width, top_k, group_maxima=slots), target).plan
    scores = NOTHING if layout is None else scoring.prefill_scratch(step, width, heads, layout, target)
    return scratch_of(step, width, plan, scores, ragged.scratch(rows, target) if slots else NOTHING)


slots_scratch = functools.partial(scratch, slots=True)


def prefill_scratch(*sizes: Any, heads: int, layout: IndexLayout) -> Scratch:
    return scratch(*sizes, heads=heads, layout=layout)


def scratch_of(step: int, width: int, plan: Plan, scores: Scratch = NOTHING, packing: Scratch = NOTHING) -> Scratch:
    """As scratch, for ``step`` rows that are held at once. scores, packing: what scoring and packing take; the buffers
    of the one and the counters of the other come last."""
    logits = Buffer("logits", (step, padded(width)), torch.float32)
    return Scratch((logits, *plan.scratch.buffers, *scores.buffers), plan.scratch.counters + packing.counters)


def last_change(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> int:
    """The row count, up to ``rows``, beyond which one more row never takes less scratch."""
    if rows == 0 or width == 0:
        return 0
    return dispatch.last_change(selecting(rows_at_once(rows, width, logits_bytes, group), width, top_k), target)


def widths_of_most_scratch(width: int) -> tuple[int, ...]:
    """Widths up to ``width``, one of which takes the most scratch beside its logits."""
    return dispatch.widths_of_most_scratch(width)


def packs_blocks(num_blocks: int, block_size: int) -> bool:
    """Whether the selection itself can map columns to slots: the columns of a bitmask's word lie in one block, and
    every slot fits an index."""
    return block_size % WORD == 0 and num_blocks * block_size <= MOST_ROWS
