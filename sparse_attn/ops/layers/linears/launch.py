"""The GPU implementation: a kernel chosen by dispatch.py writes every element."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.layers.linears import dispatch, shapes
from sparse_attn.ops.layers.linears.plan import Plan, Product, problem_of
from sparse_attn.weight_layout import parse_weight_layout


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
    out = shapes.allocate_product(rows, codes)
    if out.numel() == 0:
        return out
    problem = problem_of(rows, ends, codes, scales, layout, batch_invariant)
    choice = dispatch.choose(problem, target_of(rows.device), kernel)
    warn_of_slow_path("grouped_linear", rows.device, choice)
    views, counters = workspace.take("grouped_linear", choice.plan.scratch, rows.device)
    first_row = 0 if layout == shapes.PLAIN else parse_weight_layout(layout).first_row
    choice.kernel.launcher(Product(rows, ends, codes, scales, out, problem, first_row, views, counters), choice.plan)
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
        return shapes.allocate_product(rows, codes).zero_()
    problem = problem_of(rows, ends, codes, scales, layout, batch_invariant)
    first_row = parse_weight_layout(layout).first_row
    choice = dispatch.choose_fp8(problem, target_of(rows.device), kernel)
    warn_of_slow_path("grouped_linear_fp8", rows.device, choice)
    views, counters = workspace.take("grouped_linear_fp8", choice.plan.scratch, rows.device)
    out = rows.new_empty(0) if choice.kernel.name == dispatch.TORCH else shapes.allocate_product(rows, codes)
    product = Product(rows, ends, codes, scales, out, problem, first_row, views, counters)
    given = choice.kernel.launcher(product, choice.plan)
    return out if given is None else given
