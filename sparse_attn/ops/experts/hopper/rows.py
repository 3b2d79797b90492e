"""Rows of bf16 as the product reads them."""

import triton
import triton.language as tl

from sparse_attn.device import pdl


@triton.jit(do_not_specialize=["k", "tokens"])
def sort_rows(
    x,  # [tokens, columns]
    order,  # int32 [rows]: row r is of token order[r] / k; what is there may be anything, and so is its row
    out,  # bf16 [rows, columns], contiguous, in the order of device/mxfp4_operand.py
    k,
    tokens,
    columns,
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,  # a multiple of 128
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row = tl.program_id(0)
    token = tl.minimum(tl.maximum(tl.load(order + row) // k, 0), tokens - 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * stride_row + at.to(tl.int64) * stride_column, mask=at < columns, other=0.0)
    values = tl.permute(tl.reshape(values, [BLOCK // 128, 4, 8, 2, 2]), [0, 2, 3, 1, 4])
    tl.store(out + row.to(tl.int64) * columns + at, tl.reshape(values, [BLOCK]), mask=at < columns)
