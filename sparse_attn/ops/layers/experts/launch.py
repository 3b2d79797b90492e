"""The GPU implementation: kernels chosen by dispatch.py."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.experts import dispatch, shapes
from sparse_attn.ops.layers.experts.plan import Call, Plan, problem_of


def packed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_layout: str,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_layout: str,
    clamp: float | None,
    num_experts: int,
    activations: str,
    batch_invariant: bool,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    out = shapes.allocate_sums(x)
    if out.numel() == 0:
        return out
    if ids.shape[1] == 0 or down.shape[2] == 0:
        return out.zero_()
    first, second = (gate_up, gate_up_scales, gate_up_layout), (down, down_scales, down_layout)
    problem = problem_of(x, ids, *first, *second, num_experts, activations, batch_invariant)
    choice = dispatch.choose(problem, target_of(x.device), kernel)
    warn_of_slow_path("packed_experts", x.device, choice)
    views, counters = workspace.take("packed_experts", choice.plan.scratch, x.device)
    choice.kernel.launcher(Call(x, weights, ids, first, second, clamp, out, problem, views, counters), choice.plan)
    return out
