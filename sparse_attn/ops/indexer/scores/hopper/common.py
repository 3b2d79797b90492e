"""What the Hopper kernels of index scores share: a CTA's run of tiles, its rings, and what becomes of a product.

README.md has the schedule, the barriers and the shared memory of both.

A query block is the rows that are multiplied together. Keys are the rows of a product; the heads of the query block's
rows are its columns. A producer warp loads tiles of keys into a ring by TMA. Four consumer warpgroups multiply a tile,
at most COLUMNS columns each, and sum while others multiply.

The kernels are persistent. Every CTA counts the tiles of all query blocks, from the lengths on the device, and takes as
many as any other, next to each other. Where a ring stands follows from how many tiles and query blocks came before;
nothing else is carried from query block to query block.

A stage is filled for the same consumers every time. Another consumer could wait for it while it is being filled the
time before, and take the phase before that for its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.indexer.scores.hopper import constants

BLOCK_KV = gl.constexpr(constants.BLOCK_KV)
COLUMNS = gl.constexpr(constants.COLUMNS)
CONSUMERS = gl.constexpr(constants.CONSUMERS)
Q_STAGES = gl.constexpr(constants.Q_STAGES)

Scalar = gl.tensor | gl.constexpr  # a field of an aggregate: an argument of the kernel, constexpr where it is 1 or None


@aggregate
class Barriers:
    """mbarriers of a ring of tiles and of one of query blocks.

    full: a tile is there, one arrival and its bytes. empty: its products are done, an arrival of each. q_full: a query
    block is there. q_empty: all consumers are done with it.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor


@aggregate
class Run:
    """A CTA's tiles: ``count`` of query blocks [first, last), without the first block's first ``skip``."""

    first: gl.tensor
    skip: gl.tensor
    last: gl.tensor
    count: gl.tensor


@gluon.constexpr_function
def products(columns):
    """Of a tile and a query block of so many columns."""
    return -(-columns // COLUMNS.value)


@gluon.constexpr_function
def product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, PRODUCTS: gl.constexpr):
    """PRODUCTS: of a tile."""
    gl.static_assert(STAGES % (CONSUMERS // PRODUCTS) == 0)  # then own_tile keeps a stage to its consumers
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    # A tile is freed by the consumers of its products, a query block by all of them.
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PRODUCTS)
        if i < Q_STAGES:
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=CONSUMERS)
    return Barriers(full, empty, q_full, q_empty)


@gluon.constexpr_function
def log2(value):
    """Of a power of two."""
    exponent = value.bit_length() - 1
    assert value == 1 << exponent, value
    return exponent


@gluon.jit
def ring(use, STAGES: gl.constexpr):
    """(stage, phase) of the ``use``-th use of a ring; without division, for every tile comes through here in every
    warp."""
    return use & (STAGES - 1), (use >> log2(STAGES)) & 1


@gluon.jit
def own_tile(turn: gl.constexpr, done, TURNS: gl.constexpr):
    """How many tiles behind the first ``done`` a consumer passes over before its own. It takes every TURNS-th
    tile."""
    return (turn - done % TURNS + TURNS) % TURNS


