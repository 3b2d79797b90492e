"""How the fused score and select is launched, and its scratch: the logits of some rows, and the scratch of selecting
and packing them."""

from __future__ import annotations

import torch

from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import Target
from sparse_attn.layout import IndexLayout
from sparse_attn.ops.indexer.scores import dispatch as scoring
from sparse_attn.ops.ragged.lists import config as ragged
from sparse_attn.ops.ragged.lists.reference import MOST_ROWS
from sparse_attn.ops.topk.fused.shapes import padded, rows_at_once
from sparse_attn.ops.topk.select import dispatch as selection
from sparse_attn.ops.topk.select.plan import WORD, Plan, Problem
from sparse_attn.workspace import Buffer, Scratch

# A little below 16 MiB: with fewer columns more rows are held at once, which must not take more.
CANDIDATE_BYTES = (16 << 20) - (1 << 16)


def prefill_problem(rows: int, width: int, top_k: int) -> Problem:
    """Of ``rows`` held at once."""
    return Problem(rows, width, top_k, scratch_bytes=CANDIDATE_BYTES)


def decode_problem(rows: int, width: int, top_k: int) -> Problem:
    """The same of index_topk_decode, whose scores come with group maxima where those are of use."""
    return prefill_problem(rows, width, top_k)._replace(group_maxima=True)


def choose_prefill(
    rows: int, width: int, top_k: int, target: Target, kernel: str | Choice[Plan] | None = None
) -> Choice[Plan]:
    """How ``rows`` held at once are selected."""
    return selection.choose(prefill_problem(rows, width, top_k), target, kernel)


def choose_decode(
    rows: int, width: int, top_k: int, target: Target, kernel: str | Choice[Plan] | None = None
) -> Choice[Plan]:
    """As choose_prefill, for index_topk_decode."""
    return selection.choose(decode_problem(rows, width, top_k), target, kernel)


def scratch(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> Scratch:
    """Scratch of the operators that return positions. rows: query rows, ``group`` of which stay together (next_n).
    width: keys a row may see (capacity or bound)."""
    if rows == 0 or width == 0:
        return Scratch()
    some = rows_at_once(rows, width, logits_bytes, group)
    return scratch_of(some, width, choose_prefill(some, width, top_k, target).plan)


def prefill_scratch(
    rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1, *, heads: int,
    layout: IndexLayout,
) -> Scratch:  # fmt: skip
    """Scratch of index_topk_prefill, of keys gathered from a cache of ``layout``."""
    if rows == 0 or width == 0:
        return Scratch()
    some = rows_at_once(rows, width, logits_bytes, group)
    scores = scoring.prefill_scratch(some, width, heads, layout, target)
    return scratch_of(some, width, choose_prefill(some, width, top_k, target).plan, scores)


def last_change(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> int:
    """The row count, up to ``rows``, beyond which one more row never takes less scratch."""
    if rows == 0 or width == 0:
        return 0
    some = rows_at_once(rows, width, logits_bytes, group)
    return selection.last_change(Problem(some, width, top_k, scratch_bytes=CANDIDATE_BYTES), target)


def scratch_of(rows: int, width: int, plan: Plan, scores: Scratch | None = None) -> Scratch:
    """As scratch, for ``rows`` that are held at once. scores: what scoring takes, which comes last."""
    chosen, logits = plan.scratch, Buffer("logits", (rows, padded(width)), torch.float32)
    return Scratch((logits, *chosen.buffers, *(scores.buffers if scores else ())), chosen.counters)


def slots_scratch(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> Scratch:
    """Scratch of index_topk_decode_slots."""
    if rows == 0 or width == 0:
        return Scratch()
    some = rows_at_once(rows, width, logits_bytes, group)
    return slots_scratch_of(some, width, choose_decode(some, width, top_k, target).plan, rows, target)


def slots_scratch_of(step: int, width: int, plan: Plan, rows: int, target: Target) -> Scratch:
    """As slots_scratch, for ``step`` rows that are held at once. The counters that pack rows come last."""
    chosen, packed = scratch_of(step, width, plan), ragged.scratch(rows, target)
    return Scratch(chosen.buffers, chosen.counters + packed.counters)


def widths_of_most_scratch(width: int) -> tuple[int, ...]:
    """Widths up to ``width``, one of which takes the most scratch beside its logits."""
    return selection.widths_of_most_scratch(width)


def packs_blocks(num_blocks: int, block_size: int) -> bool:
    """Whether the selection itself can map columns to slots: the columns of a bitmask's word lie in one block, and
    every slot fits an index."""
    return block_size % WORD == 0 and num_blocks * block_size <= MOST_ROWS
