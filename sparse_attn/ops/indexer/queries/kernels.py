"""One program per token and block of heads: load, rotate, transform, find the scale, write codes and folded weights.

Floor: bytes, tokens * heads * (dim * (itemsize + 1) + 8); a second load of rotated elements comes from L1. Bits equal
the reference's when launched with enable_fp_fusion=False: same products, sums and order, correctly rounded quotients.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast
from sparse_attn.device.fp8 import ceil_pow2, encode_fp8, finite_or_nan
from sparse_attn.device.mxfp4 import quantise_mxfp4
from sparse_attn.device.rope import hadamard, look_up, pair_of, rotate, swap_neighbours


@triton.jit(do_not_specialize=["table_rows"])
def indexer_q_rope_quant(
    q,  # [tokens, heads, dim]
    weights,  # [tokens, heads]
    positions,  # int32 or int64 [tokens]
    cos_sin,  # fp32 [table_rows, WIDTH]
    query,  # uint8 or floating [tokens, heads, dim]; MXFP4: uint8 [tokens, heads, DIM // 2 + DIM // 32]
    folded,  # fp32 [tokens, heads]
    table_rows,
    weight_scale,
    amax_floor,
    fp8_max,
    stride_q_token,
    stride_q_head,
    stride_q_dim,
    stride_weights_token,
    stride_weights_head,
    stride_positions_token,
    stride_table_row,
    stride_table_column,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr,
    QUANTISE: tl.constexpr,
    MXFP4: tl.constexpr,
    POW2: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    STAGES: tl.constexpr,  # log2(DIM) where HADAMARD
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    # A token's position picks its row of the table; live: the table has it.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, DIM_PADDED)
    position = tl.load(positions + token * stride_positions_token).to(tl.int64)
    rotated, partner, frequency, is_first = pair_of(column, START, WIDTH, INTERLEAVED)
    cos, sin, live = look_up(
        cos_sin, position, table_rows, rotated, frequency, stride_table_row, stride_table_column, WIDTH
    )

    # A position outside the table gives zeros.
    source = q + token * stride_q_token + head[:, None].to(tl.int64) * stride_q_head
    inside = (head < HEADS)[:, None] & live
    values = tl.load(source + column[None, :] * stride_q_dim, mask=inside & (column < DIM)[None, :], other=0.0)
    values = values.to(tl.float32)
    # The other element of each pair: from registers where pairs are neighbours, else by a second load.
    if INTERLEAVED and START % 2 == 0:
        partners = swap_neighbours(values, BLOCK_HEADS, DIM_PADDED)
    else:
        partners = tl.load(source + partner[None, :] * stride_q_dim, mask=inside & rotated[None, :], other=0.0)
    values = rotate(values, partners.to(tl.float32), cos[None, :], sin[None, :], rotated[None, :], is_first[None, :])
    # Rounded to the input's type after each step, as the reference does.
    values = cast(values, q.dtype.element_ty).to(tl.float32)
    if HADAMARD:
        values = cast(hadamard(values, BLOCK_HEADS, DIM_PADDED, STAGES), q.dtype.element_ty).to(tl.float32)

    weight = tl.load(
        weights + token * stride_weights_token + head * stride_weights_head, mask=(head < HEADS) & live, other=0.0
    )
    weight = weight.to(tl.float32) * weight_scale
    # One scale a head, which is folded into its weight.
    if QUANTISE:
        values, magnitude = finite_or_nan(values)
        scale = tl.div_rn(tl.maximum(tl.max(magnitude, 1), amax_floor), fp8_max)
        if POW2:
            scale = ceil_pow2(scale)
            inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # exact
            out = encode_fp8(values * inverse[:, None], FNUZ)
        else:
            out = encode_fp8(tl.div_rn(values, scale[:, None]), FNUZ)
        weight = weight * scale
    elif not MXFP4:
        out = cast(values, query.dtype.element_ty)
    weight = tl.where(live, weight, 0.0)

    # MXFP4: codes of all heads, then their scales.
    row = token * HEADS + head
    if MXFP4:
        GROUPS: tl.constexpr = DIM_PADDED // 32
        code, exponent = quantise_mxfp4(values, BLOCK_HEADS, GROUPS)
        block = query + token * HEADS * (DIM // 2 + DIM // 32)
        byte, group = tl.arange(0, DIM_PADDED // 2), tl.arange(0, GROUPS)
        real = (head < HEADS)[:, None]
        tl.store(block + head[:, None] * (DIM // 2) + byte[None, :], code, mask=real & (byte < DIM // 2)[None, :])
        scale_at = block + HEADS * (DIM // 2) + head[:, None] * (DIM // 32) + group[None, :]
        tl.store(scale_at, exponent, mask=real & (group < DIM // 32)[None, :])
    else:
        inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
        tl.store(query + row[:, None] * DIM + column[None, :], out, mask=inside)
    tl.store(folded + row, weight, mask=head < HEADS)
