"""Sparse attention: one program per (row, block of heads, share of the row's keys), over one cache or two.

A key tile is gathered once and serves both products. Bytes: every named row once per block of heads. Operations:
2 * heads * keys * (d_qk + d_v) per row.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast, convert, dot
from sparse_attn.device.softmax import log2_sum, sink_factor, softmax_step
from sparse_attn.ops.attention.portable.load import interleaved_values, load_columns, planar_values


@triton.jit
def _row_range(indptr, token, capacity):
    """[begin, end) of a row's indices, inside [0, capacity]."""
    begin = tl.maximum(tl.load(indptr + token), 0)
    return begin, tl.maximum(tl.minimum(tl.load(indptr + token + 1), capacity), begin)


@triton.jit
def _attend_keys(
    q_value, q_rest, m, l, acc, cache, indices, begin, end, capacity, num_slots, block_size, scale_log2,
    stride_cache_block, stride_cache_slot, value_column, rest_column, D_V: tl.constexpr, D_REST: tl.constexpr,
    PAD_V: tl.constexpr, PAD_REST: tl.constexpr, GROUP: tl.constexpr, SCALE_AT: tl.constexpr, REST_AT: tl.constexpr,
    TOKEN_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, FNUZ: tl.constexpr, PAGED: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HOIST: tl.constexpr,
):  # fmt: skip
    """Take the keys indices[begin:end] of a cache into the softmax state (m, l, acc)."""
    dtype = q_value.dtype
    BLOCK_H: tl.constexpr = q_value.shape[0]
    key = tl.arange(0, BLOCK_K)
    # Hoisted addresses of a planar tile's matrix operands would not fit in registers beside acc and the tile.
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES, disable_licm=SCALE_BYTES > 0 or not HOIST):
        # Unsigned comparisons serve both ends of a range. A masked index load would cost a seventh of the time, so the
        # tile moves back where it would leave the buffer, and the keys before its row's share are left out.
        if SHORT:
            slot = tl.load(indices + start + key, mask=start + key < end, other=-1)
            bound = num_slots
        else:
            at = tl.minimum(start, capacity - BLOCK_K)
            slot = tl.load(indices + at + key)
            inside = (key - (start - at)).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)
            bound = tl.where(inside, num_slots, 0)
        valid = slot.to(tl.uint32, bitcast=True) < bound.to(tl.uint32)
        if SCALE_BYTES > 0:
            block = slot // block_size
            place = (slot - block * block_size).to(tl.int64)
            base = cache + block.to(tl.int64) * stride_cache_block
            scale_base = base + block_size.to(tl.int64) * TOKEN_BYTES + place * SCALE_BYTES
            base = base + place * TOKEN_BYTES
            value = planar_values(base, scale_base, value_column, valid, D_V, PAD_V, GROUP, REST_AT, FNUZ, dtype)
        else:
            if PAGED:
                block = slot // block_size
                offset = block.to(tl.int64) * stride_cache_block + (slot - block * block_size) * stride_cache_slot
            else:
                offset = slot.to(tl.int64) * stride_cache_slot
            base = cache + offset
            if GROUP > 0:
                value = interleaved_values(base, value_column, valid, D_V, PAD_V, GROUP, SCALE_AT, FNUZ, BLOCK_K)
                value = cast(value, dtype)
            else:
                value = convert(load_columns(base, value_column, D_V, PAD_V, valid), dtype)
        scores = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
        if D_REST > 0:
            if GROUP > 0:
                rest_base = (base + REST_AT).to(tl.pointer_type(tl.bfloat16))
                rest = load_columns(rest_base, rest_column, D_REST, PAD_REST, valid)
            else:
                rest = load_columns(base + D_V, rest_column, D_REST, PAD_REST, valid)
            scores = dot(q_rest, tl.trans(convert(rest, dtype)), scores)
        scores = dot(q_value, tl.trans(value), scores)
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        p, rescale, m, l = softmax_step(scores, m, l)
        acc = dot(cast(p, dtype), value, acc * rescale[:, None])
    return m, l, acc


