"""What lies before, between and behind the experts' two products: rows sorted by expert and brought into the order in
which a product reads them, or quantised; gates times ups; and a token's weighted sum.

A row is a token's one expert: row token * k + i. ``order_rows`` counts, an expert a CTA, and needs no other launch: an
expert's rows begin behind those of all experts before it. It may deal sorted rows out to tiles of BLOCK_M rows of one
expert. Tile t is one of expert e's if e + first // BLOCK_M <= t, where ``first`` is the expert's first row: tiles of
different experts never meet, and there are experts + rows // BLOCK_M of them at most.
"""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl
from sparse_attn.device.fp8 import encode_scaled, finite_or_nan, pow2_exponent


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
    # Count rows of experts before, where this one's begin, and its own.
    for begin in range(0, rows, BLOCK):
        some = tl.load(ids + begin + at, mask=begin + at < rows, other=-1)
        first += tl.sum(((some >= 0) & (some < expert)).to(tl.int32), 0)
        count += tl.sum((some == expert).to(tl.int32), 0)
    # Place this expert's rows, in their order.
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
    # This expert's tiles, up to where the next one's begin.
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
    # Rows of no expert are not sorted, so ``ends`` ends before them.
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
    # Terms are added in order of i, wherever they were sorted to.
    for i in range(k):
        row = token * k + i
        expert = tl.load(ids + row)
        there = (expert >= 0) & (expert < experts)  # nobody writes the others' terms
        term = tl.load(terms + tl.load(place + row).to(tl.int64) * hidden + at, mask=inside & there, other=0.0)
        sums += term.to(tl.float32) * tl.where(there, tl.load(weights + row), 0.0)
    tl.store(out + token.to(tl.int64) * hidden + at, cast.cast(sums, out.dtype.element_ty), mask=inside)


@triton.jit
def _group(source, column, columns, group: tl.constexpr, stride_column):
    """fp32 values [n, 32] of a group of the 128 columns from each of ``column`` on; 0 behind the last column."""
    at = column[:, None] + group * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(source + at.to(tl.int64) * stride_column, mask=(column < columns)[:, None], other=0.0)
    return values.to(tl.float32)


@triton.jit
def _of_groups(groups, TOGETHER: tl.constexpr):
    """groups: [n, 32] of each group of 128 columns -> [n, 128], TOGETHER of each group in turn. A thread that has
    neighbours of every group has neighbours here."""
    values = tl.join(tl.join(groups[0], groups[2]), tl.join(groups[1], groups[3]))
    n: tl.constexpr = groups[0].shape[0]
    values = tl.permute(tl.reshape(values, [n, 32 // TOGETHER, TOGETHER, 4]), [0, 1, 3, 2])
    return tl.reshape(values, [n, 128])


@triton.jit
def _store(values, to, row, column, columns, ids, place, k, experts):
    """values [n, 128] of a token as ``row``, or where ``place`` has its experts'."""
    at = column[:, None] + tl.arange(0, 128)[None, :]
    inside = (column < columns)[:, None]
    if place is None:
        tl.store(to + row * columns + at, values, mask=inside)
    else:
        # A token's row goes to each of its experts.
        for i in range(row * k, row * k + k):
            expert = tl.load(ids + i)
            if (expert >= 0) & (expert < experts):
                tl.store(to + tl.load(place + i).to(tl.int64) * columns + at, values, mask=inside)


@triton.jit(do_not_specialize=["k", "experts"])
def sort_rows(
    x,  # [tokens, columns]
    ids,  # int32 [tokens, k], contiguous
    place,  # int32 [tokens, k]: as what row a token's goes to its expert
    out,  # bf16 [rows, columns], contiguous, in the order of device/mxfp4_operand.py
    k,
    experts,
    columns,  # a multiple of 128
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,  # a multiple of 128
    PDL: tl.constexpr,
):
    """A token a CTA, and BLOCK columns."""
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK // 128) * 128
    # Groups of 32 are loaded apart, and joined in the order of an operand.
    groups = ()
    for group in tl.static_range(4):
        values = _group(x + row * stride_row, column, columns, group, stride_column)
        groups += (values.to(out.dtype.element_ty),)
    values = _of_groups(groups, 2)
    _store(values, out, row, column, columns, ids, place, k, experts)


@triton.jit(do_not_specialize=["k", "experts"])
def quantise_rows(
    x,  # [tokens, columns]
    ids,  # as sort_rows', or None
    place,  # as sort_rows'; or None: row r is that of x
    codes,  # uint8 [rows, columns], contiguous, in the order of device/mxfp4_operand.py
    scales,  # fp32 [rows], a power of two each
    k,
    experts,
    columns,  # a multiple of 128
    stride_row,
    stride_column,
    BLOCK: tl.constexpr,  # a multiple of 128
    FP8_CAST: tl.constexpr,  # as encode_scaled's
    PDL: tl.constexpr,
):
    """A token a CTA, which reads it twice."""
    pdl.wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = x + row * stride_row
    # First reading: the largest finite magnitude, which gives the row's scale.
    largest = tl.zeros([BLOCK // 128, 32], tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK // 128) * 128
        for group in tl.static_range(4):
            values = _group(source, column, columns, group, stride_column)
            largest = tl.maximum(largest, finite_or_nan(values)[1])
    exponent = pow2_exponent(tl.max(tl.max(largest, 1), 0))
    # Second reading: codes.
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK // 128) * 128
        groups = ()
        for group in tl.static_range(4):
            values = _group(source, column, columns, group, stride_column)
            groups += (encode_scaled(finite_or_nan(values)[0], exponent, FP8_CAST),)
        values = _of_groups(groups, 4)
        _store(values, codes, row, column, columns, ids, place, k, experts)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    if place is None:
        tl.store(scales + row, scale)
    else:
        for i in range(row * k, row * k + k):
            expert = tl.load(ids + i)
            if (expert >= 0) & (expert < experts):
                tl.store(scales + tl.load(place + i), scale)


@triton.jit(do_not_specialize=["spans_count"])
def keep_spans(
    dealt,  # int32 [spans, 3], as order_rows deals them
    spans,  # int32 [spans, 3]: those of them with rows, in their order
    count,  # int32 [1]: how many these are
    spans_count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """So that CTAs that take every n-th tile have equally many."""
    pdl.wait(PDL)
    at = tl.arange(0, BLOCK)
    found = tl.zeros([], tl.int32)
    # Kept spans close up, in order.
    for begin in range(0, spans_count, BLOCK):
        source = dealt + 3 * (begin + at)
        expert = tl.load(source, mask=begin + at < spans_count, other=-1)
        held = expert >= 0
        to = spans + 3 * (found + tl.cumsum(held.to(tl.int32), 0) - 1)
        tl.store(to, expert, mask=held)
        for n in tl.static_range(1, 3):
            tl.store(to + n, tl.load(source + n, mask=held, other=0), mask=held)
        found += tl.sum(held.to(tl.int32), 0)
    tl.store(count, found)