@gluon.jit
def multiply(tile, q):
    """Start the product of a tile's keys [1, BLOCK_KV, D] and some columns of a query block [columns, D]."""
    N: gl.constexpr = q.shape[0]
    RESULT: gl.constexpr = product_layout(N)
    keys = tile.reshape([BLOCK_KV, q.shape[1]])
    zeros = gl.zeros([BLOCK_KV, N], gl.float32, RESULT)
    return warpgroup_mma(keys, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share(total):
    """[begin, end) of ``total`` tiles: this CTA's."""
    # Shares differ by one tile at most; the first CTAs have the larger ones.
    cta = gl.program_id(0)
    each = total // gl.num_programs(0)
    more = total - each * gl.num_programs(0)
    begin = cta * each + gl.minimum(cta, more)
    return begin, begin + each + (cta < more).to(gl.int32)


@gluon.jit
def search(tiles, counted, begin, end, first, skipped, last):
    """Go on looking for the query blocks of tiles ``begin`` and ``end - 1`` in the next chunk: ``tiles`` of each of its
    query blocks.

    counted: tiles of the chunks before. first, last: query blocks that end before either. skipped: tiles of those that
    end before ``begin``.
    """
    # Tiles up to and with each query block, over all chunks so far.
    upto = gl.associative_scan(tiles, 0, _add) + counted
    before = upto <= begin
    # How many query blocks end before ``begin``: the next one is the run's first.
    first += gl.sum(before.to(gl.int32), 0)
    skipped = gl.maximum(skipped, gl.max(gl.where(before, upto, 0), 0))
    last += gl.sum((upto < end).to(gl.int32), 0)
    return first, skipped, last


@gluon.constexpr_function
def scores_layout(rows, axes=0):
    """Of a product's scores [BLOCK_KV, rows].

    axes: of 2, behind the scores: partial sums by a lane's place among the four that share rows of the accumulator. The
    first of these axes lies in registers, and for it a bit of the scores in lanes, a row's first.
    """
    bits = [[0, 1], [0, 2]][: rows.bit_length() - 1] + [[8, 0], [0, 0]]
    moved = 1 if axes == 2 else 2
    places = [[0, 0] + [int(at == axis) for at in range(axes)] for axis in range(axes)]
    registers = [bit + [0] * axes for bit in bits[moved:-1]] + places[:1]
    lanes = places[1:] + [bit + [0] * axes for bit in bits[:moved][::-1] + [[1, 0], [2, 0], [4, 0]]]
    warps = [[16, 0] + [0] * axes, [32, 0] + [0] * axes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_KV.value, rows] + [2] * axes)


@gluon.constexpr_function
def maxima_layout(rows, group):
    """What is left of scores_layout when each group of neighbouring keys is one: fp32 [BLOCK_KV / group, rows]."""
    scores = scores_layout(rows)
    registers, lanes, warps = (
        [[key // group, row] for key, row in bases]
        for bases in (scores.reg_bases, scores.lane_bases, scores.warp_bases)
    )
    return gl.DistributedLinearLayout(
        [base for base in registers if any(base)], lanes, warps, [], [BLOCK_KV.value // group, rows]
    )


@gluon.jit
def chained_sum(values):
    """Sum over the last axis, of a thread's own registers: one after the other, so that every addition but one takes a
    product along (FFMA). A compiler that adds in a tree (triton 3.8) leaves half of the products alone."""
    parts = (values,)
    for level in gl.static_range(log2(values.shape[4])):
        halves = ()
        for n in gl.static_range(1 << level):
            half = gl.reshape(parts[n], [BLOCK_KV, values.shape[1], 2, 2, 2, values.shape[4] >> (level + 1)])
            low, high = gl.split(gl.permute(half, (0, 1, 2, 3, 5, 4)))
            halves = halves + (low, high)
        parts = halves
    total = parts[0]  # pyright: ignore[reportGeneralTypeIssues]  as many as columns
    for n in gl.static_range(1, values.shape[4]):
        total += parts[n]
    return gl.reshape(total, [BLOCK_KV, values.shape[1], 2, 2])


@gluon.jit
def weighed_sums(product, half_weights, ROWS: gl.constexpr):
    """relu(product) [BLOCK_KV, ROWS * heads] times the weights, over the heads of each row: fp32 [BLOCK_KV, ROWS].

    half_weights: x + |x| is 2 * relu(x) of what fp8 codes give, finite or NaN. An addition runs at twice the rate of a
    maximum. Four lanes have partial sums of four scores and end with one score each, not all of them with all.
    """
    PAIRS: gl.constexpr = product.shape[1] // ROWS // 8
    # relu without a maximum; the weights are halved in return.
    weighed = (product + gl.abs(product)) * gl.expand_dims(half_weights, 0)
    # Add up a thread's columns; of each row four lanes then have a part.
    columns = gl.permute(gl.reshape(weighed, [BLOCK_KV, ROWS, PAIRS, 4, 2]), (0, 1, 3, 2, 4))
    partial = chained_sum(gl.reshape(columns, [BLOCK_KV, ROWS, 2, 2, PAIRS * 2]))
    # Four lanes exchange two of their four scores, then one of two: three shuffles in all.
    partial = gl.sum(gl.convert_layout(partial, scores_layout(ROWS, 2)), 2)
    if ROWS > 1:
        partial = gl.convert_layout(partial, scores_layout(ROWS, 1))
    return gl.convert_layout(gl.sum(partial, 2), scores_layout(ROWS), assert_trivial=True)
