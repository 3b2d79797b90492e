"""The GPU implementation: a kernel chosen by dispatch.py writes every element."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.device import pdl
from sparse_attn.dispatch import Choice
from sparse_attn.ops.grouped_linear import dispatch, shapes
from sparse_attn.ops.grouped_linear.fp8 import config as fp8
from sparse_attn.ops.grouped_linear.fp8 import kernels
from sparse_attn.ops.grouped_linear.plan import Plan, Problem, problem_of
from sparse_attn.target import target_of
from sparse_attn.weight_layout import parse_weight_layout


class Product(NamedTuple):
    """What a launcher multiplies, into ``out`` [rows, outputs], contiguous. There is a row and an output at least.

    first_row: of the layout, see weight_layout.WeightLayout.
    """

    rows: torch.Tensor
    ends: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor | None
    out: torch.Tensor
    problem: Problem
    first_row: int


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
    first_row = 0 if layout == shapes.PLAIN else parse_weight_layout(layout).first_row
    choice.kernel.launcher(Product(rows, ends, codes, scales, out, problem, first_row), choice.plan)
    return out


def grouped_linear_fp8(
    rows: torch.Tensor,
    ends: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    layout: str,
    batch_invariant: bool,
) -> torch.Tensor:
    out = shapes.allocate_product(rows, codes)
    if out.numel() == 0:
        return out
    (n, columns), device = rows.shape, rows.device
    if columns == 0:
        return out.zero_()
    target, packed = target_of(device), parse_weight_layout(layout)
    problem = problem_of(rows, ends, codes, scales, layout, batch_invariant)
    plan = fp8.plan(problem, target)
    launched, groups = pdl.launched(target), -(-columns // fp8.GROUP)
    x = torch.empty(n, groups * fp8.GROUP, dtype=torch.uint8, device=device)
    x_scales = torch.empty(n, groups, dtype=torch.float32, device=device)
    kernels.quantise[(n, groups)](
        rows, x, x_scales, columns, *rows.stride(), GROUP=fp8.GROUP, num_warps=1, **launched
    )  # fmt: skip
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    kernels.multiply[(plan.tiles, -(-problem.outputs // plan.block_n))](
        x,
        x_scales,
        ends,
        codes,
        scales,
        out,
        n,
        problem.groups,
        problem.outputs,
        columns,
        packed.first_row,
        0 if ends is None else ends.stride(0),
        *codes.stride()[:2],
        *scales.stride(),
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        CODES=problem.codes,
        E8M0=problem.scale == "e8m0",
        BLOCK_ROWS=problem.block[0],
        BLOCK_COLUMNS=problem.block[1],
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        GROUP=fp8.GROUP,
        FP8_DOT=target.fp8_dot,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launched,
    )
    return out
