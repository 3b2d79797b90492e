"""The GPU implementation: a kernel chosen by dispatch.py writes every element."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.products import dispatch
from sparse_attn.ops.layers.products.problem import (
    Experts,
    ExpertsPlan,
    Plan,
    Product,
    as_weight,
    experts_problem,
    problem_of,
)
from sparse_attn.weight_layout import PackedWeight


def grouped_linear(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    layout: str,
    batch_invariant: bool,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    out = torch.empty(rows.shape[0], codes.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    weight = as_weight(codes, scales, layout)
    problem = problem_of(rows, ends, weight, batch_invariant)
    choice = dispatch.choose(problem, target_of(rows.device), kernel)
    warn_of_slow_path("grouped_linear", rows.device, choice)
    views, counters = workspace.take("grouped_linear", choice.plan.scratch, rows.device)
    choice.kernel.launcher(Product.of(rows, ends, weight, out, problem, views, counters), choice.plan)
    return out


def grouped_linear_fp8(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    layout: str,
    batch_invariant: bool,
    kernel: str | Choice[Plan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    if not rows.numel() or not codes.shape[1]:
        return rows.new_zeros(rows.shape[0], codes.shape[1])
    weight = PackedWeight(codes, scales, layout)
    problem = problem_of(rows, ends, weight, batch_invariant)
    choice = dispatch.choose_fp8(problem, target_of(rows.device), kernel)
    warn_of_slow_path("grouped_linear_fp8", rows.device, choice)
    views, counters = workspace.take("grouped_linear_fp8", choice.plan.scratch, rows.device)
    out = rows.new_empty(0 if choice.kernel.name == dispatch.TORCH else (rows.shape[0], codes.shape[1]))
    given = choice.kernel.launcher(Product.of(rows, ends, weight, out, problem, views, counters), choice.plan)
    return out if given is None else given


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
    kernel: str | Choice[ExpertsPlan] | None = None,
) -> torch.Tensor:
    """kernel: see dispatch.choose."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if ids.shape[1] == 0 or down.shape[2] == 0:
        return out.zero_()
    first, second = PackedWeight(gate_up, gate_up_scales, gate_up_layout), PackedWeight(down, down_scales, down_layout)
    problem = experts_problem(x, ids, first, second, num_experts, activations, batch_invariant)
    choice = dispatch.choose_experts(problem, target_of(x.device), kernel)
    warn_of_slow_path("packed_experts", x.device, choice)
    views, counters = workspace.take("packed_experts", choice.plan.scratch, x.device)
    choice.kernel.launcher(Experts(x, weights, ids, first, second, clamp, out, problem, views, counters), choice.plan)
    return out
