"""Experts of few tokens: rows of x placed, gate and up with what follows them, down times the token's weight, the sum.

A row is a token's one expert: row token * k + i. Nothing is sorted: every CTA looks through all ids for the rows of its
expert. It belongs to a row, its leader, and does something only where the leader is the first of its expert's rows, or
the first after BLOCK_M of them. It multiplies the leader's row and the next ones, up to BLOCK_M. device/packed_dot.py
multiplies; a row's sums do not depend on the rows beside it.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.packed_dot import exact_packed_dot, placed
from sparse_attn.ops.layers.products.portable.routed_rows import gated


@triton.jit
def _rows_of(ids, leader, rows, experts, ROWS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its rows [BLOCK_M] from the leader on, which of them there are); none where the leader is not first."""
    at = tl.arange(0, ROWS_PADDED)
    every = tl.load(ids + at, mask=at < rows, other=-1)
    expert = tl.load(ids + leader)
    # Rows of the leader's expert, numbered from the leader on.
    mine = every == expert
    before = tl.sum((mine & (at < leader)).to(tl.int32), 0)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1 - before
    slot = tl.arange(0, BLOCK_M)
    # The first BLOCK_M of them.
    chosen = mine[None, :] & (rank[None, :] == slot[:, None])
    row = tl.sum(tl.where(chosen, at[None, :], 0), 1)
    first = (before % BLOCK_M == 0) & (expert >= 0) & (expert < experts)
    return expert, row, (tl.sum(chosen.to(tl.int32), 1) > 0) & first, first


@triton.jit
def weight_rows(
    codes, scales, expert, own, first_row, stride_codes_expert, stride_codes_row, stride_scales_expert,
    stride_scales_row, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Pointers to rows ``own``, int64, of an expert's weight, and to their scales."""
    # The expert's weight, a row of it, and the scale block of that row.
    words = codes + expert.to(tl.int64) * stride_codes_expert + own * stride_codes_row
    scale_rows = scales + expert.to(tl.int64) * stride_scales_expert
    scale_rows += ((own + first_row) // BLOCK_ROWS) * stride_scales_row
    return words, scale_rows


@triton.jit
def gates_and_ups(tile, intermediate, BLOCK_N: tl.constexpr):
    """Rows of the weight, int64 [BLOCK_N]: eight gates, eight ups, and so on. So a thread has both of an output."""
    at = tl.arange(0, BLOCK_N)
    column = tile * (BLOCK_N // 2) + at // 16 * 8 + at % 8
    return (tl.minimum(column, intermediate - 1) + at % 16 // 8 * intermediate).to(tl.int64)


@triton.jit
def inner_values(sums, clamp, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_N / 2, BLOCK_M] of the products of ``gates_and_ups``."""
    sums = tl.permute(tl.reshape(sums, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
    gate, up = tl.split(sums)
    return tl.reshape(gated(gate, up, clamp, CLAMPED), [BLOCK_N // 2, BLOCK_M])


@triton.jit(do_not_specialize=["rows", "k", "experts", "first_row", "clamp"])
def gate_up(
    x,  # bf16 [tokens, hidden], placed
    ids,  # int32 [rows]
    codes,  # int32 words of [experts, 2 * intermediate, hidden] codes, contiguous in a row
    scales,
    out,  # bf16 [rows, intermediate], placed for down
    rows,
    k,  # rows of a token
    experts,
    hidden,
    intermediate,
    first_row,  # rows of the first scale block that lie before the weight
    clamp,
    stride_codes_expert,  # in words
    stride_codes_row,
    stride_scales_expert,
    stride_scales_row,
    ROWS_PADDED: tl.constexpr,
    CODES: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a scale block
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # half of them gates, half ups
    BLOCK_K: tl.constexpr,
    OUT_EACH: tl.constexpr,  # of down: codes of a word
    CLAMPED: tl.constexpr,
    WAY: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    expert, row, inside, first = _rows_of(ids, tl.program_id(1), rows, experts, ROWS_PADDED, BLOCK_M)
    if first:
        HALF: tl.constexpr = BLOCK_N // 2
        own = gates_and_ups(tl.program_id(0), intermediate, BLOCK_N)
        words, scale_rows = weight_rows(
            codes, scales, expert, own, first_row, stride_codes_expert, stride_codes_row, stride_scales_expert,
            stride_scales_row, BLOCK_ROWS,
        )  # fmt: skip
        sums = exact_packed_dot(
            x, (row // k).to(tl.int64) * hidden, inside, words, scale_rows, 0, hidden // BLOCK_K, CODES, E8M0,
            BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, WAY,
        )  # fmt: skip
        # A thread has a gate and its up: nothing leaves registers.
        inner = inner_values(sums, clamp, CLAMPED, BLOCK_M, BLOCK_N)
        output = tl.program_id(0) * HALF + tl.arange(0, HALF)
        to = row.to(tl.int64)[None, :] * intermediate + placed(output, OUT_EACH)[:, None]
        tl.store(out + to, cast.round_to_bf16(inner), mask=inside[None, :] & (output < intermediate)[:, None])


@triton.jit(do_not_specialize=["rows", "experts", "first_row"])
def down(
    x,  # bf16 [rows, intermediate], placed
    weights,  # fp32 [rows]
    ids,
    codes,  # int32 words of [experts, hidden, intermediate] codes, contiguous in a row
    scales,
    out,  # fp32 [rows, hidden]
    rows,
    experts,
    hidden,
    intermediate,
    first_row,
    stride_codes_expert,
    stride_codes_row,
    stride_scales_expert,
    stride_scales_row,
    ROWS_PADDED: tl.constexpr,
    CODES: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAY: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    expert, row, inside, first = _rows_of(ids, tl.program_id(1), rows, experts, ROWS_PADDED, BLOCK_M)
    if first:
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        own = tl.minimum(output, hidden - 1).to(tl.int64)
        words, scale_rows = weight_rows(
            codes, scales, expert, own, first_row, stride_codes_expert, stride_codes_row, stride_scales_expert,
            stride_scales_row, BLOCK_ROWS,
        )  # fmt: skip
        sums = exact_packed_dot(
            x, row.to(tl.int64) * intermediate, inside, words, scale_rows, 0, intermediate // BLOCK_K, CODES, E8M0,
            BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, WAY,
        )  # fmt: skip
        # A row's term, weighed; add_terms adds a token's terms.
        weight = tl.load(weights + row, mask=inside, other=0.0)
        to = row.to(tl.int64)[None, :] * hidden + output[:, None]
        tl.store(out + to, sums * weight[None, :], mask=inside[None, :] & (output < hidden)[:, None])


@triton.jit(do_not_specialize=["k", "experts"])
def add_terms(
    terms,  # fp32, or bf16 of sorted rows, [tokens * k, hidden]; those of other experts are not written
    ids,
    out,  # bf16 [tokens, hidden]
    k,
    experts,
    hidden,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    sums = tl.zeros([BLOCK], tl.float32)
    # Terms are added in order of i.
    for i in range(k):
        row = token * k + i
        expert = tl.load(ids + row)
        there = (expert >= 0) & (expert < experts)
        sums += tl.load(terms + row.to(tl.int64) * hidden + at, mask=inside & there, other=0.0)
    tl.store(out + token.to(tl.int64) * hidden + at, cast.cast(sums, out.dtype.element_ty), mask=inside)
