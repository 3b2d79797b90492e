# pyright: reportOperatorIssue=false
"""Sparse attention: a CTA per row, block of heads and split of the row's keys, over one cache or two.

A key tile is gathered once and serves both products. Bytes: every named row once per block of heads. Operations:
2 * heads * keys * (d_qk + d_v) per row.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast, convert, dot
from sparse_attn.device.softmax import log2_sum, sink_factor, softmax_step
from sparse_attn.ops.attention.sparse.portable.load import interleaved_values, load_columns, planar_values


@triton.jit
def _row_range(indptr, lengths, token, capacity):
    """[begin, end) of a row's indices, inside [0, capacity]; only the first lengths[token], unless that is None."""
    begin = tl.maximum(tl.load(indptr + token), 0)
    end = tl.maximum(tl.minimum(tl.load(indptr + token + 1), capacity), begin)
    if lengths is not None:
        end = begin + tl.minimum(end - begin, tl.maximum(tl.load(lengths + token), 0))
    return begin, end


@triton.jit
def _attend_keys(
    q_value, q_rope, m, l, acc, cache, indices, begin, end, capacity, num_slots, block_size, scale_log2,
    stride_cache_block, stride_cache_slot, value_column, rope_column, D_V: tl.constexpr, D_ROPE: tl.constexpr,
    PAD_V: tl.constexpr, PAD_ROPE: tl.constexpr, GROUP: tl.constexpr, SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr, TOKEN_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, FNUZ: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, SHORT: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HOIST: tl.constexpr,
):  # fmt: skip
    """Take the keys indices[begin:end] of a cache into the softmax state (m, l, acc)."""
    dtype = q_value.dtype
    BLOCK_M: tl.constexpr = q_value.shape[0]
    key = tl.arange(0, BLOCK_N)
    # Hoisted addresses of a planar tile's matrix operands would not fit in registers beside acc and the tile.
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES, disable_licm=SCALE_BYTES > 0 or not HOIST):
        # Unsigned comparisons serve both ends of a range. A masked index load would cost a seventh of the time, so the
        # tile moves back where it would leave the buffer, and the keys before its split are left out.
        if SHORT:
            slot = tl.load(indices + start + key, mask=start + key < end, other=-1)
            bound = num_slots
        else:
            at = tl.minimum(start, capacity - BLOCK_N)
            slot = tl.load(indices + at + key)
            inside = (key - (start - at)).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)
            bound = tl.where(inside, num_slots, 0)
        valid = slot.to(tl.uint32, bitcast=True) < bound.to(tl.uint32)
        # Planar: scales lie behind all records of the block.
        if SCALE_BYTES > 0:
            block = slot // block_size
            place = (slot - block * block_size).to(tl.int64)
            base = cache + block.to(tl.int64) * stride_cache_block
            scale_base = base + block_size.to(tl.int64) * TOKEN_BYTES + place * SCALE_BYTES
            base = base + place * TOKEN_BYTES
            value = planar_values(base, scale_base, value_column, valid, D_V, PAD_V, GROUP, ROPE_OFFSET, FNUZ, dtype)
        else:
            # Slots follow each other through the whole cache unless blocks are padded.
            if PADDED_BLOCKS:
                block = slot // block_size
                offset = block.to(tl.int64) * stride_cache_block + (slot - block * block_size) * stride_cache_slot
            else:
                offset = slot.to(tl.int64) * stride_cache_slot
            base = cache + offset
            if GROUP > 0:
                value = interleaved_values(base, value_column, valid, D_V, PAD_V, GROUP, SCALE_OFFSET, FNUZ, BLOCK_N)
                value = cast(value, dtype)
            else:
                value = convert(load_columns(base, value_column, D_V, PAD_V, valid), dtype)
        # Scores of the RoPE columns first, then of the value's, into one sum.
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if D_ROPE > 0:
            if GROUP > 0:
                rope_base = (base + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16))
                rope = load_columns(rope_base, rope_column, D_ROPE, PAD_ROPE, valid)
            else:
                rope = load_columns(base + D_V, rope_column, D_ROPE, PAD_ROPE, valid)
            scores = dot(q_rope, tl.trans(convert(rope, dtype)), scores)
        scores = dot(q_value, tl.trans(value), scores)
        # Masked keys have P of 0; the scale is in base 2 for exp2.
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        # The sums move to the new maximum, then the value tile serves a second time.
        p, rescale, m, l = softmax_step(scores, m, l)
        acc = dot(cast(p, dtype), value, acc * rescale[:, None])
    return m, l, acc


