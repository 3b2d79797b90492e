"""Experts of many tokens, in five launches: rows of x in the order of the codes, rows sorted by expert, gate and up
with what follows them, down times the token's weight, the sum.

A row is a token's one expert: row token * k + i. portable/routed_rows.py sorts them, and deals them out to tiles. The
products read x by the rows' tokens, write inner values in sorted order, and terms in the rows' own. Floor, bytes:
the weights of the experts touched, a row's x, inner values and term. Many rows: the matrix units in bf16.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.packed_dot import exact_packed_dot, placed
from sparse_attn.ops.layers.products.swap_ab.experts import gates_and_ups, inner_values, weight_rows


@triton.jit
def _rows_of(spans, order, tile, BLOCK_M: tl.constexpr):
    """(expert or -1, sorted rows [BLOCK_M], the rows themselves, which of them there are) of a tile."""
    expert = tl.load(spans + 3 * tile)
    at = tl.load(spans + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    inside = at < tl.load(spans + 3 * tile + 2)
    row = tl.load(order + at, mask=inside & (expert >= 0), other=0)
    return expert, at, row, inside


@triton.jit(do_not_specialize=["k", "first_row", "clamp"])
def gate_up(
    x,  # bf16 [tokens, hidden], placed
    order,
    spans,
    codes,  # int32 words of [experts, 2 * intermediate, hidden] codes, contiguous in a row
    scales,
    out,  # bf16 [rows, intermediate], sorted, placed for down
    k,  # rows of a token
    hidden,
    intermediate,
    first_row,  # rows of the first scale block that lie before the weight
    clamp,
    stride_codes_expert,  # in words
    stride_codes_row,
    stride_scales_expert,
    stride_scales_row,
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
    expert, at, row, inside = _rows_of(spans, order, tl.program_id(1), BLOCK_M)
    if expert >= 0:
        HALF: tl.constexpr = BLOCK_N // 2
        own = gates_and_ups(tl.program_id(0), intermediate, BLOCK_N)
        words, scale_rows = weight_rows(
            codes, scales, expert, own, first_row, stride_codes_expert, stride_codes_row, stride_scales_expert,
            stride_scales_row, BLOCK_ROWS,
        )  # fmt: skip
        # Rows of x are read by the token: nothing is copied before.
        token = (row // k).to(tl.int64)
        sums = exact_packed_dot(
            x, token * hidden, inside, words, scale_rows, 0, hidden // BLOCK_K, CODES, E8M0, BLOCK_COLUMNS, BLOCK_M,
            BLOCK_N, BLOCK_K, WAY,
        )  # fmt: skip
        inner = inner_values(sums, clamp, CLAMPED, BLOCK_M, BLOCK_N)
        output = tl.program_id(0) * HALF + tl.arange(0, HALF)
        to = at.to(tl.int64)[None, :] * intermediate + placed(output, OUT_EACH)[:, None]
        tl.store(out + to, cast.round_to_bf16(inner), mask=inside[None, :] & (output < intermediate)[:, None])


@triton.jit(do_not_specialize=["first_row"])
def down(
    x,  # bf16 [rows, intermediate], sorted, placed
    weights,  # fp32 [rows]
    order,
    spans,
    codes,  # int32 words of [experts, hidden, intermediate] codes, contiguous in a row
    scales,
    out,  # bf16 [rows, hidden]: a row's term
    hidden,
    intermediate,
    first_row,
    stride_codes_expert,
    stride_codes_row,
    stride_scales_expert,
    stride_scales_row,
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
    expert, at, row, inside = _rows_of(spans, order, tl.program_id(1), BLOCK_M)
    if expert >= 0:
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        own = tl.minimum(output, hidden - 1).to(tl.int64)
        words, scale_rows = weight_rows(
            codes, scales, expert, own, first_row, stride_codes_expert, stride_codes_row, stride_scales_expert,
            stride_scales_row, BLOCK_ROWS,
        )  # fmt: skip
        sums = exact_packed_dot(
            x, at.to(tl.int64) * intermediate, inside, words, scale_rows, 0, intermediate // BLOCK_K, CODES, E8M0,
            BLOCK_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K, WAY,
        )  # fmt: skip
        # Terms go to the rows' own places, weighed.
        weight = tl.load(weights + row, mask=inside, other=0.0)
        to = row.to(tl.int64)[None, :] * hidden + output[:, None]
        mask = inside[None, :] & (output < hidden)[:, None]
        tl.store(out + to, cast.round_to_bf16(sums * weight[None, :]), mask=mask)
