"""The grouped product on every GPU: a weight's tile is unpacked in registers and multiplied in the dtype of the rows.

A CTA has a tile of rows of one group, and a tile of that group's outputs. Which group a tile belongs to follows from
the ends on the device. There are as many tiles as any ends can ask for; those that none needs end at once.

1. Find the group, and its rows that the tile holds.
2. For BLOCK_K columns at a time, all within one scale block: load rows and codes, unpack the codes without their scale,
   multiply on the matrix units, and add the product times the block's scale to the sums, in fp32.
3. Store the sums in the dtype of the rows.

Codes of e4m3 and e2m1 are exact in bf16, fp16 and fp32, so only sums are rounded. With few rows the bound is the
weight's bytes; with many, the matrix units in the dtype of the rows.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import decode_exponent, decode_fp8

E8M0_NAN = tl.constexpr(255)


@triton.jit
def _tile_of(ends, stride_ends, rows, tile, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row, end) of a tile of rows. Rows behind the last end are a group of their own, GROUPS; so is a
    tile that no group needs, which has no rows."""
    group = tl.arange(0, GROUPS_PADDED)
    last = tl.load(ends + group * stride_ends, mask=group < GROUPS, other=2147483647)
    last = tl.minimum(tl.maximum(last, 0), rows)
    before = tl.load(ends + (group - 1) * stride_ends, mask=(group > 0) & (group <= GROUPS), other=0)
    before = tl.minimum(tl.maximum(before, 0), rows)
    before = tl.where(group <= GROUPS, before, rows)
    tiles = tl.cdiv(tl.maximum(last - before, 0), BLOCK_M)
    tiles_to = tl.cumsum(tiles, 0)
    found = tl.sum((tiles_to <= tile).to(tl.int32), 0)
    mine = group == found
    first = tl.sum(tl.where(mine, before + (tile - tiles_to + tiles) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(mine, last, 0), 0)
    return found, first, end


@triton.jit
def _e2m1(nibbles):
    """e2m1 codes, the lower four bits -> fp32."""
    magnitude = nibbles & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)
    return (bits | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _values(codes, FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The values of a tile's codes without their scale, [BLOCK_N, BLOCK_K]."""
    if FORM == "plain":
        return codes
    elif FORM == "e4m3":
        return decode_fp8(codes, False)
    else:
        wide = codes.to(tl.int32)
        return tl.reshape(tl.join(_e2m1(wide & 15), _e2m1(wide >> 4)), [BLOCK_N, BLOCK_K])


@triton.jit(do_not_specialize=["rows", "first_row", "stride_ends"])
def grouped_linear(
    x,  # bf16, fp16 or fp32 [rows, columns]
    ends,  # int32 [GROUPS] or None
    codes,  # uint8 [GROUPS, outputs, columns or columns / 2], or plain values
    scales,  # fp32 or uint8 [GROUPS, blocks of rows, blocks of columns], or None
    out,  # [rows, outputs], contiguous
    rows,
    outputs,
    columns,
    first_row,  # of the first scale block, before the weight
    stride_x_row,
    stride_x_column,
    stride_ends,
    stride_codes_group,
    stride_codes_row,
    stride_codes_column,
    stride_scales_group,
    stride_scales_row,
    stride_scales_column,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    FORM: tl.constexpr,  # "plain", "e4m3", "e2m1"
    E8M0: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a scale block
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides BLOCK_COLUMNS
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    tile = tl.program_id(0)
    if ends is None:
        group, first, end = tl.full([], 0, tl.int32), tile * BLOCK_M, rows
    else:
        group, first, end = _tile_of(ends, stride_ends, rows, tile, GROUPS, GROUPS_PADDED, BLOCK_M)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, output_inside = row < end, output < outputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if group < GROUPS:
        PER_BYTE: tl.constexpr = 2 if FORM == "e2m1" else 1
        column = tl.arange(0, BLOCK_K)
        place = tl.arange(0, BLOCK_K // PER_BYTE)
        stored = columns // PER_BYTE
        group64 = group.to(tl.int64)
        x_rows = x + row.to(tl.int64)[:, None] * stride_x_row
        code_rows = codes + group64 * stride_codes_group + output.to(tl.int64)[:, None] * stride_codes_row
        for begin in range(0, columns, BLOCK_K):
            at = begin + column
            mine = tl.load(
                x_rows + at.to(tl.int64)[None, :] * stride_x_column,
                mask=row_inside[:, None] & (at < columns)[None, :], other=0.0,
            )  # fmt: skip
            at_code = begin // PER_BYTE + place
            packed = tl.load(
                code_rows + at_code.to(tl.int64)[None, :] * stride_codes_column,
                mask=output_inside[:, None] & (at_code < stored)[None, :], other=0,
            )  # fmt: skip
            values = cast.convert(_values(packed, FORM, BLOCK_N, BLOCK_K), x.dtype.element_ty)
            product = cast.dot(mine, tl.trans(values), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            if FORM != "plain":
                source = scales + group64 * stride_scales_group + (begin // BLOCK_COLUMNS) * stride_scales_column
                source += ((output + first_row) // BLOCK_ROWS).to(tl.int64) * stride_scales_row
                scale = tl.load(source, mask=output_inside, other=0)
                if E8M0:
                    scale = tl.where(scale == E8M0_NAN, float("nan"), decode_exponent(scale))
                product *= scale[None, :]
            sums += product
    target = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, cast.cast(sums, out.dtype.element_ty), mask=row_inside[:, None] & output_inside[None, :])
