"""Launches of the Hopper kernels, and the TMA descriptors of what they copy."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparse_attn.ops.layers.linears.hopper import kernels, wide
from sparse_attn.ops.layers.linears.hopper.config import PRODUCER_REGISTERS, rows_at_once
from sparse_attn.ops.layers.linears.hopper.constants import BLOCK_K
from sparse_attn.ops.layers.linears.plan import Product, StreamPlan, scale_format


def multiply(product: Product, plan: StreamPlan) -> None:
    arguments, options = _launch(product, plan, torch.int32)
    kernels.stream_k[(plan.grid,)](*arguments, **options)


def multiply_wide(product: Product, plan: StreamPlan) -> None:
    for part in product.parts(rows_at_once(product.problem.rows)):
        arguments, options = _launch(part, plan, torch.int16)
        wide.stream_k_wide[(plan.grid,)](*arguments, **options)


def _launch(product: Product, plan: StreamPlan, word: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of either kernel, and its constants and options. word: the integer type that it loads codes as."""
    rows, _, codes, scales, out, problem, first_row, (partials,), arrivals = product
    assert scales is not None, "packed weights have scales"
    arguments = (
        _boxes(rows, plan.block_m, BLOCK_K), _boxes(codes[0].view(word), plan.block_n, BLOCK_K // word.itemsize),
        scales[0], out, partials, arrivals, problem.rows, problem.outputs, problem.columns // BLOCK_K, first_row,
        scales.stride(1),
    )  # fmt: skip
    options = dict(
        **scale_format(problem), STAGES=plan.num_stages, CONSUMER_REGISTERS=plan.consumer_registers,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, TOGETHER=plan.together, num_warps=4, maxnreg=plan.registers,
        launch_pdl=True,
    )  # fmt: skip
    return arguments, options


def _boxes(matrix: torch.Tensor, height: int, width: int) -> TensorDescriptor:
    """TMA boxes of ``height`` x ``width``. A single row may have any stride."""
    stride = matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.itemsize, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [height, width], swizzled)