@triton.jit(
    do_not_specialize=[
        "num_slots", "capacity", "block_size", "extra_num_slots", "extra_capacity", "extra_block_size",
    ]
)  # fmt: skip
def attend(
    q,  # [tokens, heads, D_V + D_REST]
    cache,  # [num_blocks, block_size, row], or rows of one block
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    extra_cache,  # the second cache or None, with its own indices and format
    extra_indices,  # int32 [extra_capacity] or None
    extra_indptr,  # int32 [tokens + 1] or None
    sink,  # fp32 [heads] or None
    out,  # [splits, tokens, heads, D_V]
    lse,  # fp32 [splits, tokens, heads]; base 2 when SPLIT, natural otherwise
    heads,
    num_slots,
    block_size,
    capacity,
    extra_num_slots,
    extra_block_size,
    extra_capacity,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_cache_block,
    stride_cache_slot,  # planar caches: not looked at
    stride_extra_block,
    stride_extra_slot,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    D_V: tl.constexpr,
    D_REST: tl.constexpr,
    PAD_V: tl.constexpr,  # powers of two, at least 16
    PAD_REST: tl.constexpr,
    GROUP: tl.constexpr,  # 0: plain cache; else values per fp8 scale
    SCALE_AT: tl.constexpr,  # byte of a record where its fp32 scales start
    REST_AT: tl.constexpr,  # byte of a record where its bf16 values start
    TOKEN_BYTES: tl.constexpr,  # planar: from one token's record to the next one's
    SCALE_BYTES: tl.constexpr,  # 0: not a planar cache; else ue8m0 bytes per token behind a block's records
    FNUZ: tl.constexpr,
    PAGED: tl.constexpr,  # slots do not follow each other through the whole cache; planar caches: not looked at
    SHORT: tl.constexpr,  # capacity < BLOCK_K
    EXTRA_GROUP: tl.constexpr,
    EXTRA_SCALE_AT: tl.constexpr,
    EXTRA_REST_AT: tl.constexpr,
    EXTRA_TOKEN_BYTES: tl.constexpr,
    EXTRA_SCALE_BYTES: tl.constexpr,
    EXTRA_FNUZ: tl.constexpr,
    EXTRA_PAGED: tl.constexpr,
    EXTRA_SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HOIST: tl.constexpr,  # whether what all tiles share may be computed before the loop
    PDL: tl.constexpr,
):
    pdl.wait_only(PDL)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last ones see the most keys of a prompt
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    known_head = head < heads
    value_column = tl.arange(0, PAD_V)
    rest_column = tl.arange(0, PAD_REST)

    q_base = q + token * stride_q_token + head.to(tl.int64) * stride_q_head
    q_value = load_columns(q_base, value_column, D_V, PAD_V, known_head)
    q_rest = q_value
    if D_REST > 0:
        q_rest = load_columns(q_base + D_V, rest_column, D_REST, PAD_REST, known_head)

    begin, end = _row_range(indptr, token, capacity)
    if extra_cache is not None:
        extra_begin, extra_end = _row_range(extra_indptr, token, extra_capacity)
    if SPLIT:  # the tiles of both rows count as one range
        tiles = tl.cdiv(end - begin, BLOCK_K)
        all_tiles = tiles
        if extra_cache is not None:
            all_tiles += tl.cdiv(extra_end - extra_begin, BLOCK_K)
        share = tl.cdiv(all_tiles, tl.num_programs(2)) * BLOCK_K
        first = tl.program_id(2) * share
        begin = tl.minimum(begin + first, end)
        end = tl.minimum(end, begin + share)
        if extra_cache is not None:
            extra_first = first - tiles * BLOCK_K
            extra_end = tl.minimum(extra_end, extra_begin + tl.maximum(extra_first + share, 0))
            extra_begin = tl.minimum(extra_begin + tl.maximum(extra_first, 0), extra_end)

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, PAD_V], tl.float32)
    m, l, acc = _attend_keys(
        q_value, q_rest, m, l, acc, cache, indices, begin, end, capacity, num_slots, block_size, scale_log2,
        stride_cache_block, stride_cache_slot, value_column, rest_column, D_V, D_REST, PAD_V, PAD_REST, GROUP, SCALE_AT,
        REST_AT, TOKEN_BYTES, SCALE_BYTES, FNUZ, PAGED, SHORT, BLOCK_K, STAGES, HOIST,
    )  # fmt: skip
    if extra_cache is not None:
        m, l, acc = _attend_keys(
            q_value, q_rest, m, l, acc, extra_cache, extra_indices, extra_begin, extra_end, extra_capacity,
            extra_num_slots, extra_block_size, scale_log2, stride_extra_block, stride_extra_slot, value_column,
            rest_column, D_V, D_REST, PAD_V, PAD_REST, EXTRA_GROUP, EXTRA_SCALE_AT, EXTRA_REST_AT, EXTRA_TOKEN_BYTES,
            EXTRA_SCALE_BYTES, EXTRA_FNUZ, EXTRA_PAGED, EXTRA_SHORT, BLOCK_K, STAGES, HOIST,
        )  # fmt: skip
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    lse2 = log2_sum(m, l)
    split = tl.program_id(2).to(tl.int64)
    out_base = out + split * stride_out_split + token * stride_out_token + head * stride_out_head
    lse_at = lse + split * stride_lse_split + token * stride_lse_token + head
    if SPLIT:
        tl.store(lse_at, lse2, mask=known_head)
    else:
        if sink is not None:
            acc = acc * sink_factor(tl.load(sink + head, mask=known_head, other=0.0), lse2)[:, None]
        tl.store(lse_at, lse2 * 0.6931471805599453, mask=known_head)
    stored = cast(acc, out.dtype.element_ty)
    tl.store(
        out_base[:, None] + value_column[None, :], stored, mask=known_head[:, None] & (value_column < D_V)[None, :]
    )


