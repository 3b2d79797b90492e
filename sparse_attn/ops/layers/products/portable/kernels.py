"""The grouped product on every GPU: a weight's tile is unpacked in registers and multiplied in the dtype of the rows.

A CTA has a tile of rows of one group, and a tile of that group's outputs. Which group a tile belongs to follows from
the ends on the device. There are as many tiles as any ends can ask for; those that none needs end at once.

1. Find the group, and its rows that the tile holds.
2. For BLOCK_K columns at a time: load rows and codes, unpack the codes, multiply on the matrix units. Where the columns
   lie within one scale block, the product is multiplied by its scale and added to the sums, in fp32. Where they are of
   several (SCALED_VALUES), the values are multiplied by their scales first: powers of two, so nothing is rounded.
3. Store the sums in the dtype of the rows.

Codes of e4m3 and e2m1 are exact in bf16, fp16 and fp32, so only sums are rounded. With few rows the bound is the
weight's bytes; with many, the matrix units in the dtype of the rows.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import decode_exponent, decode_fp8
from sparse_attn.device.order import greater

E8M0_NAN = tl.constexpr(255)


@triton.jit
def tile_of(ends, stride_ends, rows, groups, tile, GROUPS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row, end) of a tile of rows. Rows behind the last end are a group of their own, ``groups``; a tile
    that no group needs has no rows. An end below one before it is that one. Without ends all rows are of group 0."""
    if ends is None:
        return tl.full([], 0, tl.int32), tile * BLOCK_M, rows
    else:
        # An end below one before counts as that one: a running maximum.
        group = tl.arange(0, GROUPS_PADDED)
        last = tl.load(ends + group * stride_ends, mask=group < groups, other=2147483647)
        last = tl.associative_scan(tl.minimum(tl.maximum(last, 0), rows), 0, greater)
        before = tl.load(ends + (group - 1) * stride_ends, mask=(group > 0) & (group <= groups), other=0)
        before = tl.associative_scan(tl.minimum(tl.maximum(before, 0), rows), 0, greater)
        # How many tiles each group needs; the tile is of the first group that reaches it.
        tiles = tl.where(group <= groups, tl.cdiv(last - before, BLOCK_M), 0)
        tiles_to = tl.cumsum(tiles, 0)
        found = tl.sum((tiles_to <= tile).to(tl.int32), 0)
        mine = group == found
        first = tl.sum(tl.where(mine, before + (tile - tiles_to + tiles) * BLOCK_M, 0), 0)
        return found, first, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit
def _e2m1(nibbles):
    """e2m1 codes, the lower four bits -> fp32."""
    magnitude = nibbles & 7
    # 0 and 1 are 0 and 0.5; others have e2m1's exponent and mantissa at the places of fp32's.
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)
    return (bits | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(codes, E8M0: tl.constexpr):
    if E8M0:
        return tl.where(codes == E8M0_NAN, float("nan"), decode_exponent(codes))
    else:
        return codes


@triton.jit
def _spread(scale, BLOCK_N: tl.constexpr, SCALES: tl.constexpr, EACH: tl.constexpr):
    """[BLOCK_N, SCALES] -> [BLOCK_N, SCALES * EACH], each EACH times."""
    whole = tl.broadcast_to(scale[:, :, None], [BLOCK_N, SCALES, EACH])
    return tl.reshape(whole, [BLOCK_N, SCALES * EACH])


@triton.jit(do_not_specialize=["rows", "groups", "first_row", "stride_ends"])
def grouped_linear(
    x,  # bf16, fp16 or fp32 [rows, columns]
    ends,  # int32 [groups] or None
    codes,  # uint8 [groups, outputs, columns or columns / 2], or plain values
    scales,  # fp32 or uint8 [groups, blocks of rows, blocks of columns], or None
    out,  # [rows, outputs], contiguous
    rows,
    groups,
    outputs,
    columns,
    first_row,  # rows of the first scale block that lie before the weight
    stride_x_row,
    stride_x_column,
    stride_ends,
    stride_codes_group,
    stride_codes_row,
    stride_codes_column,
    stride_scales_group,
    stride_scales_row,
    stride_scales_column,
    GROUPS_PADDED: tl.constexpr,  # above groups
    CODES: tl.constexpr,  # "plain", "e4m3", "e2m1"
    E8M0: tl.constexpr,
    SCALED_VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a scale block
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides BLOCK_COLUMNS, or with SCALED_VALUES is a multiple of it
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    tile = tl.program_id(0)
    group, first, end = tile_of(ends, stride_ends, rows, groups, tile, GROUPS_PADDED, BLOCK_M)
    # There are as many tiles as any ends might need.
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, output_inside = row < end, output < outputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Rows behind the last end are of no group: they stay 0.
    if group < groups:
        PER_BYTE: tl.constexpr = 2 if CODES == "e2m1" else 1
        column = tl.arange(0, BLOCK_K)
        place = tl.arange(0, BLOCK_K // PER_BYTE)
        stored = columns // PER_BYTE
        group64 = group.to(tl.int64)
        x_rows = x + row.to(tl.int64)[:, None] * stride_x_row
        code_rows = codes + group64 * stride_codes_group + output.to(tl.int64)[:, None] * stride_codes_row
        # The row of scales of each output.
        if CODES != "plain":
            scale_rows = scales + group64 * stride_scales_group
            scale_rows += ((output + first_row) // BLOCK_ROWS).to(tl.int64) * stride_scales_row
        for begin in range(0, columns, BLOCK_K):
            at = begin + column
            mine = tl.load(
                x_rows + at.to(tl.int64)[None, :] * stride_x_column,
                mask=row_inside[:, None] & (at < columns)[None, :], other=0.0,
            )  # fmt: skip
            at_code = begin // PER_BYTE + place
            values = tl.load(
                code_rows + at_code.to(tl.int64)[None, :] * stride_codes_column,
                mask=output_inside[:, None] & (at_code < stored)[None, :], other=0,
            )  # fmt: skip
            # Several scale blocks a step: the scale of each value.
            if SCALED_VALUES:
                SCALES: tl.constexpr = BLOCK_K // BLOCK_COLUMNS
                at_scale = begin // BLOCK_COLUMNS + tl.arange(0, SCALES)
                scale = tl.load(
                    scale_rows[:, None] + at_scale.to(tl.int64)[None, :] * stride_scales_column,
                    mask=output_inside[:, None] & (at_scale < tl.cdiv(columns, BLOCK_COLUMNS))[None, :], other=0,
                )  # fmt: skip
                scale = _spread(_scale(scale, E8M0), BLOCK_N, SCALES, BLOCK_COLUMNS // PER_BYTE)
            if CODES == "e4m3":
                values = decode_fp8(values, False)
                if SCALED_VALUES:
                    values *= scale
            # Two codes a byte, side by side.
            elif CODES == "e2m1":
                low, high = _e2m1(values.to(tl.int32) & 15), _e2m1(values.to(tl.int32) >> 4)
                if SCALED_VALUES:
                    low *= scale
                    high *= scale
                values = tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K])
            values = tl.trans(cast.convert(values, x.dtype.element_ty))
            if CODES == "plain" or SCALED_VALUES:
                sums = cast.dot(mine, values, sums)
            # One scale block a step: its product is scaled in fp32.
            else:
                product = cast.dot(mine, values, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                source = scale_rows + (begin // BLOCK_COLUMNS) * stride_scales_column
                scale = _scale(tl.load(source, mask=output_inside, other=0), E8M0)
                sums += product * scale[None, :]
    target = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, cast.cast(sums, out.dtype.element_ty), mask=row_inside[:, None] & output_inside[None, :])
