"""Launches of the Hopper kernels, and the TMA descriptors of what they copy: linears of few rows, and experts of many
tokens."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.device import pdl
from sparse_attn.framework.target import Target, target_of
from sparse_attn.ops.layers.products.hopper import experts, stream_k, stream_k_wide
from sparse_attn.ops.layers.products.hopper.config import PRODUCER_REGISTERS, rows_at_once
from sparse_attn.ops.layers.products.hopper.constants import BLOCK_K, BOX, CONSUMERS, CTAS, ROWS, STEP
from sparse_attn.ops.layers.products.portable import routed_rows
from sparse_attn.ops.layers.products.portable.launch import order_rows
from sparse_attn.ops.layers.products.problem import Experts, ExpertsPlan, ExpertsProblem, Product, StreamPlan
from sparse_attn.ops.layers.products.swap_ab.launch import add_terms
from sparse_attn.weight_layout import PackedWeight

PER_WARP = 1024  # columns of a row, 16 bytes of each group of 128 a lane
WARPS = 4  # of a CTA that sorts or quantises, at most
SPANS = 1024  # that keep_spans looks at together


def multiply_stream_k(product: Product, plan: StreamPlan) -> None:
    arguments, options = _streamed(product, plan, torch.int32)
    stream_k.stream_k[(plan.grid,)](*arguments, **options)


def multiply_stream_k_wide(product: Product, plan: StreamPlan) -> None:
    for part in product.parts(rows_at_once(product.problem.rows)):
        arguments, options = _streamed(part, plan, torch.int16)
        stream_k_wide.stream_k_wide[(plan.grid,)](*arguments, **options)


def _streamed(product: Product, plan: StreamPlan, word: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of either kernel, and its constants and options. word: the integer type that it loads codes as."""
    rows, _, codes, scales, out, problem, first_row, (partials,), arrivals = product
    assert scales is not None, "packed weights have scales"
    arguments = (
        _boxes(rows, plan.block_m, BLOCK_K),
        _boxes(codes[0].view(word), plan.block_n, BLOCK_K // word.itemsize),
        scales[0],
        out,
        partials,
        arrivals,
        problem.rows,
        problem.outputs,
        problem.columns // BLOCK_K,
        first_row,
        scales.stride(1),
    )
    options = dict(
        **problem.scale_format,
        STAGES=plan.num_stages,
        CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        TOGETHER=plan.together,
        num_warps=4,
        maxnreg=plan.registers,
        launch_pdl=True,
    )
    return arguments, options


def _boxes(matrix: torch.Tensor, height: int, width: int) -> TensorDescriptor:
    """TMA boxes of ``height`` x ``width``. A single row may have any stride."""
    stride = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [height, width], _swizzled(matrix))


# --- experts


def multiply_experts(call: Experts, plan: ExpertsPlan) -> None:
    problem, target = call.problem, target_of(call.x.device)
    ids, weights = call.ids.contiguous(), call.weights.contiguous()
    order, place, with_empty, spans, count, inner, terms, *quantised = call.views
    order_rows(ids, order, with_empty, place, None, problem.gate_up.groups, plan.block_m)
    routed_rows.keep_spans[(1,)](
        with_empty, spans, count, len(with_empty), BLOCK=SPANS, num_warps=4, **pdl.launched(target)
    )
    dealt = spans, count
    scales, inner_codes, inner_scales = quantised or (None, inner, None)
    sorted_rows = terms  # gate and up are done with them when down begins to write terms
    if scales is None:
        columns, warps = call.x.shape[1], _warps(call.x)
        routed_rows.sort_rows[(len(call.x), -(-columns // (warps * PER_WARP)))](
            call.x,
            ids,
            place,
            sorted_rows,
            problem.k,
            problem.gate_up.groups,
            columns,
            *call.x.stride(),
            BLOCK=warps * PER_WARP,
            num_warps=warps,
            **pdl.launched(target),
        )
    else:
        sorted_rows = terms.view(torch.uint8).flatten()[: terms.numel()].view(terms.shape)
        _quantise(call.x, ids, place, sorted_rows, scales, problem, target)
    _multiply(sorted_rows, scales, call.gate_up, dealt, order, weights, inner, plan, target, call.clamp, gated=True)
    if inner_scales is not None:
        _quantise(inner, None, None, inner_codes, inner_scales, problem, target)
    _multiply(inner_codes, inner_scales, call.down, dealt, order, weights, terms, plan, target, None, gated=False)
    add_terms(terms, ids, call.out, problem.gate_up.groups)


def _warps(x: torch.Tensor) -> int:
    """How many warps share a row, a power of two."""
    return min(WARPS, 1 << (max(1, x.shape[1] // PER_WARP) - 1).bit_length())


def _quantise(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    place: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    problem: ExpertsProblem,
    target: Target,
) -> None:
    warps = _warps(x)
    routed_rows.quantise_rows[(len(x),)](
        x,
        ids,
        place,
        codes,
        scales,
        problem.k,
        problem.gate_up.groups,
        x.shape[1],
        *x.stride(),
        BLOCK=warps * PER_WARP,
        FP8_CAST=True,
        num_warps=warps,
        **pdl.launched(target),
    )


def _multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: PackedWeight,
    dealt: tuple[torch.Tensor, torch.Tensor],
    order: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    plan: ExpertsPlan,
    target: Target,
    clamp: float | None,
    *,
    gated: bool,
) -> None:
    packed, scales, _ = weight
    spans, count = dealt
    words, scales = packed.view(torch.int32), scales.view(torch.int64)
    tiles = out.shape[1] * 2 // plan.gate_up_block_n if gated else out.shape[1] // plan.down_block_n
    ctas = CTAS[plan.block_m]
    experts.multiply[(min(ctas * target.num_sms, spans.shape[0] * tiles),)](
        _boxes_of(x if x_scales is None else x.view(torch.float8_e4m3fn), [ROWS, BLOCK_K]),
        x_scales,
        _boxes_of(words, [1, CONSUMERS * BOX, STEP // 8]),
        scales,
        spans,
        count,
        order,
        weights,
        out,
        tiles,
        out.shape[1] if gated else CONSUMERS * BOX,
        words.shape[2] // 4,
        out.shape[1] // 128,
        0.0 if clamp is None else clamp,
        *scales.stride()[:2],
        GATED=gated,
        CLAMPED=clamp is not None,
        BLOCK_M=plan.block_m,
        CTAS=ctas,
        STAGES=plan.num_stages,
        num_warps=4,
        maxnreg=plan.registers,
        launch_pdl=True,
    )


def _boxes_of(tensor: torch.Tensor, shape: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, shape, _swizzled(tensor))


def _swizzled(tensor: torch.Tensor) -> gl.NVMMASharedLayout:
    """Of boxes whose rows have a multiple of 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize, rank=tensor.dim())
