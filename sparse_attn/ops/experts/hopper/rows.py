"""Rows as the product reads them."""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.fp8 import encode_scaled, finite_or_nan, pow2_exponent
from sparse_attn.device.mxfp4 import grouped_codes


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


@triton.jit(do_not_specialize=["k", "tokens", "columns"])
def quantise_rows(
    x,  # [tokens, columns]
    order,  # as sort_rows'; or None: row r is that of x
    codes,  # uint8 [rows, columns], contiguous, in the order of device/mxfp4_operand.py
    scales,  # fp32 [rows], a power of two each
    k,
    tokens,
    columns,  # a multiple of 128
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,  # a multiple of 128
    FP8_CAST: tl.constexpr,  # as encode_scaled's
    PDL: tl.constexpr,
):
    """A row a CTA, which reads it twice."""
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = row
    if order is not None:
        token = tl.minimum(tl.maximum(tl.load(order + row) // k, 0), tokens - 1).to(tl.int64)
    source = x + token * stride_row
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + at
        values = tl.load(source + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0)
        largest = tl.maximum(largest, finite_or_nan(values.to(tl.float32))[1])
    exponent = pow2_exponent(tl.max(largest, 0))
    for begin in range(0, columns, BLOCK):
        column = begin + at
        values = tl.load(source + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0)
        found = encode_scaled(finite_or_nan(values.to(tl.float32))[0], exponent, FP8_CAST)
        found = grouped_codes(tl.reshape(found, [BLOCK // 128, 128]), BLOCK // 128)
        tl.store(codes + row * columns + column, tl.reshape(found, [BLOCK]), mask=column < columns)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["spans_count"])
def keep_spans(
    dealt,  # int32 [spans, 3], as order_rows deals them
    spans,  # int32 [spans, 3]: those of them with rows, in their order
    count,  # int32 [1]: how many these are
    spans_count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """So that CTAs that take every n-th tile have equally many."""
    pdl.wait(PDL)
    at = tl.arange(0, BLOCK)
    found = tl.zeros([], tl.int32)
    for begin in range(0, spans_count, BLOCK):
        source = dealt + 3 * (begin + at)
        expert = tl.load(source, mask=begin + at < spans_count, other=-1)
        held = expert >= 0
        to = spans + 3 * (found + tl.cumsum(held.to(tl.int32), 0) - 1)
        tl.store(to, expert, mask=held)
        for n in tl.static_range(1, 3):
            tl.store(to + n, tl.load(source + n, mask=held, other=0), mask=held)
        found += tl.sum(held.to(tl.int32), 0)
    tl.store(count, found)