@triton.jit(
    do_not_specialize=[
        "num_slots", "capacity", "block_size", "extra_num_slots", "extra_capacity", "extra_block_size",
    ]
)  # fmt: skip
def attend(
    q,  # [tokens, heads, D_V + D_ROPE]
    cache,  # [num_blocks, block_size, row], or rows of one block
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    lengths,  # int32 [tokens] or None: so many indices of a row count, the first ones
    extra_cache,  # the second cache or None, with its own indices and format
    extra_indices,  # int32 [extra_capacity] or None
    extra_indptr,  # int32 [tokens + 1] or None
    extra_lengths,  # int32 [tokens] or None
    sink,  # fp32 [heads] or None
    out,  # [splits, tokens, heads, D_V]
    lse,  # fp32 [splits, tokens, heads]; base 2 when SPLIT, natural otherwise
    max_logits,  # None, or as lse: a row's largest scaled score
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
    D_ROPE: tl.constexpr,
    PAD_V: tl.constexpr,  # powers of two, at least 16
    PAD_ROPE: tl.constexpr,
    GROUP: tl.constexpr,  # 0: plain cache; else values per fp8 scale
    SCALE_OFFSET: tl.constexpr,  # byte of a record where its fp32 scales start
    ROPE_OFFSET: tl.constexpr,  # byte of a record where its bf16 values start
    TOKEN_BYTES: tl.constexpr,  # planar: from one token's record to the next one's
    SCALE_BYTES: tl.constexpr,  # 0: not a planar cache; else ue8m0 bytes per token behind a block's records
    FNUZ: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,  # something lies between blocks; planar caches: not looked at
    SHORT: tl.constexpr,  # capacity < BLOCK_N
    EXTRA_GROUP: tl.constexpr,
    EXTRA_SCALE_OFFSET: tl.constexpr,
    EXTRA_ROPE_OFFSET: tl.constexpr,
    EXTRA_TOKEN_BYTES: tl.constexpr,
    EXTRA_SCALE_BYTES: tl.constexpr,
    EXTRA_FNUZ: tl.constexpr,
    EXTRA_PADDED_BLOCKS: tl.constexpr,
    EXTRA_SHORT: tl.constexpr,
    SPLIT: tl.constexpr,
    INF_LSE: tl.constexpr,  # lse of a row without keys is inf; else -inf, as always when SPLIT
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HOIST: tl.constexpr,  # whether what all tiles share may be computed before the loop
    PDL: tl.constexpr,
):
    pdl.wait_only(PDL)
    token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the last ones see the most keys of a prompt
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    known_head = head < heads
    value_column = tl.arange(0, PAD_V)
    rope_column = tl.arange(0, PAD_ROPE)

    # Queries stay in registers for all tiles.
    q_base = q + token * stride_q_token + head.to(tl.int64) * stride_q_head
    q_value = load_columns(q_base, value_column, D_V, PAD_V, known_head)
    q_rope = q_value
    if D_ROPE > 0:
        q_rope = load_columns(q_base + D_V, rope_column, D_ROPE, PAD_ROPE, known_head)

    # Ranges of the row in both caches.
    begin, end = _row_range(indptr, lengths, token, capacity)
    if extra_cache is not None:
        extra_begin, extra_end = _row_range(extra_indptr, extra_lengths, token, extra_capacity)
    if SPLIT:  # the tiles of both rows count as one range
        tiles = tl.cdiv(end - begin, BLOCK_N)
        all_tiles = tiles
        if extra_cache is not None:
            all_tiles += tl.cdiv(extra_end - extra_begin, BLOCK_N)
        keys = tl.cdiv(all_tiles, tl.num_programs(2)) * BLOCK_N
        first = tl.program_id(2) * keys
        begin = tl.minimum(begin + first, end)
        end = tl.minimum(end, begin + keys)
        # The second cache's keys begin behind all tiles of the first.
        if extra_cache is not None:
            extra_first = first - tiles * BLOCK_N
            extra_end = tl.minimum(extra_end, extra_begin + tl.maximum(extra_first + keys, 0))
            extra_begin = tl.minimum(extra_begin + tl.maximum(extra_first, 0), extra_end)

    # One softmax over both caches: the state goes from one to the other.
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PAD_V], tl.float32)
    m, l, acc = _attend_keys(
        q_value, q_rope, m, l, acc, cache, indices, begin, end, capacity, num_slots, block_size, scale_log2,
        stride_cache_block, stride_cache_slot, value_column, rope_column, D_V, D_ROPE, PAD_V, PAD_ROPE, GROUP,
        SCALE_OFFSET, ROPE_OFFSET, TOKEN_BYTES, SCALE_BYTES, FNUZ, PADDED_BLOCKS, SHORT, BLOCK_N, STAGES, HOIST,
    )  # fmt: skip
    if extra_cache is not None:
        m, l, acc = _attend_keys(
            q_value, q_rope, m, l, acc, extra_cache, extra_indices, extra_begin, extra_end, extra_capacity,
            extra_num_slots, extra_block_size, scale_log2, stride_extra_block, stride_extra_slot, value_column,
            rope_column, D_V, D_ROPE, PAD_V, PAD_ROPE, EXTRA_GROUP, EXTRA_SCALE_OFFSET, EXTRA_ROPE_OFFSET,
            EXTRA_TOKEN_BYTES, EXTRA_SCALE_BYTES, EXTRA_FNUZ, EXTRA_PADDED_BLOCKS, EXTRA_SHORT, BLOCK_N, STAGES, HOIST,
        )  # fmt: skip
    # A row without keys has output 0 and lse -inf.
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    lse2 = log2_sum(m, l)
    split = tl.program_id(2).to(tl.int64)
    out_base = out + split * stride_out_split + token * stride_out_token + head * stride_out_head
    lse_at = lse + split * stride_lse_split + token * stride_lse_token + head
    if max_logits is not None:
        max_at = max_logits + split * stride_lse_split + token * stride_lse_token + head
        tl.store(max_at, m * 0.6931471805599453, mask=known_head)
    # Partials keep base 2 and no sink; combine adds it.
    if SPLIT:
        tl.store(lse_at, lse2, mask=known_head)
    else:
        if sink is not None:
            acc = acc * sink_factor(tl.load(sink + head, mask=known_head, other=0.0), lse2)[:, None]
        natural = lse2 * 0.6931471805599453
        if INF_LSE:
            natural = tl.where(lse2 == float("-inf"), float("inf"), natural)
        tl.store(lse_at, natural, mask=known_head)
    stored = cast(acc, out.dtype.element_ty)
    tl.store(
        out_base[:, None] + value_column[None, :], stored, mask=known_head[:, None] & (value_column < D_V)[None, :]
    )


