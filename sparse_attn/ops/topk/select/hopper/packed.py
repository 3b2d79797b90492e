"""device/packing.py for a cluster a row, in Gluon. Each CTA waits for the rows before. CTA 0 stores the bounds."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import packing, ptx_io

COUNT = gl.constexpr(packing.COUNT.value)


@gluon.jit
def slots_of(blocks, columns, max_blocks, BLOCK_SIZE: gl.constexpr):
    """The cache slots of ``columns``. Columns beyond the block table give any value."""
    block_id = ptx_io.look_up(blocks, columns // BLOCK_SIZE, max_blocks)
    return block_id * BLOCK_SIZE + columns % BLOCK_SIZE


@gluon.jit
def tell_later_rows(states, row, rows, count, LINE: gl.constexpr):
    """As packing.tell_later_rows, of at most as many rows as threads; the compiler keeps what CTA 0 adds."""
    later = row + 1 + gl.arange(0, 32, LINE)
    told = count.to(gl.int64) + COUNT
    gl.atomic_add(states + later, told + later.to(gl.int64) * 0, mask=later < rows, sem="relaxed")


@gluon.jit
def told_by_rows_before(states, row):
    """As packing.told_by_rows_before."""
    state = row * 0
    while (state >> 32) < row:
        state = gl.load(states + row, volatile=True)
    return state & 0xFFFFFFFF


@gluon.jit
def store_bounds(indptr, row, rows, begin, count):
    gl.store(indptr + row, begin.to(gl.int32))
    if row == rows - 1:
        gl.store(indptr + rows, (begin + count).to(gl.int32))


@gluon.jit
def unused(row, rows, begin, count, most):
    """Behind all rows, the first of the places that this row leaves of its ``most``."""
    return (rows.to(gl.int64) - row) * most + begin - (most - count)


@gluon.jit
def clear(out, first, end, LINE: gl.constexpr):
    """-1 at out[first : end]."""
    for at in range(first, end, 256):
        place = at + gl.arange(0, 256, LINE)
        gl.store(out + place, place * 0 - 1, mask=place < end)