@triton.jit(do_not_specialize=["states"])
def merge(
    outs,  # [states, tokens, heads, d_v]
    lses,  # fp32 [states, tokens, heads]
    sink,  # fp32 [heads] or None
    out,  # [tokens, heads, d_v]
    lse,  # fp32 [tokens, heads], natural log
    states,
    d_v,
    to_log2,  # lses * to_log2 are base 2
    stride_outs_state,
    stride_outs_token,
    stride_outs_head,
    stride_lses_state,
    stride_lses_token,
    stride_lses_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    state = tl.arange(0, BLOCK_S)
    lse_at = lses + token * stride_lses_token + state.to(tl.int64) * stride_lses_state + head * stride_lses_head
    found = tl.load(lse_at, mask=state < states, other=float("-inf"))
    found = tl.where(found * to_log2 == float("-inf"), float("-inf"), found)
    m = tl.max(found, 0)
    # The difference first: behind a product that is not rounded (a fused operation) large ones of equal states would
    # not be 0.
    weight = tl.exp2((found - tl.where(m == float("-inf"), 0.0, m)) * to_log2)
    top = m * to_log2
    l = tl.where(top == float("inf"), float("nan"), tl.sum(weight, 0))
    merged = log2_sum(top, l)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    if sink is not None:
        factor = factor * sink_factor(tl.load(sink + head), merged)
    if tl.program_id(2) == 0:
        tl.store(lse + token * stride_lse_token + head, merged * 0.6931471805599453)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    outs_at = outs + token * stride_outs_token + state.to(tl.int64) * stride_outs_state + head * stride_outs_head
    counted = (weight > 0.0)[:, None] & (column < d_v)[None, :]
    values = tl.load(outs_at[:, None] + column[None, :], mask=counted, other=0.0).to(tl.float32)
    total = cast(tl.sum(weight[:, None] * values, 0) * factor, out.dtype.element_ty)
    tl.store(out + token * stride_out_token + head * stride_out_head + column, total, mask=column < d_v)
