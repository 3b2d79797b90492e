# pyright: reportAttributeAccessIssue=false
"""Index scores of MXFP4 queries and keys: kernels.py's products and sums, of values decoded to bf16.

Every value that the writers write is a bf16 value, so decoding loses nothing; products are summed in fp32 in the order
of the matrix unit. The low and the high codes of bytes are multiplied apart, so that no value changes its lane. Floors,
per row and key: 2 * heads * dim operations; the paged form reads dim / 2 + dim / 32 bytes per request and key, both
write 4 bytes per row and key.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import dot
from sparse_attn.device.mxfp4 import decode_mxfp4
from sparse_attn.ops.indexer.scores.portable import scores


@triton.jit
def _load(codes, scales, real, GROUPS: tl.constexpr, PAD_GROUPS: tl.constexpr):
    """(low, high) values [N, PAD_GROUPS * 16] of the records at byte pointers ``codes`` and ``scales`` [N], zero where
    not ``real``."""
    # A group is 16 bytes of two codes each, and has one scale.
    group, byte = tl.arange(0, PAD_GROUPS), tl.arange(0, 16)
    there = real[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(scales[:, None] + group[None, :], mask=there, other=0)
    code_at = codes[:, None, None] + (group[None, :, None] * 16 + byte[None, None, :])
    code = tl.load(code_at, mask=tl.broadcast_to(there[:, :, None], code_at.shape), other=0)
    return decode_mxfp4(code, scale)


@triton.jit(do_not_specialize=["rows", "keys", "stride_out_row"])
def mqa_logits(
    q,  # uint8 [rows, heads, GROUPS * 17]: codes of all heads, then their scales
    k,  # uint8 [keys, GROUPS * 16]
    k_scale,  # uint8 [keys, GROUPS]
    weights,  # fp32 [rows, heads]
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    rows,
    keys,
    heads,
    stride_q_row,
    stride_k_key,
    stride_scale_key,
    stride_weights_row,
    stride_weights_head,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    GROUPS: tl.constexpr,
    PAD_GROUPS: tl.constexpr,
    PAD_H: tl.constexpr,
    WHOLE_H: tl.constexpr,  # PAD_H == heads
    CLEAR: tl.constexpr,  # write -inf outside the range; otherwise leave it undefined
    BLOCK_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_only(PDL)
    # A CTA has one tile of keys and BLOCK_Q rows.
    key = tl.program_id(0) * BLOCK_KV + tl.arange(0, BLOCK_KV)
    first = tl.program_id(1) * BLOCK_Q
    real_key = key < keys
    row = first + tl.arange(0, BLOCK_Q)
    last = tl.minimum(first + BLOCK_Q, rows)
    begin = tl.program_id(0) * BLOCK_KV
    # Where no row of the CTA sees any of the keys there is nothing to multiply.
    if scores.out_of_reach(kv_start, kv_end, row, rows, begin, stride_start_row, stride_end_row, BLOCK_KV):
        if CLEAR:
            scores.clear(out, first, last, key, real_key, stride_out_row, BLOCK_KV)
        return

    # The tile of keys is decoded once, and stays for all rows.
    key64 = key.to(tl.int64)
    k_low, k_high = _load(k + key64 * stride_k_key, k_scale + key64 * stride_scale_key, real_key, GROUPS, PAD_GROUPS)
    head = tl.arange(0, PAD_H)
    real_head = head < heads
    for m in tl.range(first, last, num_stages=STAGES):
        m64 = tl.cast(m, tl.int64)
        # A row's codes of all heads, then their scales.
        q_at = q + m64 * stride_q_row
        scale_at = q_at + heads * (GROUPS * 16)
        q_low, q_high = _load(q_at + head * (GROUPS * 16), scale_at + head * GROUPS, real_head, GROUPS, PAD_GROUPS)
        weight_at = weights + m64 * stride_weights_row + head * stride_weights_head
        weight = tl.load(weight_at, mask=real_head, other=0.0)
        start = tl.load(kv_start + m64 * stride_start_row)
        end = tl.load(kv_end + m64 * stride_end_row)
        # Low and high codes are two products into one sum.
        products = dot(k_low, tl.trans(q_low), tl.zeros([BLOCK_KV, PAD_H], tl.float32))
        products = dot(k_high, tl.trans(q_high), products)
        score = tl.sum(scores.weighed(products, weight, real_head, WHOLE_H, False), 1)
        score = tl.where((key >= start) & (key < end), score, float("-inf"))
        tl.store(out + m64 * stride_out_row + key, score, mask=real_key)


@triton.jit(
    do_not_specialize=[
        "max_context", "max_blocks", "num_blocks", "block_size", "stride_table_request", "stride_out_row",
        "stride_maxima_row",
    ]
)  # fmt: skip
def paged_mqa_logits(
    q,  # uint8 [requests, next_n, heads, GROUPS * 17]: a row's codes of all heads, then their scales
    cache,  # uint8 [num_blocks, block_size, GROUPS * 17]: a block's codes, then its scales
    weights,  # fp32 [requests * next_n, heads]
    context_lens,  # int32 [requests, next_n]
    block_table,  # int32 [requests, max_blocks]
    out,  # fp32 [requests * next_n, max_context]
    maxima,  # fp32 [requests * next_n, cdiv(max_context, GROUP)] or None
    max_context,
    num_blocks,
    block_size,
    max_blocks,
    heads,
    stride_q_request,
    stride_q_row,
    stride_cache_block,
    stride_weights_row,
    stride_weights_head,
    stride_lens_request,
    stride_lens_row,
    stride_table_request,
    stride_out_row,
    stride_maxima_row,
    GROUPS: tl.constexpr,
    PAD_GROUPS: tl.constexpr,
    PAD_H: tl.constexpr,
    WHOLE_H: tl.constexpr,  # PAD_H == heads
    NEXT_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # rows of a CTA; cdiv(NEXT_N, BLOCK_Q) CTAs to a request and tile of keys
    CLEAR: tl.constexpr,
    GROUP: tl.constexpr,  # neighbours whose highest score goes to ``maxima``
    BLOCK_KV: tl.constexpr,
    ONE_ENTRY: tl.constexpr,  # BLOCK_KV keys lie in one block
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_only(PDL)
    # A CTA has some rows of a request. CTAs take tiles of its keys by turns.
    BLOCKS: tl.constexpr = (NEXT_N + BLOCK_Q - 1) // BLOCK_Q
    request = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first_row = tl.program_id(0) % BLOCKS * BLOCK_Q
    step = tl.num_programs(1) * BLOCK_KV
    row = first_row + tl.arange(0, BLOCK_Q)
    lens = context_lens + request * stride_lens_request
    limit, longest = scores.limits(lens, row, max_context, stride_lens_row, NEXT_N)

    # Queries and weights of all its rows stay for all tiles: columns are heads of row after row.
    column = tl.arange(0, BLOCK_Q * PAD_H)
    head, column_row = column % PAD_H, first_row + column // PAD_H
    real_column = (head < heads) & (column_row < NEXT_N)
    row_at = q + request * stride_q_request + column_row.to(tl.int64) * stride_q_row
    scale_at = row_at + heads * (GROUPS * 16) + head * GROUPS
    q_low, q_high = _load(row_at + head * (GROUPS * 16), scale_at, real_column, GROUPS, PAD_GROUPS)
    weight_at = weights + (request * NEXT_N + column_row) * stride_weights_row + head * stride_weights_head
    weight = tl.load(weight_at, mask=real_column, other=0.0)
    number = request * NEXT_N + row
    out_row = out + number * stride_out_row
    table = block_table + request * stride_table_request

    # The entry of a block table is looked up one tile ahead.
    first = tl.program_id(1) * BLOCK_KV
    next_entry = -1
    if ONE_ENTRY:
        next_entry = scores.entry_of(table, first // block_size, max_blocks)
    for begin in tl.range(first, longest, step, num_stages=STAGES):
        position = begin + tl.arange(0, BLOCK_KV)
        entry, table_column, kv_valid, next_entry = scores.find_block(
            table, position, begin, step, longest, next_entry, max_blocks, num_blocks, block_size, ONE_ENTRY
        )
        # Codes of a block lie in front, its scales behind them.
        base = cache + entry.to(tl.int64) * stride_cache_block
        within = position - table_column * block_size
        scales = base + block_size * (GROUPS * 16) + within * GROUPS
        k_low, k_high = _load(base + within * (GROUPS * 16), scales, kv_valid, GROUPS, PAD_GROUPS)
        # Low and high codes are two products into one sum; then the heads of each row.
        products = dot(k_low, tl.trans(q_low), tl.zeros([BLOCK_KV, BLOCK_Q * PAD_H], tl.float32))
        products = dot(k_high, tl.trans(q_high), products)
        weighed = scores.weighed(products, weight, real_column, WHOLE_H, False)
        score = tl.sum(tl.reshape(weighed, [BLOCK_KV, BLOCK_Q, PAD_H]), 2)
        # A key counts where its block exists and the row sees it.
        score = tl.where(kv_valid[:, None] & (position[:, None] < limit[None, :]), score, float("-inf"))
        scores.store(
            out_row, maxima, score, begin, position, row, max_context, number, stride_maxima_row,
            NEXT_N, BLOCK_Q, BLOCK_KV, GROUP,
        )  # fmt: skip
    # Tiles behind the longest row of the CTA.
    if CLEAR:
        scores.clear_behind(out_row, row, longest, first, step, max_context, NEXT_N, BLOCK_Q, BLOCK_KV)
