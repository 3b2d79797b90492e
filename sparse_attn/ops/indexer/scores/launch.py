"""The GPU implementation: a kernel chosen by dispatch.py writes every element."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.indexer.scores import dispatch, fake
from sparse_attn.ops.indexer.scores.plan import Paged, Plan, Prefill


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    flavour: str,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    out = fake.mqa_logits(q, k)
    if out.numel() == 0:
        return out
    choice = dispatch.choose_prefill(
        dispatch.prefill_problem(q, k, k_scale, weights, flavour), target_of(q.device), kernel
    )
    warn_of_slow_path("mqa_logits", q.device, choice)
    scratch = choice.plan.scratch
    views = workspace.take("mqa_logits", scratch, q.device)[0] if scratch.buffers else ()
    call = Prefill(q, k, k_scale, weights, kv_start, kv_end, flavour, out, scratch=views)
    choice.kernel.launcher(call, choice.plan)
    return out


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: str,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    out = fake.paged_mqa_logits(q, max_context_len)
    if out.numel() == 0:
        return out
    problem = dispatch.paged_problem(q, cache, max_context_len, layout)
    choice = dispatch.choose_paged(problem, target_of(q.device), kernel)
    warn_of_slow_path("paged_mqa_logits", q.device, choice)
    call = Paged(q, cache, weights, context_lens, block_table, max_context_len, problem.flavour, out)
    choice.kernel.launcher(call, choice.plan)
    return out
