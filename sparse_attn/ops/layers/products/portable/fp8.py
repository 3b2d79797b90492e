"""The grouped product of rows that are quantised to fp8 and of packed weights.

``quantise`` gives every 128 columns of a row a power of two that brings their largest magnitude to 448 at most.
``multiply`` adds up products of BLOCK_K columns, within one scale block, on the matrix unit, multiplies them by both
scales in fp32, and adds them in fp32. Codes of e2m1 become those of e4m3, which has all of their values. Without fp8
units codes are multiplied as bf16, of which they are values, too.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import decode_fp8_bf16, encode_scaled, finite_or_nan, pow2_exponent
from sparse_attn.device.output_tiles import first_output, scale_row_of
from sparse_attn.device.packed_dot import decode_scale
from sparse_attn.ops.layers.products.portable.kernels import tile_of


@triton.jit
def _as_e4m3(nibbles):
    """Codes of e2m1, the lower four bits -> those of e4m3, int32."""
    # e2m1's values of 1 and more have e4m3 codes four apart; 0 and 0.5 do not follow.
    magnitude = nibbles & 7
    return tl.where(magnitude < 2, magnitude * 0x30, 0x30 + 4 * magnitude) | ((nibbles & 8) << 4)


@triton.jit(do_not_specialize=["rows", "groups", "stride_scale_row", "stride_scale_group"])
def quantise(
    x,  # [rows, columns]
    codes,  # uint8 [rows, columns padded to GROUP], contiguous
    scales,  # fp32 [rows, groups]
    rows,
    columns,
    groups,  # of columns
    stride_row,  # this and the next are specialised: 16 bytes are read at once where they allow it
    stride_column,
    stride_scale_row,
    stride_scale_group,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # of a CTA
    GROUPS: tl.constexpr,  # of a CTA
    FP8_CAST: tl.constexpr,  # as encode_scaled's
    PDL: tl.constexpr,
):
    """Neighbours are rows of one group of columns: scales that torch takes lie group by group."""
    pdl.wait(PDL)
    one, column = tl.arange(0, ROWS * GROUPS), tl.arange(0, GROUP)
    row = tl.program_id(0).to(tl.int64) * ROWS + one % ROWS
    group = tl.program_id(1) * GROUPS + one // ROWS
    inside = (row < rows) & (group < groups)
    at = group[:, None] * GROUP + column[None, :]
    source = x + (row * stride_row)[:, None] + at.to(tl.int64) * stride_column
    values = tl.load(source, mask=inside[:, None] & (at < columns), other=0.0)
    # Infinities and NaN do not count for the scale.
    values, magnitudes = finite_or_nan(values.to(tl.float32))
    exponent = pow2_exponent(tl.max(magnitudes, 1))
    found = encode_scaled(values, exponent[:, None], FP8_CAST)
    tl.store(codes + (row * groups)[:, None] * GROUP + at, found, mask=inside[:, None])
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row * stride_scale_row + group.to(tl.int64) * stride_scale_group, scale, mask=inside)


@triton.jit(do_not_specialize=["rows", "groups", "first_row", "stride_ends"])
def multiply(
    x,  # e4m3 [rows, columns padded], contiguous; with FP8_DOT of that type, else bytes
    x_scales,  # fp32 [rows, columns / GROUP], contiguous
    ends,  # int32 [groups] or None
    codes,  # [groups, outputs, columns or columns / 2], columns contiguous: e4m3 as x, e2m1 in bytes
    scales,  # fp32 or uint8 [groups, blocks of rows, blocks of columns]
    out,  # [rows, outputs], contiguous
    rows,
    groups,
    outputs,
    columns,
    first_row,
    stride_ends,
    stride_codes_group,
    stride_codes_row,
    stride_scales_group,
    stride_scales_row,
    stride_scales_column,
    GROUPS_PADDED: tl.constexpr,
    CODES: tl.constexpr,  # "e4m3", "e2m1"
    E8M0: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # columns under a scale of a row, a multiple of BLOCK_K
    FP8_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    tile = tl.program_id(0)
    group, first, end = tile_of(ends, stride_ends, rows, groups, tile, GROUPS_PADDED, BLOCK_M)
    # There are as many tiles as any ends might need.
    if first >= end:
        return
    ONE_SCALE: tl.constexpr = BLOCK_ROWS % BLOCK_N == 0
    start = first_output(tl.program_id(1), first_row, ONE_SCALE, BLOCK_N)
    row, output = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    row_inside, output_inside = row < end, (output >= 0) & (output < outputs)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if group < groups:
        steps, column = tl.cdiv(columns, BLOCK_K), tl.arange(0, BLOCK_K)
        # What is outside is read elsewhere in bounds, and not stored.
        own = tl.minimum(tl.maximum(output, 0), outputs - 1).to(tl.int64)
        x_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * tl.cdiv(columns, GROUP) * GROUP
        code_rows = codes + group.to(tl.int64) * stride_codes_group + own * stride_codes_row
        scale_rows = scales + group.to(tl.int64) * stride_scales_group
        scale_rows += scale_row_of(start, own, first_row, ONE_SCALE, BLOCK_ROWS) * stride_scales_row
        scale_of = x_scales + tl.minimum(row, rows - 1).to(tl.int64) * tl.cdiv(columns, GROUP)
        for step in range(steps):
            at = step * BLOCK_K + column
            mine = tl.load(x_rows + at[None, :])
            # Codes come as [BLOCK_K, BLOCK_N], or are decoded and transposed.
            if CODES == "e4m3":
                other: tl.constexpr = 0.0 if FP8_DOT else 0
                values = tl.load(code_rows[None, :] + at[:, None], mask=(at < columns)[:, None], other=other)
            else:
                at_byte = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
                inside = (at_byte < columns // 2)[None, :]
                pairs = tl.load(code_rows[:, None] + at_byte[None, :], mask=inside, other=0).to(tl.int32)
                pairs = tl.join(_as_e4m3(pairs & 15), _as_e4m3(pairs >> 4))
                values = tl.trans(tl.reshape(pairs, [BLOCK_N, BLOCK_K])).to(tl.uint8)
                if FP8_DOT:
                    values = values.to(tl.float8e4nv, bitcast=True)
            if FP8_DOT:
                product = tl.dot(mine, values, out_dtype=tl.float32)
            # Without fp8 units: e4m3 values are bf16 values.
            else:
                mine, values = decode_fp8_bf16(mine, False), decode_fp8_bf16(values, False)
                product = cast.dot(mine, values, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            # Both scales are applied to the step's product.
            scale = tl.load(scale_rows + (step * BLOCK_K // BLOCK_COLUMNS) * stride_scales_column)
            row_scale, scale = tl.load(scale_of + step * BLOCK_K // GROUP), decode_scale(scale, E8M0)
            if ONE_SCALE:
                sums += product * (row_scale * scale)[:, None]
            else:
                sums += product * row_scale[:, None] * scale[None, :]
    target = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, cast.cast(sums, out.dtype.element_ty), mask=row_inside[:, None] & output_inside[None, :])
