"""Rows of a ragged result, each stored by a program of its own behind the rows before it.

A row has a state, int64, zero before and after. Where all programs run at once, each adds 1 << 32 | its count to the
state of every later row, and has what it needs when the upper half of its own state is the number of rows before it.
Then nobody writes that state any more. It says all by itself: its accesses order nothing else.
"""

import triton
import triton.language as tl

COUNT = tl.constexpr(1 << 32)
SPAN = tl.constexpr(256)  # states written at a time


@triton.jit
def tell_later_rows(states, row, rows, count):
    # One row more has told, and its count, in one addition.
    told = count.to(tl.int64) + COUNT
    for start in range(row + 1, rows, SPAN):
        later = start + tl.arange(0, SPAN)
        tl.atomic_add(states + later, tl.full([SPAN], 0, tl.int64) + told, mask=later < rows, sem="relaxed")


@triton.jit
def told_by_rows_before(states, row):
    """Sum of the counts of rows [0, row), once all of them have told."""
    state = tl.full([], 0, tl.int64)
    while (state >> 32) < row:
        if tl.target_info.is_hip():
            state = tl.load(states + row, cache_modifier=".cv")  # Triton drops volatile on AMD,
        else:
            state = tl.load(states + row, volatile=True)  # and ptxas takes no .cv beside it
    return state & 0xFFFFFFFF


@triton.jit
def forget(states, row):
    """Zero a row's state, once it was told."""
    tl.debug_barrier()  # every warp has seen the state
    tl.atomic_xchg(states + row, 0, sem="relaxed")


@triton.jit
def store_bounds(indptr, row, rows, before, count):
    tl.store(indptr + row, before.to(tl.int32))
    if row == rows - 1:
        tl.store(indptr + rows, (before + count).to(tl.int32))


@triton.jit
def clear_unused(indices, row, rows, before, count, most, BLOCK: tl.constexpr):
    """-1 behind all rows, in rows * most places: each row clears as many as it leaves of its ``most``, counted from the
    end."""
    end = rows.to(tl.int64) * most - (row.to(tl.int64) * most - before)
    for start in range(0, most - count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(indices + end - 1 - column, tl.full([BLOCK], -1, tl.int32), mask=column < most - count)
