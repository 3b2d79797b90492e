"""Launches of products in Triton whose rows take the matrix unit's M dimension, and of what lies around the experts'
two products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sparse_attn.device import pdl
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.products.portable import expanded as expanding
from sparse_attn.ops.layers.products.portable import fp8, kernels, routed_rows
from sparse_attn.ops.layers.products.portable.config import GROUP
from sparse_attn.ops.layers.products.problem import (
    ExpandedPlan,
    Experts,
    ExpertsPlan,
    ExpertsProblem,
    Plan,
    Product,
)

BLOCK = 1024  # codes that a CTA expands, and columns of a row that it moves
QUANTISED = 8, 4  # rows, groups of columns, of a CTA
COUNTED = 4096  # ids that a CTA of order_rows looks at together


def multiply(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row = product[:7]
    kernels.grouped_linear[(plan.tiles, -(-problem.outputs // plan.block_n))](
        rows,
        ends,
        codes,
        scales,
        out,
        problem.rows,
        problem.groups,
        problem.outputs,
        problem.columns,
        first_row,
        *rows.stride(),
        0 if ends is None else ends.stride(0),
        *codes.stride(),
        *((0, 0, 0) if scales is None else scales.stride()),
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        **problem.format,
        SCALED_VALUES=plan.scaled_values,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **pdl.launched(target_of(rows.device)),
    )


def multiply_expanded(product: Product, plan: ExpandedPlan) -> None:
    """Some outputs at a time, whose codes are expanded first."""
    rows, ends, codes, scales, out, problem, first_row, (expanded,), _ = product
    assert scales is not None
    launched = pdl.launched(target_of(rows.device))
    format = problem.scale_format
    for start in range(0, problem.outputs, plan.outputs_at_once):
        outputs = min(plan.outputs_at_once, problem.outputs - start)
        skipped, cut = divmod(first_row + start, problem.block[0])
        part = scales[:, skipped:]
        expanding.expand[(outputs, -(-problem.columns // BLOCK), problem.groups)](
            codes[:, start:],
            part,
            expanded,
            outputs,
            problem.columns,
            cut,
            *codes.stride()[:2],
            *part.stride(),
            CODES=problem.codes,
            BLOCK=BLOCK,
            num_warps=4,
            **format,
            **launched,
        )
        expanding.multiply[(plan.tiles, -(-(cut + outputs) // plan.block_n))](  # with those of the block that was cut
            rows,
            ends,
            expanded,
            part,
            out[:, start:],
            problem.rows,
            problem.groups,
            outputs,
            problem.columns,
            cut,
            rows.stride(0),
            0 if ends is None else ends.stride(0),
            *part.stride(),
            problem.outputs,
            GROUPS_PADDED=1 << problem.groups.bit_length(),
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **format,
            **launched,
        )


# --- rows that are quantised to fp8


def quantise(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, target: Target) -> None:
    """codes: uint8 [rows, columns padded to GROUP], contiguous; scales: fp32 [rows, groups of columns], any strides."""
    n, groups = scales.shape
    count, most = QUANTISED
    together = min(most, 1 << (groups - 1).bit_length())
    fp8.quantise[(-(-n // count), -(-groups // together))](
        rows,
        codes,
        scales,
        n,
        rows.shape[1],
        groups,
        *rows.stride(),
        *scales.stride(),
        GROUP=GROUP,
        ROWS=count,
        GROUPS=together,
        FP8_CAST=target.fp8_cast,
        num_warps=4,
        **pdl.launched(target),
    )


def multiply_by_torch(product: Product, plan: Plan) -> torch.Tensor:
    """As ``multiply_fp8``, by torch's scaled_mm, which allocates its output."""
    rows, _, codes, scales, _, problem, _, (x, x_scales, *widened), _ = product
    assert scales is not None
    x_scales = x_scales.t()
    scales = widened[0].copy_(scales[0].view(torch.float8_e8m0fnu)) if widened else scales[0].contiguous()
    quantise(rows, x, x_scales[: problem.rows], target_of(rows.device))
    out = F.scaled_mm(
        x.view(torch.float8_e4m3fn),
        codes[0].view(torch.float8_e4m3fn).t(),
        x_scales,
        F.ScalingType.BlockWise1x128,
        scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=problem.dtype,
    )
    return out[: problem.rows]