@triton.jit(do_not_specialize=["states"])
def combine(
    outs,  # [states, tokens, heads, d_v]
    lses,  # fp32 [states, tokens, heads]
    maxima,  # None, or as lses: the states' max_logits
    sink,  # fp32 [heads] or None
    out,  # [tokens, heads, d_v]
    lse,  # fp32 [tokens, heads], natural log
    max_logits,  # None, or as lse: the largest of maxima
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
    INF_LSE: tl.constexpr,  # as in attend
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    # A program has a head of a token and BLOCK_D columns, and all states' weights.
    state = tl.arange(0, BLOCK_S)
    lse_at = lses + token * stride_lses_token + state.to(tl.int64) * stride_lses_state + head * stride_lses_head
    found = tl.load(lse_at, mask=state < states, other=float("-inf"))
    found = tl.where(found * to_log2 == float("-inf"), float("-inf"), found)
    m = tl.max(found, 0)
    # The difference first: behind a product that is not rounded (a fused operation) large ones of equal states would
    # not be 0.
    # Weights are relative to the largest lse.
    weight = tl.exp2((found - tl.where(m == float("-inf"), 0.0, m)) * to_log2)
    top = m * to_log2
    l = tl.where(top == float("inf"), float("nan"), tl.sum(weight, 0))
    combined = log2_sum(top, l)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    # A sink adds to the denominator, not to lse.
    if sink is not None:
        factor = factor * sink_factor(tl.load(sink + head), combined)
    # lse and maxima are the same in all blocks of columns: the first stores them.
    if tl.program_id(2) == 0:
        natural = combined * 0.6931471805599453
        if INF_LSE:
            natural = tl.where(combined == float("-inf"), float("inf"), natural)
        tl.store(lse + token * stride_lse_token + head, natural)
        if max_logits is not None:
            max_at = (
                maxima + token * stride_lses_token + state.to(tl.int64) * stride_lses_state + head * stride_lses_head
            )
            largest = tl.max(tl.load(max_at, mask=state < states, other=float("-inf")), 0)
            tl.store(max_logits + token * stride_lse_token + head, largest)
    # A state that weighs nothing is not read: its output may be anything.
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    outs_at = outs + token * stride_outs_token + state.to(tl.int64) * stride_outs_state + head * stride_outs_head
    counted = (weight > 0.0)[:, None] & (column < d_v)[None, :]
    values = tl.load(outs_at[:, None] + column[None, :], mask=counted, other=0.0).to(tl.float32)
    total = cast(tl.sum(weight[:, None] * values, 0) * factor, out.dtype.element_ty)
    tl.store(out + token * stride_out_token + head * stride_out_head + column, total, mask=column < d_v)
