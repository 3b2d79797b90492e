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
from sparse_attn.ops.topk.fused import config, fake
from sparse_attn.ops.topk.select import dispatch
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
    out = fake.allocate_prefill(q, top_k)
    rows, keys = q.shape[0], k.shape[0]
    if rows == 0:
        return out
    if keys == 0:
        return out.fill_(-1)
    target = target_of(q.device)
    call = config.Prefill(q, weights, k, k_scale, kv_start, kv_end, top_k, flavour, logits_bytes)
    problem = config.prefill_problem(call)
    scores = scoring.choose_prefill(problem.scoring, target)
    choice = dispatch.choose(problem.selecting, target, kernel)
    warn_of_slow_path("index_topk_prefill", q.device, choice, scores)
    step, scratch = problem.step, config.scratch_of(problem.step, keys, choice.plan, scores.plan.scratch)
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
    out = fake.allocate_decode(q, top_k)
    if out.shape[0] == 0:
        return out
    if max_context_len == 0:
        return out.fill_(-1)
    call = config.Decode(q, weights, cache, context_lens, block_table, top_k, max_context_len, layout, logits_bytes)
    problem = config.decode_problem(call)
    choice = dispatch.choose(problem.selecting, target_of(q.device), kernel)
    scratch = config.scratch_of(problem.step, problem.width, choice.plan)
    views, counters = workspace.take("index_topk_decode", scratch, q.device)
    _select_decode("index_topk_decode", call, problem, choice, out, views, counters)
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
    indices, indptr = fake.allocate_slots(q, top_k)
    if indices.numel() == 0 or max_context_len == 0 or block_table.numel() == 0:
        return indices.fill_(-1), indptr.zero_()
    target = target_of(q.device)
    call = config.Decode(q, weights, cache, context_lens, block_table, top_k, max_context_len, layout, logits_bytes)
    problem = config.decode_problem(call)
    choice, packs = dispatch.choose(problem.selecting, target, kernel), ragged.scratch(problem.rows, target)
    scratch = config.scratch_of(problem.step, problem.width, choice.plan, packing=packs)
    views, counters = workspace.take("index_topk_decode_slots", scratch, q.device)
    states = counters[scratch.counters - packs.counters :]
    num_blocks, block_size = cache.shape[:2]
    at_once = problem.step == problem.rows and choice.plan.packs(problem.rows, target)
    if at_once and config.packs_blocks(num_blocks, block_size):
        slots = Slots(indptr, states, block_table, block_size, q.shape[1])
        _select_decode("index_topk_decode_slots", call, problem, choice, indices, views, counters, slots)
    else:
        out = fake.allocate_decode(q, top_k)
        _select_decode("index_topk_decode_slots", call, problem, choice, out, views, counters)
        packing.pack_rows(
            indices,
            indptr,
            states,
            ragged.config(problem.rows, top_k, target),
            top_k,
            0,
            dense=out,
            block_table=block_table,
            block_size=block_size,
            next_n=q.shape[1],
        )
    return indices, indptr


def _select_decode(
    op: str,
    call: config.Decode,
    problem: config.Problem,
    choice: Choice[Plan],
    out: torch.Tensor,
    views: list[torch.Tensor],
    counters: torch.Tensor,
    slots: Slots | None = None,
) -> None:
    """Score and select, ``problem.step`` rows at a time, for operator ``op``; out, slots: see Selection."""
    next_n, step = call.q.shape[1], problem.step
    scores = scoring.choose_paged(problem.scoring, target_of(call.q.device))
    warn_of_slow_path(op, call.q.device, choice, scores)
    buffer, *views = views
    limits = call.context_lens.reshape(-1)
    for first in range(0, problem.rows, step):
        rows = slice(first, min(first + step, problem.rows))
        some = slice(first // next_n, rows.stop // next_n)
        logits = buffer[: rows.stop - first, : problem.width]
        maxima = {"maxima": views[0][: rows.stop - first], "group": GROUP} if choice.plan.reads_group_maxima else {}
        # PDL: the selection depends on this launch of scores, and its plan says when its CTAs should start.
        scored = Paged(
            call.q[some],
            call.cache,
            call.weights[rows],
            call.context_lens[some],
            call.block_table[some],
            problem.width,
            problem.scoring.flavour,
            logits,
            clear=False,
            early_dependents=choice.plan.starts_early,
            **maxima,
        )
        scores.kernel.launcher(scored, scores.plan)
        into = out[rows] if slots is None else out
        choice.kernel.launcher(Selection(logits, None, limits[rows], into, views, counters, slots), choice.plan)
