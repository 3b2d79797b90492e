"""The GPU implementation: one launch, or stages of many long rows."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.ops.topk import config, kernels, shapes
from sparse_attn.target import target_of


def top_k_per_row(
    logits: torch.Tensor,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    k: int,
    launch: config.TopkConfig | None = None,
) -> torch.Tensor:
    """``launch`` overrides the configuration (tests force every path with small shapes)."""
    out = shapes.allocate_indices(logits, k)
    rows, width = logits.shape
    if rows == 0:
        return out
    if width == 0:
        return out.fill_(-1)
    launch = launch or config.config(rows, width, k, target_of(logits.device))
    views, counters = workspace.take("top_k_per_row", config.scratch_of(launch, width), logits.device)
    kernels.launch_top_k(logits, row_starts, row_ends, out, launch, views, counters)
    return out
