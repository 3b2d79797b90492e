"""One program per token and block of heads: load a row, rotate its slice, store it whole.

Floor: bytes, 2 * tokens * heads * dim * itemsize; a second load of rotated elements comes from L1. Bits equal the
reference's when launched with enable_fp_fusion=False.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast
from sparse_attn.device.rope import look_up, pair_of, rotate


@triton.jit(do_not_specialize=["table_rows"])
def apply_rope(
    x,  # [tokens, HEADS, DIM]
    positions,  # int32 or int64 [tokens]
    cos_sin,  # fp32 [table_rows, WIDTH]
    out,  # like x, contiguous
    table_rows,
    stride_x_token,
    stride_x_head,
    stride_x_dim,
    stride_positions_token,
    stride_table_row,
    stride_table_column,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, DIM_PADDED)
    # A token's position picks its row of the table; live: the table has it.
    position = tl.load(positions + token * stride_positions_token).to(tl.int64)
    rotated, partner, frequency, is_first = pair_of(column, START, WIDTH, INTERLEAVED)
    cos, sin, live = look_up(
        cos_sin, position, table_rows, rotated, frequency, stride_table_row, stride_table_column, WIDTH
    )
    turns = rotated & live
    if INVERSE:
        sin = -1.0 * sin

    # Rotated elements of a position outside the table are zeros; others are copied.
    source = x + token * stride_x_token + head[:, None].to(tl.int64) * stride_x_head
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    read = inside & (live | ~rotated)[None, :]
    values = tl.load(source + column[None, :].to(tl.int64) * stride_x_dim, mask=read, other=0.0)
    partners = tl.load(
        source + partner[None, :].to(tl.int64) * stride_x_dim, mask=inside & turns[None, :], other=0.0
    ).to(tl.float32)
    turned = rotate(values.to(tl.float32), partners, cos[None, :], sin[None, :], turns[None, :], is_first[None, :])
    # Other columns keep their bits: they do not pass through fp32.
    turned = tl.where(turns[None, :], cast(turned, x.dtype.element_ty), values)
    target = out + (token * HEADS + head[:, None]) * DIM + column[None, :]
    tl.store(target, turned, mask=inside)
