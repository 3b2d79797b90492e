# pyright: reportAttributeAccessIssue=false
"""Index scores: a tile of keys against the heads of a query row, relu, weigh, sum over heads, scale.

Keys are the rows of the matrix product and heads its columns, so the sum over heads stays inside a quad of lanes.
Floors, per row and key: 2 * heads * dim operations; the paged form reads dim + 4 bytes per request and key, both write
4 bytes per row and key.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import INTERPRETED, dot
from sparse_attn.device.fp8 import decode_fp8, decode_fp8_bf16
from sparse_attn.ops.indexer.scores.portable import scores


@triton.jit
def _operand(tile, FP8: tl.constexpr, FP8_DOT: tl.constexpr, FNUZ: tl.constexpr):
    """A loaded tile as the matrix unit takes it."""
    if FP8 and not FP8_DOT:
        if INTERPRETED:
            return decode_fp8(tile, FNUZ)
        else:
            return decode_fp8_bf16(tile, FNUZ)
    else:
        return tile


@triton.jit(do_not_specialize=["rows", "keys", "stride_out_row"])
def mqa_logits(
    q,  # [rows, heads, D]
    k,  # [keys, D]
    k_scale,  # fp32 [keys] or None
    weights,  # fp32 [rows, heads]
    kv_start,  # int32 [rows]
    kv_end,  # int32 [rows]
    out,  # fp32 [rows, keys]
    rows,
    keys,
    heads,
    stride_q_row,
    stride_q_head,
    stride_k_key,
    stride_scale_key,
    stride_weights_row,
    stride_weights_head,
    stride_start_row,
    stride_end_row,
    stride_out_row,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_H: tl.constexpr,
    WHOLE_H: tl.constexpr,  # PAD_H == heads
    FP8: tl.constexpr,
    FP8_DOT: tl.constexpr,
    FNUZ: tl.constexpr,
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
    # Where no row of the CTA sees any of the keys there is nothing to multiply.
    last = tl.minimum(first + BLOCK_Q, rows)
    begin = tl.program_id(0) * BLOCK_KV
    if scores.out_of_reach(kv_start, kv_end, row, rows, begin, stride_start_row, stride_end_row, BLOCK_KV):
        if CLEAR:
            scores.clear(out, first, last, key, real_key, stride_out_row, BLOCK_KV)
        return

    dim = tl.arange(0, PAD_D)
    head = tl.arange(0, PAD_H)
    real_dim = dim < D
    # The tile of keys is loaded once, and stays for all rows.
    k_at = k + key.to(tl.int64)[:, None] * stride_k_key + dim[None, :]
    if FP8_DOT:
        k_at = k_at.to(tl.pointer_type(tl.float8e4nv))
    if D == PAD_D:
        keys_tile = _operand(tl.load(k_at, mask=real_key[:, None], other=0.0), FP8, FP8_DOT, FNUZ)
    else:
        keys_tile = _operand(tl.load(k_at, mask=real_key[:, None] & real_dim[None, :], other=0.0), FP8, FP8_DOT, FNUZ)
    if k_scale is not None:
        scale = tl.load(k_scale + key.to(tl.int64) * stride_scale_key, mask=real_key, other=0.0)

    # A turn is a row: its heads are the columns of a product.
    real_head = head < heads
    for m in tl.range(first, last, num_stages=STAGES):
        m64 = tl.cast(m, tl.int64)
        q_at = q + m64 * stride_q_row + head[:, None] * stride_q_head + dim[None, :]
        if FP8_DOT:
            q_at = q_at.to(tl.pointer_type(tl.float8e4nv))
        if D == PAD_D:
            heads_tile = _operand(tl.load(q_at, mask=real_head[:, None], other=0.0), FP8, FP8_DOT, FNUZ)
        else:
            inside = real_head[:, None] & real_dim[None, :]
            heads_tile = _operand(tl.load(q_at, mask=inside, other=0.0), FP8, FP8_DOT, FNUZ)
        weight_at = weights + m64 * stride_weights_row + head * stride_weights_head
        weight = tl.load(weight_at, mask=real_head, other=0.0)
        # The row's range, on its way while the product runs.
        start = tl.load(kv_start + m64 * stride_start_row)
        end = tl.load(kv_end + m64 * stride_end_row)
        products = dot(keys_tile, tl.trans(heads_tile), tl.zeros([BLOCK_KV, PAD_H], tl.float32))
        score = tl.sum(scores.weighed(products, weight, real_head, WHOLE_H, False), 1)
        # The key's scale is common to all heads: it comes last.
        if k_scale is not None:
            score = score * scale
        score = tl.where((key >= start) & (key < end), score, float("-inf"))
        tl.store(out + m64 * stride_out_row + key, score, mask=real_key)


@triton.jit(do_not_specialize=["keys", "stride_out_row"])
def clear_outside(
    kv_start, kv_end, out, keys, stride_start_row, stride_end_row, stride_out_row,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """-inf outside a row's range; a row's CTAs share it in blocks."""
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    # Clip to the keys that exist. An empty range is cleared as one part in front.
    start = tl.minimum(tl.maximum(tl.load(kv_start + row * stride_start_row), 0), keys)
    end = tl.minimum(tl.maximum(tl.load(kv_end + row * stride_end_row), 0), keys)
    start = tl.where(start < end, start, keys)
    out_row = out + row * stride_out_row
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    part = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    # In front of the range, then behind it; blocks are aligned to BLOCK.
    for begin in range(part, start, step):
        column = begin + tl.arange(0, BLOCK)
        tl.store(out_row + column, nothing, mask=column < start)
    for begin in range(end // BLOCK * BLOCK + part, tl.where(start < keys, keys, 0), step):
        column = begin + tl.arange(0, BLOCK)
        tl.store(out_row + column, nothing, mask=(column >= end) & (column < keys))


@triton.jit(
    do_not_specialize=[
        "max_context", "max_blocks", "num_blocks", "block_size", "stride_table_request", "stride_out_row",
        "stride_maxima_row",
    ]
)  # fmt: skip
def paged_mqa_logits(
    q,  # [requests, next_n, heads, D]
    cache,  # [num_blocks, block_size, row]
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
    stride_q_head,
    stride_cache_block,
    stride_weights_row,
    stride_weights_head,
    stride_lens_request,
    stride_lens_row,
    stride_table_request,
    stride_out_row,
    stride_maxima_row,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_H: tl.constexpr,
    WHOLE_H: tl.constexpr,  # PAD_H == heads
    NEXT_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # rows of a CTA; cdiv(NEXT_N, BLOCK_Q) CTAs to a request and tile of keys
    FP8: tl.constexpr,  # codes, then the block's fp32 scales; otherwise plain rows of D
    FP8_DOT: tl.constexpr,
    FNUZ: tl.constexpr,
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
    dim = tl.arange(0, PAD_D)
    column = tl.arange(0, BLOCK_Q * PAD_H)
    head, column_row = column % PAD_H, first_row + column // PAD_H
    real_column = (head < heads) & (column_row < NEXT_N)
    column_at = column_row.to(tl.int64) * stride_q_row + head.to(tl.int64) * stride_q_head
    q_at = q + request * stride_q_request + column_at[:, None] + dim[None, :]
    if FP8_DOT:
        q_at = q_at.to(tl.pointer_type(tl.float8e4nv))
    heads_tile = _operand(tl.load(q_at, mask=real_column[:, None] & (dim < D)[None, :], other=0.0), FP8, FP8_DOT, FNUZ)
    weight_at = weights + (request * NEXT_N + column_row) * stride_weights_row + head * stride_weights_head
    weight = tl.load(weight_at, mask=real_column, other=0.0)
    # With fp8 products relu is x + |x|, against half the weight.
    if FP8_DOT:
        weight = 0.5 * weight
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
        if FP8:  # on their way while keys are multiplied
            scale_at = (base + block_size * D).to(tl.pointer_type(tl.float32)) + within
            scale = tl.load(scale_at, mask=kv_valid, other=0.0)
        k_at = (base + within * D)[:, None] + dim[None, :]
        if FP8_DOT:
            k_at = k_at.to(tl.pointer_type(tl.float8e4nv))
        if D == PAD_D:
            keys_tile = _operand(tl.load(k_at, mask=kv_valid[:, None], other=0.0), FP8, FP8_DOT, FNUZ)
        else:
            keys_tile = _operand(
                tl.load(k_at, mask=kv_valid[:, None] & (dim < D)[None, :], other=0.0), FP8, FP8_DOT, FNUZ
            )
        # Score, then sum over the heads of each row.
        products = dot(keys_tile, tl.trans(heads_tile), tl.zeros([BLOCK_KV, BLOCK_Q * PAD_H], tl.float32))
        weighed = scores.weighed(products, weight, real_column, WHOLE_H, FP8_DOT)
        score = tl.sum(tl.reshape(weighed, [BLOCK_KV, BLOCK_Q, PAD_H]), 2)
        if FP8:
            score = score * scale[:, None]
        # A key counts where its block exists and the row sees it.
        score = tl.where(kv_valid[:, None] & (position[:, None] < limit[None, :]), score, float("-inf"))
        scores.store(
            out_row, maxima, score, begin, position, row, max_context, number, stride_maxima_row,
            NEXT_N, BLOCK_Q, BLOCK_KV, GROUP,
        )  # fmt: skip
    # Tiles behind the longest row of the CTA.
    if CLEAR:
        scores.clear_behind(out_row, row, longest, first, step, max_context, NEXT_N, BLOCK_Q, BLOCK_KV)
