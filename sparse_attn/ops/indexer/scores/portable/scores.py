"""What the kernels of kernels.py and mxfp4.py share: which keys a CTA scores, and what it does with their products."""

import triton
import triton.language as tl


@triton.jit
def weighed(products, weights, real, WHOLE_H: tl.constexpr, HALF_WEIGHTS: tl.constexpr):
    """relu(products) [BLOCK_KV, columns] times ``weights``, 0 where a column is no ``real`` head.

    HALF_WEIGHTS: ``weights`` are half of them: x + |x| is 2 * relu(x) of what fp8 codes give, finite or NaN. On NVIDIA
    an addition runs at twice the rate of a maximum.
    """
    if HALF_WEIGHTS:
        weighed = (products + tl.abs(products)) * weights[None, :]
    else:
        weighed = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    if not WHOLE_H:
        weighed = tl.where(real[None, :], weighed, 0.0)  # an infinite key times the zeros of padding is NaN
    return weighed


# --- of keys side by side


@triton.jit
def out_of_reach(kv_start, kv_end, row, rows, begin, stride_start_row, stride_end_row, BLOCK_KV: tl.constexpr):
    """Whether none of the rows ``row`` sees any of the BLOCK_KV keys from ``begin`` on."""
    # Rows that do not exist see nothing.
    starts = tl.load(kv_start + row.to(tl.int64) * stride_start_row, mask=row < rows, other=2147483647)
    ends = tl.load(kv_end + row.to(tl.int64) * stride_end_row, mask=row < rows, other=-2147483648)
    return (tl.max(ends, 0) <= begin) | (tl.min(starts, 0) >= begin + BLOCK_KV)


@triton.jit
def clear(out, first, last, key, real_key, stride_out_row, BLOCK_KV: tl.constexpr):
    """-inf for the rows [first, last) and the keys ``key``."""
    for m in range(first, last):
        out_at = out + tl.cast(m, tl.int64) * stride_out_row + key
        tl.store(out_at, tl.full([BLOCK_KV], float("-inf"), tl.float32), mask=real_key)


# --- of keys in blocks


@triton.jit
def limits(context_lens, row, max_context, stride_lens_row, NEXT_N: tl.constexpr):
    """(how many keys each of a request's rows sees, the most of them)"""
    lens_at = context_lens + row * stride_lens_row
    limit = tl.minimum(tl.maximum(tl.load(lens_at, mask=row < NEXT_N, other=0), 0), max_context)
    return limit, tl.max(limit, 0)


@triton.jit
def entry_of(table, column, max_blocks):
    """An entry of a block table; -1 behind its last."""
    return tl.load(table + column, mask=column < max_blocks, other=-1)


@triton.jit
def find_block(
    table, position, begin, step, longest, next_entry, max_blocks, num_blocks, block_size, ONE_ENTRY: tl.constexpr
):
    """(entries of the block table for the keys at ``position``, which begin at ``begin``; the entries' columns; whether
    each is a key; the entry of the tile ``step`` further on). ONE_ENTRY: the keys lie in one block, whose entry is
    ``next_entry``."""
    # One entry for the tile; the next one's is on its way while keys are multiplied.
    if ONE_ENTRY:
        table_column = begin // block_size
        entry = next_entry
        next_entry = entry_of(table, (begin + step) // block_size, max_blocks)
        block = tl.where(position < longest, entry, -1)
    # A tile spans blocks: an entry for each key.
    else:
        table_column = position // block_size
        mapped = (position < longest) & (table_column < max_blocks)
        block = tl.load(table + table_column, mask=mapped, other=-1)
        entry = block
    kv_valid = (block >= 0) & (block < num_blocks)
    return entry, table_column, kv_valid, next_entry


@triton.jit
def store(
    out_row, maxima, score, begin, position, row, max_context, number, stride_maxima_row,
    NEXT_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the scores [BLOCK_KV, BLOCK_Q] of the keys from ``begin`` on, and the highest of every GROUP of them.
    number: the rows' numbers among those of all requests."""
    # To the end of the last group: its maximum covers all that is stored.
    written = (row < NEXT_N)[None, :] & (position < tl.cdiv(max_context, GROUP) * GROUP)[:, None]
    tl.store(out_row[None, :] + position[:, None], score, mask=written)
    if maxima is not None:
        group = begin // GROUP + tl.arange(0, BLOCK_KV // GROUP)
        highest = tl.max(tl.reshape(score, [BLOCK_KV // GROUP, GROUP, BLOCK_Q]), 1)
        to = maxima + number * stride_maxima_row
        tl.store(
            to[None, :] + group[:, None],
            highest,
            mask=(row < NEXT_N)[None, :] & (group * GROUP < max_context)[:, None],
        )


@triton.jit
def clear_behind(
    out_row, row, longest, first, step, max_context,
    NEXT_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """-inf for the tiles behind ``longest`` keys, of those that begin at first, first + step, ..."""
    # The first tile of this CTA that no row sees.
    dead = tl.maximum(tl.cdiv(longest - first, step), 0) * step + first
    for begin in range(dead, max_context, step):
        position = begin + tl.arange(0, BLOCK_KV)
        written = (row < NEXT_N)[None, :] & (position < max_context)[:, None]
        tl.store(
            out_row[None, :] + position[:, None],
            tl.full([BLOCK_KV, BLOCK_Q], float("-inf"), tl.float32),
            mask=written,
        )
