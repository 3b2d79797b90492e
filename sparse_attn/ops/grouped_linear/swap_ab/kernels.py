"""The grouped product of few rows: a weight's tile is decoded in registers and multiplied by all rows of its group.

``device.packed_dot.place_rows`` brings the rows into the order in which they are read. A CTA of ``swap_ab`` has BLOCK_N
outputs of one group, up to BLOCK_M of the group's rows, and a part of the columns. With more than one split it leaves
fp32 partials, which ``add_splits`` adds up in order. device/packed_dot.py multiplies.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.packed_dot import exact_packed_dot
from sparse_attn.ops.grouped_linear.portable.kernels import tile_of


@triton.jit(do_not_specialize=["rows", "groups", "first_row", "stride_ends", "split_steps"])
def swap_ab(
    x,  # bf16 [rows, columns], contiguous, as place_rows leaves them
    ends,  # int32 [groups] or None
    codes,  # int32 words of [groups, outputs, columns] codes, contiguous in a row
    scales,  # fp32 or uint8 [groups, blocks of rows, blocks of columns], contiguous in a row
    out,  # bf16 [rows, outputs], or fp32 [splits, rows, outputs], contiguous
    rows,
    groups,
    outputs,
    columns,
    first_row,  # rows of the first scale block that lie before the weight
    split_steps,  # of BLOCK_K columns
    stride_ends,
    stride_codes_group,  # in words
    stride_codes_row,
    stride_scales_group,
    stride_scales_row,
    GROUPS_PADDED: tl.constexpr,  # above groups
    CODES: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a scale block
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAY: tl.constexpr,  # "fast" or "plain"
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    tile, split = tl.program_id(0), tl.program_id(2)
    if ends is None:
        group = tl.full([], 0, tl.int32)
        first, end = tile * BLOCK_M, rows
    else:
        group, first, end = tile_of(ends, stride_ends, rows, groups, tile, GROUPS_PADDED, BLOCK_M)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_inside = row < end
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if group < groups:
        own = tl.minimum(output, outputs - 1).to(tl.int64)  # reads one output more than once, and stores it once
        words = codes + group.to(tl.int64) * stride_codes_group + own * stride_codes_row
        scale_rows = scales + group.to(tl.int64) * stride_scales_group
        scale_rows += ((own + first_row) // BLOCK_ROWS) * stride_scales_row
        begin = split * split_steps
        sums = exact_packed_dot(
            x, row.to(tl.int64) * columns, row_inside, words, scale_rows, begin,
            tl.minimum(begin + split_steps, columns // BLOCK_K), CODES, E8M0, BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K,
            WAY,
        )  # fmt: skip
    at = (split.to(tl.int64) * rows + row.to(tl.int64)) * outputs
    target = out + at[None, :] + output[:, None]
    mask = row_inside[None, :] & (output < outputs)[:, None]
    tl.store(target, cast.cast(sums, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "splits"])
def add_splits(
    partials,  # fp32 [splits, count]
    out,  # bf16 [count]
    count,
    splits,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sums = tl.zeros([BLOCK], tl.float32)
    source = partials + at
    for _ in range(splits):
        sums += tl.load(source, mask=inside, other=0.0)
        source += count
    tl.store(out + at, cast.cast(sums, out.dtype.element_ty), mask=inside)