def multiply_fp8(product: Product, plan: Plan) -> None:
    rows, ends, codes, scales, out, problem, first_row, (x, x_scales), _ = product
    assert scales is not None
    target = target_of(rows.device)
    launched = pdl.launched(target)
    quantise(rows, x, x_scales, target)
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    if target.fp8_dot:  # a cast in the loop would bring operands through registers
        x = x.view(torch.float8_e4m3fn)
        codes = codes.view(torch.float8_e4m3fn) if problem.codes == "e4m3" else codes
    fp8.multiply[(plan.tiles, -(-(first_row + problem.outputs) // plan.block_n))](  # with those that were cut
        x,
        x_scales,
        ends,
        codes,
        scales,
        out,
        problem.rows,
        problem.groups,
        problem.outputs,
        problem.columns,
        first_row,
        0 if ends is None else ends.stride(0),
        *codes.stride()[:2],
        *scales.stride(),
        GROUPS_PADDED=1 << problem.groups.bit_length(),
        **problem.format,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        GROUP=GROUP,
        FP8_DOT=target.fp8_dot,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launched,
    )


# --- experts


def order_rows(
    ids: torch.Tensor,
    order: torch.Tensor,
    spans: torch.Tensor | None,
    place: torch.Tensor | None,
    ends: torch.Tensor | None,
    experts: int,
    block_m: int,
) -> None:
    """Write to ``order`` [rows] those of ``ids`` [tokens, k], contiguous, sorted by expert. Where they are asked for:
    spans [tiles, 3], of ``block_m`` rows of one expert each; the inverse, place [rows]; ends [experts]."""
    routed_rows.order_rows[(experts,)](
        ids,
        order,
        spans,
        place,
        ends,
        ids.numel(),
        experts,
        0 if spans is None else spans.shape[0],
        BLOCK=COUNTED,
        BLOCK_M=block_m,
        num_warps=8,
        **pdl.launched(target_of(ids.device)),
    )


def multiply_grouped(
    call: Experts, plan: ExpertsPlan, products: Callable[[ExpertsProblem, Target], tuple[Choice, Choice]]
) -> None:
    """Sort and gather, two grouped products, and two kernels between and behind them. products: chooses their
    kernels."""
    problem, target = call.problem, target_of(call.x.device)
    experts, hidden, intermediate = problem.gate_up.groups, problem.gate_up.columns, problem.down.columns
    order, place, ends, rows, both, inner, terms, *views = call.views
    launched = pdl.launched(target)
    ids = call.ids.contiguous()
    order_rows(ids, order, None, place, ends, experts, 1)
    routed_rows.gather_tokens[(problem.rows, -(-hidden // BLOCK))](
        call.x, order, ends, rows, problem.k, experts, hidden, *call.x.stride(), BLOCK=BLOCK, num_warps=4, **launched
    )
    first, second = products(problem, target)
    own, counted = len(first.plan.scratch.buffers), first.plan.scratch.counters
    product = Product.of(rows, ends, call.gate_up, both, problem.gate_up, views[:own], call.counters[:counted])
    first.kernel.launcher(product, first.plan)
    routed_rows.gate_rows[(problem.rows, -(-intermediate // BLOCK))](
        both,
        inner,
        intermediate,
        0.0 if call.clamp is None else call.clamp,
        CLAMPED=call.clamp is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **launched,
    )
    product = Product.of(inner, ends, call.down, terms, problem.down, views[own:], call.counters[counted:])
    second.kernel.launcher(product, second.plan)
    routed_rows.add_rows[(problem.tokens, -(-hidden // BLOCK))](
        terms,
        place,
        call.weights.contiguous(),
        ids,
        call.out,
        problem.k,
        experts,
        hidden,
        BLOCK=BLOCK,
        num_warps=4,
        **launched,
    )
