"""What lies before, between and behind two grouped products: rows sorted by expert, gates times ups, and a token's
weighted sum.

A row is a token's one expert: row token * k + i. ``order_rows`` counts, an expert a CTA, and needs no other launch: an
expert's rows begin behind those of all experts before it. It may deal sorted rows out to tiles of BLOCK_M rows of one
expert. Tile t is one of expert e's if e + first // BLOCK_M <= t, where ``first`` is the expert's first row: tiles of
different experts never meet, and there are experts + rows // BLOCK_M of them at most.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl


@triton.jit(do_not_specialize=["rows", "experts", "tiles"])
def order_rows(
    ids,  # int32 [rows]
    order,  # int32 [rows]: rows sorted by expert, those of no expert left out
    spans,  # int32 [tiles, 3]: a tile's expert or -1, its first sorted row, the end of its expert's; or None
    place,  # int32 [rows]: where a row is sorted to, nothing for those of no expert; or None
    ends,  # int32 [experts]: ends of the experts' sorted rows; or None
    rows,
    experts,
    tiles,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    first = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for begin in range(0, rows, BLOCK):
        some = tl.load(ids + begin + at, mask=begin + at < rows, other=-1)
        first += tl.sum(((some >= 0) & (some < expert)).to(tl.int32), 0)
        count += tl.sum((some == expert).to(tl.int32), 0)
    to = first
    for begin in range(0, rows, BLOCK):
        mine = tl.load(ids + begin + at, mask=begin + at < rows, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + to + rank, begin + at, mask=mine)
        if place is not None:
            tl.store(place + begin + at, to + rank, mask=mine)
        to += tl.sum(mine.to(tl.int32), 0)
    if ends is not None:
        tl.store(ends + expert, to)
    if spans is not None:
        tile = expert + first // BLOCK_M
        last = tl.where(expert == experts - 1, tiles, expert + 1 + to // BLOCK_M)
        for n in range(tile, last):
            row = first + (n - tile) * BLOCK_M
            tl.store(spans + 3 * n, tl.where(row < to, expert, -1))
            tl.store(spans + 3 * n + 1, row)
            tl.store(spans + 3 * n + 2, to)


@triton.jit(do_not_specialize=["k", "experts"])
def gather_tokens(
    x,  # [tokens, hidden]
    order,  # int32 [rows]
    ends,  # int32 [experts]
    out,  # [rows, hidden], contiguous
    k,
    experts,
    hidden,
    stride_token,
    stride_column,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(ends + experts - 1):
        token = (tl.load(order + row) // k).to(tl.int64)
        values = tl.load(x + token * stride_token + at.to(tl.int64) * stride_column, mask=at < hidden, other=0.0)
        tl.store(out + row.to(tl.int64) * hidden + at, values, mask=at < hidden)


@triton.jit
def gated(gate, up, clamp, CLAMPED: tl.constexpr):
    """silu(gate) * up in fp32. clamp: gates are bounded from above, ups both ways; NaN stays."""
    if CLAMPED:
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["clamp"])
def gate_rows(
    both,  # [rows, 2 * intermediate], contiguous, gates first
    out,  # [rows, intermediate], contiguous
    intermediate,
    clamp,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < intermediate
    source = both + row * 2 * intermediate + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + intermediate, mask=inside, other=0.0).to(tl.float32)
    to = out + row * intermediate + at
    tl.store(to, cast.cast(gated(gate, up, clamp, CLAMPED), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["k", "experts"])
def add_rows(
    terms,  # [tokens * k, hidden], contiguous, sorted by expert
    place,  # int32 [tokens * k]: where a token's i-th term lies
    weights,  # fp32 [tokens * k]
    ids,  # int32 [tokens * k]
    out,  # [tokens, hidden], contiguous
    k,
    experts,
    hidden,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    sums = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        row = token * k + i
        expert = tl.load(ids + row)
        there = (expert >= 0) & (expert < experts)  # nobody writes the others' terms
        term = tl.load(terms + tl.load(place + row).to(tl.int64) * hidden + at, mask=inside & there, other=0.0)
        sums += term.to(tl.float32) * tl.where(there, tl.load(weights + row), 0.0)
    tl.store(out + token.to(tl.int64) * hidden + at, cast.cast(sums, out.dtype.element_ty), mask=inside)
