# pyright: reportAttributeAccessIssue=false
"""Few rows scored and selected in one launch. CTAS CTAs share a row, which has PARTS parts of RESIDENT keys: one of
every PARTS.

1. A CTA multiplies a part's keys by the row's heads, and has the scores in registers. They also go to memory, for
   step 4. Meanwhile the next part's keys are on their way.
2. Each score is compared with the part's others. The MOST highest are offered: their columns, their keys, and a key up
   to which all were offered.
3. The last CTA to arrive selects among all offers, as in topk/algorithms/multi_cta.py. A part has about k / PARTS of
   the selected scores, and its offer is larger than that by five standard deviations.
4. Where the offers do not suffice, the last CTA streams the row. A row of no more columns than there are offers is
   selected where it lies.

Floors: a request's keys once, dim + 4 bytes each. What bounds a row of one part a CTA is one load after the other:
block table, keys, offers, and the trip through L2 between steps 2 and 3. Scores are summed over heads in the order of
index_logits' Hopper kernels, so that they have the same bits.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram, pdl
from sparse_attn.device.cast import dot
from sparse_attn.ops.index_logits.portable.kernels import operand
from sparse_attn.ops.index_logits.portable.scores import entry_of, weighed
from sparse_attn.ops.topk.algorithms.multi_cta import dealt, select_offered
from sparse_attn.ops.topk.algorithms.single_cta import select_row
from sparse_attn.ops.topk.algorithms.streaming import select_streamed
from sparse_attn.ops.topk.primitives import output, radix_select


@triton.jit
def _places(table, part, block_size, max_blocks, RESIDENT: tl.constexpr, PARTS: tl.constexpr):
    """(the columns of a part, the cache blocks they lie in)"""
    columns = dealt(part, RESIDENT, PARTS)
    return columns, entry_of(table, columns // block_size, max_blocks)


@triton.jit
def _keys(cache, columns, blocks, limit, num_blocks, block_size, stride_block, D: tl.constexpr):
    """(halves of the codes at ``columns``, their scales, which of them there are)"""
    there = (columns < limit) & (blocks >= 0) & (blocks < num_blocks)
    base = cache + blocks.to(tl.int64) * stride_block
    within = columns % block_size
    low, high = _halves(base + within * D, there, D)
    scale = tl.load((base + block_size * D).to(tl.pointer_type(tl.float32)) + within, mask=there, other=0.0)
    return low, high, scale, there


@triton.jit
def _halves(at, real, D: tl.constexpr):
    """The halves [N, D / 2] of the codes at the byte pointers ``at`` [N], zero where not ``real``."""
    at = at[:, None] + tl.arange(0, D // 2)[None, :]
    return tl.load(at, mask=real[:, None], other=0), tl.load(at + D // 2, mask=real[:, None], other=0)


@triton.jit
def _half(low, high, which, FP8_DOT: tl.constexpr):
    codes = tl.where(which == 0, low, high)
    if FP8_DOT:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return operand(codes, True, FP8_DOT, False)


@triton.jit
def _sum_of_heads(values):
    """[keys, heads] -> [keys], in the order of index_logits/hopper/common.py:weighed_sums: a lane's heads, then the
    sums of four lanes in pairs."""
    KEYS: tl.constexpr = values.shape[0]
    HEADS: tl.constexpr = values.shape[1]
    columns = tl.permute(tl.reshape(values, [KEYS, HEADS // 8, 4, 2]), (0, 2, 1, 3))
    lanes = tl.sum(tl.reshape(columns, [KEYS, 2, 2, HEADS // 4]), 3)
    return tl.sum(tl.sum(lanes, 1), 1)


@triton.jit
def _offer(mine, keys, columns, MOST: tl.constexpr):
    """Store the MOST least of a part's ``keys``: ``mine`` receives their columns, then the keys, then a key up to which
    all were stored. Keys are ranked by all but their last bits, which make place for what tells equal ones apart."""
    COUNT: tl.constexpr = keys.shape[0]
    own = ((keys & -COUNT) | tl.arange(0, COUNT)).to(tl.uint32, bitcast=True)
    rank = tl.sum((own[None, :] < own[:, None]).to(tl.int32), 1)
    tl.store(mine + rank, columns, mask=rank < MOST)
    tl.store(mine + MOST + rank, keys, mask=rank < MOST)
    tl.store(mine + 2 * MOST + tl.zeros_like(rank), (keys & -COUNT) - 1, mask=rank == MOST)


@triton.jit(
    do_not_specialize=[
        "rows", "max_context", "num_blocks", "block_size", "max_blocks", "k", "next_n", "stride_table_request",
        "stride_logits_row",
    ]
)  # fmt: skip
def score_and_select(
    q,  # [rows, heads, D] codes
    cache,  # uint8 [num_blocks, block_size, D + 4]: a block's codes, then its scales
    weights,  # fp32 [rows, heads]
    limits,  # int32 [rows]
    block_table,  # int32 [requests, max_blocks]
    logits,  # fp32 [rows, at least max_context, in whole fours]
    out,  # int32 [rows, k], with indptr [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    offered,  # int32 [rows * PARTS, 2 * MOST + 1]
    arrivals,  # int64 [rows], zero before and after
    emulated_smem,  # int32 [CTAs, words] in the interpreter, else None
    rows,
    max_context,
    num_blocks,
    block_size,
    max_blocks,
    heads,
    k,
    next_n,
    stride_q_row,
    stride_q_head,
    stride_cache_block,
    stride_weights_row,
    stride_weights_head,
    stride_limits_row,
    stride_table_request,
    stride_logits_row,
    D: tl.constexpr,
    PAD_H: tl.constexpr,
    WHOLE_H: tl.constexpr,  # PAD_H == heads
    FP8_DOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # of what is packed, else 1
    MOST: tl.constexpr,  # scores that a part offers
    RESIDENT: tl.constexpr,  # keys of a part
    PARTS: tl.constexpr,  # of a row, a power of two
    CTAS: tl.constexpr,  # that share a row, a divisor
    CHUNK: tl.constexpr,  # columns read at once where the row is streamed
    WINDOW_SHIFT: tl.constexpr,
    SMEM_WORDS: tl.constexpr,  # behind the histogram
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    SLOTS: tl.constexpr = MOST * PARTS
    STRIDE: tl.constexpr = 2 * MOST + 1  # of an offer
    row = tl.program_id(0) // CTAS
    cta = tl.program_id(0) % CTAS
    row64 = row.to(tl.int64)
    smem = histogram.claim_cleared(emulated_smem, SMEM_WORDS, THREADS)
    pdl.wait(PDL)
    table = block_table + row64 // next_n * stride_table_request
    columns, blocks = _places(table, cta, block_size, max_blocks, RESIDENT, PARTS)
    limit = tl.minimum(tl.maximum(tl.load(limits + row64 * stride_limits_row), 0), max_context)
    low, high, scale, there = _keys(cache, columns, blocks, limit, num_blocks, block_size, stride_cache_block, D)
    head = tl.arange(0, PAD_H)
    real = head < heads
    heads_low, heads_high = _halves(q + row64 * stride_q_row + head * stride_q_head, real, D)
    weight_at = weights + row64 * stride_weights_row + head * stride_weights_head
    half = 0.5 * tl.load(weight_at, mask=real, other=0.0)
    row_ptr = logits + row64 * stride_logits_row
    offers = offered + (row * PARTS).to(tl.int64) * STRIDE
    if CTAS < PARTS:
        next_columns, next_blocks = _places(table, cta + CTAS, block_size, max_blocks, RESIDENT, PARTS)
    for part in tl.range(cta, PARTS, CTAS, num_stages=1):
        if CTAS < PARTS:  # on their way while this part is scored
            next_limit = tl.where(part + CTAS < PARTS, limit, 0)
            next_low, next_high, next_scale, next_there = _keys(
                cache, next_columns, next_blocks, next_limit, num_blocks, block_size, stride_cache_block, D
            )
            later_columns, later_blocks = _places(table, part + 2 * CTAS, block_size, max_blocks, RESIDENT, PARTS)
        # Halves lie in shared memory one after the other. A launch has 48 KiB of it, the claimed words included.
        products = tl.zeros([RESIDENT, PAD_H], tl.float32)
        for which in tl.range(2, num_stages=1):
            keys_half = _half(low, high, which, FP8_DOT)
            products = dot(keys_half, tl.trans(_half(heads_low, heads_high, which, FP8_DOT)), products)
        scores = _sum_of_heads(weighed(products, half, real, WHOLE_H, True)) * scale
        scores = tl.where(there, scores, float("-inf"))
        tl.store(row_ptr + columns, scores, mask=columns < limit)
        if limit > SLOTS:
            _offer(offers + part * STRIDE, radix_select.descending_keys(scores, there), columns, MOST)
        if CTAS < PARTS:
            low, high, scale, there, columns = next_low, next_high, next_scale, next_there, next_columns
            next_columns, next_blocks = later_columns, later_blocks

    tl.debug_barrier()
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == CTAS - 1:
        tl.store(arrivals + row, 0)
        output_map = output.of_row(
            row64, k, indptr, states, block_table if indptr is not None else None, rows, next_n, max_blocks,
            stride_table_request, BLOCK_SIZE, THREADS,
        )  # fmt: skip
        if limit <= SLOTS:
            zero = tl.full([], 0, tl.int32)
            select_row(out, row_ptr, zero, zero, limit, smem, output_map, k, SLOTS, True, False, 0, 0, True, THREADS)
        elif not select_offered(
            out, offers, STRIDE, 0, smem, output_map, k, MOST, RESIDENT, PARTS, WINDOW_SHIFT, THREADS
        ):
            zero = tl.full([], 0, tl.int64)
            select_streamed(out, row_ptr, limit, zero, smem, output_map, k, CHUNK, THREADS)
