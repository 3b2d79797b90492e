"""The GPU implementation: a kernel chosen by dispatch.py writes every element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparse_attn import workspace
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.indexer.scores import dispatch, shapes
from sparse_attn.ops.indexer.scores.plan import Plan


class Prefill(NamedTuple):
    """Scores over contiguous keys: of a row and a key at least, into fp32 ``out`` [rows, keys] of any row stride.

    clear: write -inf outside the rows' ranges, which are left as they are otherwise. scratch: as the plan lists it.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    weights: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor
    flavour: str
    out: torch.Tensor
    clear: bool = True
    scratch: Sequence[torch.Tensor] = ()


class Paged(NamedTuple):
    """Scores over a paged cache: of a row and a position at least, into fp32 ``out`` [requests * next_n,
    max_context_len] of any row stride.

    clear: as Prefill's. early_dependents: whether the next launch's CTAs may start while this one runs (programmatic
    dependent launch); None: where this one is short. maxima, with a ``group`` above 1: fp32 [requests * next_n,
    cdiv(max_context_len, group)] gets the highest score of every ``group`` neighbours of which the row sees one, NaN
    where all are. Groups are whole: ``out``, whose rows have room for it, gets -inf behind the row's last score.
    """

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    max_context_len: int
    flavour: str
    out: torch.Tensor
    clear: bool = True
    early_dependents: bool | None = None
    maxima: torch.Tensor | None = None
    group: int = 1


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
    out = shapes.allocate_logits(q.shape[0], k.shape[0], q)
    if out.numel() == 0:
        return out
    arguments = (q, k, k_scale, weights, kv_start, kv_end, flavour)
    choice = dispatch.choose_prefill(dispatch.prefill_problem(*arguments), target_of(q.device), kernel)
    scratch = choice.plan.scratch
    views = workspace.take("mqa_logits", scratch, q.device)[0] if scratch.buffers else ()
    choice.kernel.launcher(Prefill(*arguments, out, scratch=views), choice.plan)
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
    out = shapes.allocate_logits(q.shape[0] * q.shape[1], max_context_len, q)
    if out.numel() == 0:
        return out
    arguments = (q, cache, weights, context_lens, block_table, max_context_len)
    problem = dispatch.paged_problem(*arguments, layout)
    choice = dispatch.choose_paged(problem, target_of(q.device), kernel)
    choice.kernel.launcher(Paged(*arguments, problem.flavour, out), choice.plan)
    return out
