"""What the Hopper kernels of index scores share: a program's part of the stages, and what becomes of a product.

Both are persistent. A unit is the query rows that are multiplied together: keys stand in a product's rows, the heads of the
unit's rows in its columns, its lanes. A producer warp fills a ring of stages by TMA, two warpgroups consume them in turn. A
stage is two products, of two tiles of keys or of two halves of the lanes, and a consumer starts each product before it sums
the one before, so that relu, weights and sums run under the matrix unit. Every program counts the stages of all units, from
the lengths on the device, and takes as many as any other, next to each other.

Ring positions follow from how many stages and units came before, nothing else is carried from unit to unit. A consumer always
starts the next product, behind a unit's last stage too: of whatever lies in the slot, and nobody reads it.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

TILE = gl.constexpr(64)  # keys of a product
CONSUMERS = gl.constexpr(2)
QUERIES = gl.constexpr(2)  # units whose queries are in shared memory
PRODUCTS = gl.constexpr(2)  # of a stage
LANES = gl.constexpr(128)  # of a product, at most
ALL = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def allocate_rings(STAGES: gl.constexpr):
    """mbarriers of stages and of queries: (filled, freed, queries filled, queries freed)."""
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    query_filled = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARS)
    query_freed = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARS)
    for i in gl.static_range(STAGES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=1)
        if i < QUERIES:
            mbarrier.init(query_filled.index(i), count=1)
            mbarrier.init(query_freed.index(i), count=CONSUMERS)
    return filled, freed, query_filled, query_freed


@gluon.jit
def ring(use, SLOTS: gl.constexpr):
    """(slot, phase) of the ``use``-th use of a ring."""
    return use % SLOTS, use // SLOTS % 2


@gluon.jit
def multiply(tiles, slot, queries, place, which: gl.constexpr, HALVES: gl.constexpr):
    """Start a stage's product ``which``: of one of its tiles and all lanes, or of its only tile and half of the lanes."""
    COLUMNS: gl.constexpr = queries.shape[1] // HALVES
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    a = tiles.index(slot if HALVES == PRODUCTS else slot * PRODUCTS + which).reshape([TILE, queries.shape[2]])
    b = queries.index(place)
    if HALVES == PRODUCTS:
        b = b.slice(which * COLUMNS, COLUMNS, dim=0)
    nothing = gl.zeros([TILE, COLUMNS], gl.float32, RESULT)
    return warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share(total):
    """[begin, end) of ``total`` stages: this program's."""
    program = gl.program_id(0)
    each = total // gl.num_programs(0)
    more = total - each * gl.num_programs(0)
    begin = program * each + gl.minimum(program, more)
    return begin, begin + each + (program < more).to(gl.int32)


@gluon.jit
def search(stages, counted, begin, end, first, skipped, last):
    """Go on looking for the units of stages ``begin`` and ``end - 1`` in the next chunk's ``stages`` per unit.

    counted: stages of the chunks before. first, last: units that end before either; skipped: stages of those before ``begin``.
    """
    upto = gl.associative_scan(stages, 0, _add) + counted
    before = upto <= begin
    first += gl.sum(before.to(gl.int32), 0)
    skipped = gl.maximum(skipped, gl.max(gl.where(before, upto, 0), 0))
    last += gl.sum((upto < end).to(gl.int32), 0)
    return first, skipped, last


@gluon.jit
def sums(product, weights, ROWS: gl.constexpr):
    """Of relu(product) [TILE, ROWS * heads] times ``weights``, over the heads of each row: a tuple of fp32 [TILE]."""
    weighed = gl.maximum(product, 0.0, propagate_nan=ALL) * gl.expand_dims(weights, 0)
    if ROWS == 1:
        return (_sum(weighed),)
    elif ROWS == 2:
        front, back = _halves(weighed)
        return _sum(front), _sum(back)
    else:
        gl.static_assert(ROWS == 4)
        front, back = _halves(weighed)
        return _pair(front) + _pair(back)


@gluon.jit
def _halves(x):
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _pair(x):
    front, back = _halves(x)
    return _sum(front), _sum(back)


@gluon.jit
def _sum(x):
    KEY: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    return gl.convert_layout(gl.sum(x, 1), KEY, assert_trivial=True)


def in_lines(tensor) -> bool:
    """Whether TMA can copy boxes of a tensor: whole rows of 16 bytes, that do not overlap."""
    lines = tensor.data_ptr() % 16 == 0 and tensor.stride(-1) == 1
    for size, stride, inner in zip(tensor.shape, tensor.stride(), tensor.shape[1:]):
        lines = lines and (stride * tensor.element_size() % 16 == 0 and stride >= inner)
    return lines
