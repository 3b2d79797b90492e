"""The grouped product of few rows: a weight's tile is decoded in registers and multiplied by all rows of its group.

``device.packed_dot.place_rows`` brings the rows into the order in which they are read. A CTA of ``swap_ab`` has BLOCK_N
outputs of one group, up to BLOCK_M of the group's rows, and a part of the columns. With more than one split it leaves
fp32 partials; the CTA that comes last adds them up, in the order of the splits. device/packed_dot.py multiplies.

A linear's CTAs know their weights before the rows are there. While they wait they ask for the first of them.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.packed_dot import exact_packed_dot
from sparse_attn.ops.layers.products.portable.kernels import tile_of


@triton.jit
def _added(source, mask, stride, splits, TOGETHER: tl.constexpr):
    """The sum of ``splits`` partials that lie ``stride`` apart, in order; TOGETHER are read at once, 2 or 4."""
    sums = tl.zeros(source.shape, tl.float32)
    # Loads are under way together; additions go in order.
    for split in range(0, splits, TOGETHER):
        here = source + split * stride
        first = tl.load(here, mask=mask, other=0.0, cache_modifier=".cg")
        second = tl.load(here + stride, mask=mask & (split + 1 < splits), other=0.0, cache_modifier=".cg")
        if TOGETHER == 4:
            third = tl.load(here + 2 * stride, mask=mask & (split + 2 < splits), other=0.0, cache_modifier=".cg")
            fourth = tl.load(here + 3 * stride, mask=mask & (split + 3 < splits), other=0.0, cache_modifier=".cg")
            sums = sums + first + second + third + fourth
        else:
            sums = sums + first + second
    return sums


@triton.jit(do_not_specialize=["rows", "groups", "first_row", "stride_ends", "split_steps", "splits"])
def swap_ab(
    x,  # bf16 [rows, columns], contiguous, as place_rows leaves them
    ends,  # int32 [groups] or None
    codes,  # int32 words of [groups, outputs, columns] codes, contiguous in a row
    scales,  # fp32 or uint8 [groups, blocks of rows, blocks of columns], contiguous in a row
    out,  # bf16 [rows, outputs], contiguous
    partials,  # SPLIT: fp32 [splits, rows, outputs], contiguous; else anything
    arrivals,  # SPLIT: int64 [tiles of rows, tiles of outputs], zero before and after; else anything
    rows,
    groups,
    outputs,
    columns,
    first_row,  # rows of the first scale block that lie before the weight
    split_steps,  # of BLOCK_K columns
    splits,
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
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of each output that are asked for early; 0 with ends, and with many rows
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(2)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(output, outputs - 1).to(tl.int64)  # reads one output more than once, and stores it once
    # This split's steps.
    begin = split * split_steps
    end_step = tl.minimum(begin + split_steps, columns // BLOCK_K)
    if PREFETCH > 0:
        # The weight is no launch's output: bring its first bytes to the L2 during the wait.
        STEP_BYTES: tl.constexpr = BLOCK_K // 2 if CODES == "e2m1" else BLOCK_K
        early = tl.minimum((end_step - begin) * STEP_BYTES, PREFETCH)
        pdl.prefetch(codes + own * stride_codes_row + begin * (STEP_BYTES // 4), early, PDL)
    pdl.wait(PDL)
    group, first, end = tile_of(ends, stride_ends, rows, groups, tile, GROUPS_PADDED, BLOCK_M)
    # There are as many tiles as any ends might need.
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_inside = row < end
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if group < groups:
        words = codes + group.to(tl.int64) * stride_codes_group + own * stride_codes_row
        scale_rows = scales + group.to(tl.int64) * stride_scales_group
        scale_rows += ((own + first_row) // BLOCK_ROWS) * stride_scales_row
        sums = exact_packed_dot(
            x, row.to(tl.int64) * columns, row_inside, words, scale_rows, begin, end_step, CODES, E8M0, BLOCK_COLUMNS,
            BLOCK_M, BLOCK_N, BLOCK_K, WAY,
        )  # fmt: skip
    at = (row.to(tl.int64) * outputs)[None, :] + output[:, None]
    mask = row_inside[None, :] & (output < outputs)[:, None]
    if SPLIT:
        # A partial for each split; the CTA that arrives last adds them up in order.
        stride = rows.to(tl.int64) * outputs
        tl.store(partials + split * stride + at, sums, mask=mask)
        tl.debug_barrier()  # all of the CTA's partials are there before it says so
        arrival = arrivals + tile * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == splits - 1:
            tl.store(arrival, 0)
            sums = _added(partials + at, mask, stride, splits, 4 if BLOCK_M <= 64 else 2)
            tl.store(out + at, cast.cast(sums, out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + at, cast.cast(sums, out.dtype.element_ty), mask=mask)
