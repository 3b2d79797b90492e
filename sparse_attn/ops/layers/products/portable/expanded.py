"""The product of many rows and codes that were expanded to bf16 before it.

``expand`` decodes each code once, where decoding in registers repeats it for every tile of rows. Codes of e4m3 and e2m1
are bf16 values, and so they are times a power of two (E8M0). ``multiply`` is a product of bf16 on the matrix unit. With
scales of fp32 the columns of a step lie within one scale block: the step's product is multiplied by its scale and added
to the sums, in fp32.

Floors: bytes, codes once, rows and outputs once; expanded values are written and read once more, mostly in the L2.
Operations, the matrix unit in bf16.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import decode_fp8
from sparse_attn.device.output_tiles import first_output, scale_row_of
from sparse_attn.device.packed_dot import decode_scale, e2m1
from sparse_attn.ops.layers.products.portable.kernels import tile_of


@triton.jit(do_not_specialize=["outputs", "first_row"])
def expand(
    codes,  # uint8 [groups, outputs, columns or columns / 2], columns contiguous
    scales,  # as stored [groups, blocks of rows, blocks of columns]
    expanded,  # bf16 [groups, outputs, columns], contiguous, at the start of scratch
    outputs,
    columns,
    first_row,  # rows of the first scale block that lie before the first output
    stride_codes_group,
    stride_codes_row,
    stride_scales_group,
    stride_scales_row,
    stride_scales_column,
    CODES: tl.constexpr,  # "e4m3", "e2m1"
    E8M0: tl.constexpr,  # values are scaled
    BLOCK_ROWS: tl.constexpr,  # of a scale block
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of one output, of a CTA
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    output, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = codes + group * stride_codes_group + output.to(tl.int64) * stride_codes_row
    at = block * BLOCK + tl.arange(0, BLOCK)
    if CODES == "e4m3":
        values = decode_fp8(tl.load(source + at, mask=at < columns, other=0), False)
    else:
        # Two codes a byte, side by side.
        at_byte = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        pairs = tl.load(source + at_byte, mask=at_byte < columns // 2, other=0).to(tl.int32)
        values = tl.reshape(tl.join(e2m1(pairs & 15), e2m1(pairs >> 4)), [BLOCK])
    # A power of two: bf16 holds the product exactly.
    if E8M0:
        row = ((output + first_row) // BLOCK_ROWS).to(tl.int64)
        own = scales + group * stride_scales_group + row * stride_scales_row
        column = (at // BLOCK_COLUMNS).to(tl.int64) * stride_scales_column
        values *= decode_scale(tl.load(own + column, mask=at < columns, other=0), E8M0)
    target = expanded + (group * outputs + output) * columns + at
    tl.store(target, cast.round_to_bf16(values), mask=at < columns)


@triton.jit(do_not_specialize=["rows", "groups", "outputs", "first_row", "stride_ends"])
def multiply(
    x,  # bf16 [rows, columns], columns contiguous
    ends,  # int32 [groups] or None
    expanded,  # bf16 [groups, outputs, columns], contiguous, at the start of scratch
    scales,  # as stored [groups, blocks of rows, blocks of columns]
    out,  # [rows, outputs of the whole weight]: these outputs' columns
    rows,
    groups,
    outputs,
    columns,
    first_row,  # rows of the first scale block that lie before the first of these outputs
    stride_x_row,
    stride_ends,
    stride_scales_group,
    stride_scales_row,
    stride_scales_column,
    stride_out_row,
    GROUPS_PADDED: tl.constexpr,
    E8M0: tl.constexpr,  # values are scaled
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # a multiple of BLOCK_K where values are not scaled
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    group, first, end = tile_of(ends, stride_ends, rows, groups, tl.program_id(0), GROUPS_PADDED, BLOCK_M)
    # There are as many tiles as any ends might need.
    if first >= end:
        return
    ONE_SCALE: tl.constexpr = BLOCK_ROWS % BLOCK_N == 0
    start = first_output(tl.program_id(1), first_row, ONE_SCALE, BLOCK_N)
    row, output = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    output_inside = (output >= 0) & (output < outputs)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if group < groups:
        column, group64 = tl.arange(0, BLOCK_K), group.to(tl.int64)
        # The row of scales of the tile, or of each output.
        own = tl.minimum(tl.maximum(output, 0), outputs - 1).to(tl.int64)  # others are read and not stored
        x_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride_x_row
        weight_rows = expanded + (group64 * outputs + own)[None, :] * columns
        scale_rows = scales + group64 * stride_scales_group
        scale_rows += scale_row_of(start, own, first_row, ONE_SCALE, BLOCK_ROWS) * stride_scales_row
        for begin in range(0, columns, BLOCK_K):
            at = begin + column
            mine = tl.load(x_rows + at[None, :], mask=(at < columns)[None, :], other=0.0)
            values = tl.load(weight_rows + at[:, None], mask=(at < columns)[:, None], other=0.0)
            # Values are scaled, or one scale block covers the step.
            if E8M0:
                sums = cast.dot(mine, values, sums)
            else:
                product = cast.dot(mine, values, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                scale = tl.load(scale_rows + (begin // BLOCK_COLUMNS) * stride_scales_column)
                sums += product * (scale if ONE_SCALE else scale[None, :])
    target = out + row.to(tl.int64)[:, None] * stride_out_row + output[None, :]
    tl.store(target, cast.cast(sums, out.dtype.element_ty), mask=(row < end)[:, None] & output_inside[None, :])
