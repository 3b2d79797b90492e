"""The GPU implementation: for some rows at a time, one launch scores and one or more launches select, over the same
scratch."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.indexer.scores import dispatch as scoring
from sparse_attn.ops.indexer.scores.plan import Paged, Prefill
from sparse_attn.ops.ragged.lists import config as ragged
from sparse_attn.ops.ragged.lists import launch as packing
from sparse_attn.ops.topk.fused import config, shapes
from sparse_attn.ops.topk.select.plan import GROUP, Plan, Selection, Slots


def index_topk_prefill(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    top_k: int,
    flavour: str,
    logits_bytes: int,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: of the selection, see dispatch.choose."""
    out = shapes.allocate_prefill(q, top_k)
    rows, keys = q.shape[0], k.shape[0]
    if rows == 0:
        return out
    if keys == 0:
        return out.fill_(-1)
    target = target_of(q.device)
    step = shapes.rows_at_once(rows, keys, logits_bytes)
    problem = scoring.prefill_problem(q, k, k_scale, weights, kv_start, kv_end, flavour, rows=step)
    scores = scoring.choose_prefill(problem, target)
    choice = config.choose_prefill(step, keys, top_k, target, kernel)
    warn_of_slow_path("index_topk_prefill", q.device, choice, scores)
    scratch = config.scratch_of(step, keys, choice.plan, scores.plan.scratch)
    (buffer, *views), counters = workspace.take("index_topk_prefill", scratch, q.device)
    selecting = len(choice.plan.scratch.buffers)
    views, scoring_views = views[:selecting], views[selecting:]
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        logits = buffer[: some.stop - first, :keys]
        ranges = kv_start[some], kv_end[some]
        scores.kernel.launcher(
            Prefill(q[some], k, k_scale, weights[some], *ranges, flavour, logits, False, scoring_views), scores.plan
        )
        selection = Selection(logits, *ranges, out[some], views, counters)
        choice.kernel.launcher(selection, choice.plan)
    return out


def index_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: str,
    logits_bytes: int,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    out = shapes.allocate_decode(q, top_k)
    if out.shape[0] == 0:
        return out
    if max_context_len == 0:
        return out.fill_(-1)
    step, choice = _decode_step(q, top_k, max_context_len, logits_bytes, kernel)
    scratch = config.scratch_of(step, max_context_len, choice.plan)
    views, counters = workspace.take("index_topk_decode", scratch, q.device)
    inputs = (q, weights, cache, context_lens, block_table, max_context_len, layout)
    _select_decode("index_topk_decode", *inputs, out, step, choice, views, counters)
    return out


def index_topk_decode_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    max_context_len: int,
    layout: str,
    logits_bytes: int,
    kernel: str | Choice[Plan] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selection packs the rows itself, where CTAs hold all rows at once and the columns of a word lie in one
    block."""
    indices, indptr = shapes.allocate_slots(q, top_k)
    rows, next_n = indptr.shape[0] - 1, q.shape[1]
    if indices.numel() == 0 or max_context_len == 0 or block_table.numel() == 0:
        return indices.fill_(-1), indptr.zero_()
    target = target_of(q.device)
    step, choice = _decode_step(q, top_k, max_context_len, logits_bytes, kernel)
    scratch = config.slots_scratch_of(step, max_context_len, choice.plan, rows, target)
    views, counters = workspace.take("index_topk_decode_slots", scratch, q.device)
    states = counters[scratch.counters - ragged.scratch(rows, target).counters :]
    inputs = (q, weights, cache, context_lens, block_table, max_context_len, layout)
    num_blocks, block_size = cache.shape[:2]
    if step == rows and choice.plan.packs(rows, target) and config.packs_blocks(num_blocks, block_size):
        slots = Slots(indptr, states, block_table, block_size, next_n)
        _select_decode("index_topk_decode_slots", *inputs, indices, step, choice, views, counters, slots)
    else:
        out = shapes.allocate_decode(q, top_k)
        _select_decode("index_topk_decode_slots", *inputs, out, step, choice, views, counters)
        packing.pack_rows(
            indices, indptr, states, ragged.config(rows, top_k, target), top_k, 0,
            dense=out, block_table=block_table, block_size=block_size, next_n=next_n,
        )  # fmt: skip
    return indices, indptr


def _decode_step(
    q: torch.Tensor, top_k: int, max_context_len: int, logits_bytes: int, kernel: str | Choice[Plan] | None
) -> tuple[int, Choice[Plan]]:
    """How many rows are scored at a time, and how they are selected."""
    requests, next_n = q.shape[:2]
    step = shapes.rows_at_once(requests * next_n, max_context_len, logits_bytes, next_n)
    return step, config.choose_decode(step, max_context_len, top_k, target_of(q.device), kernel)


def _select_decode(
    op: str,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: str,
    out: torch.Tensor,
    step: int,
    choice: Choice[Plan],
    views: list[torch.Tensor],
    counters: torch.Tensor,
    slots: Slots | None = None,
) -> None:
    """Score and select, ``step`` rows at a time, for operator ``op``; out, slots: see Selection."""
    requests, next_n = q.shape[:2]
    problem = scoring.paged_problem(
        q, cache, weights, context_lens, block_table, max_context_len, layout, requests=step // next_n
    )
    scores = scoring.choose_paged(problem, target_of(q.device))
    warn_of_slow_path(op, q.device, choice, scores)
    buffer, *views = views
    limits = context_lens.reshape(-1)
    for first in range(0, requests * next_n, step):
        rows = slice(first, min(first + step, requests * next_n))
        some = slice(first // next_n, rows.stop // next_n)
        logits = buffer[: rows.stop - first, :max_context_len]
        maxima = {"maxima": views[0][: rows.stop - first], "group": GROUP} if choice.plan.reads_group_maxima else {}
        # PDL: the selection depends on this launch of scores, and its plan says when its CTAs should start.
        call = Paged(
            q[some], cache, weights[rows], context_lens[some], block_table[some], max_context_len, problem.flavour,
            logits, clear=False, early_dependents=choice.plan.starts_early, **maxima,
        )  # fmt: skip
        scores.kernel.launcher(call, scores.plan)
        into = out[rows] if slots is None else out
        choice.kernel.launcher(Selection(logits, None, limits[rows], into, views, counters, slots), choice.plan)
