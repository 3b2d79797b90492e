"""The GPU implementation: a kernel chosen by dispatch.py, its scratch, and its launcher."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.topk.select import dispatch, fake
from sparse_attn.ops.topk.select.plan import Plan, Selection


def top_k_per_row(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    k: int,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    out = fake.allocate_indices(logits, k)
    rows, width = logits.shape
    if rows == 0:
        return out
    if width == 0:
        return out.fill_(-1)
    choice = dispatch.choose(dispatch.problem_of(logits, row_starts, row_ends, k), target_of(logits.device), kernel)
    warn_of_slow_path("top_k_per_row", logits.device, choice)
    views, counters = workspace.take("top_k_per_row", choice.plan.scratch, logits.device)
    choice.kernel.launcher(Selection(logits, row_starts, row_ends, out, views, counters), choice.plan)
    return out
