"""What the Hopper kernels of index scores share: a program's part of the tiles, and what becomes of a product.

Both are persistent. A unit is the query rows that are multiplied together: keys stand in a product's rows, the heads of
the unit's rows in its columns, its lanes. A producer warp fills a ring of tiles by TMA, four warpgroups multiply them,
at most 128 lanes each, and sum while others multiply. Sums and products hinder each other, in whichever warps they are,
so what counts is how many instructions the sums are. Every program counts the tiles of all units, from the lengths on
the device, and takes as many as any other, next to each other.

Ring positions follow from how many tiles and units came before, nothing else is carried from unit to unit. A slot is
filled for the same consumers every time: another one could wait for it while it is being filled the time before, and
take the phase before that for its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

TILE = gl.constexpr(64)  # keys of a product
CONSUMERS = gl.constexpr(4)
QUERIES = gl.constexpr(2)  # units whose queries are in shared memory
LANES = gl.constexpr(128)  # of a product, at most


@gluon.constexpr_function
def products(lanes):
    """Of a tile and a unit of so many lanes."""
    return -(-lanes // LANES.value)


@gluon.constexpr_function
def product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def allocate_rings(TILES: gl.constexpr, PRODUCTS: gl.constexpr):
    """mbarriers of tiles, PRODUCTS of each, and of queries: (filled, freed, queries filled, queries freed)."""
    gl.static_assert(TILES % (CONSUMERS // PRODUCTS) == 0)  # then own_tile keeps a slot to its consumers
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    filled = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARS)
    freed = gl.allocate_shared_memory(gl.int64, [TILES, 1], BARS)
    query_filled = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARS)
    query_freed = gl.allocate_shared_memory(gl.int64, [QUERIES, 1], BARS)
    for i in gl.static_range(TILES):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=PRODUCTS)
        if i < QUERIES:
            mbarrier.init(query_filled.index(i), count=1)
            mbarrier.init(query_freed.index(i), count=CONSUMERS)
    return filled, freed, query_filled, query_freed


@gluon.constexpr_function
def power_of_two(slots):
    """Its exponent."""
    exponent = slots.bit_length() - 1
    assert slots == 1 << exponent, slots
    return exponent


@gluon.jit
def ring(use, SLOTS: gl.constexpr):
    """(slot, phase) of the ``use``-th use of a ring; without division, for every tile comes through here in every
    warp."""
    return use & (SLOTS - 1), (use >> power_of_two(SLOTS)) & 1


@gluon.jit
def own_tile(turn: gl.constexpr, done, TURNS: gl.constexpr):
    """The first tile behind ``done`` others that is its own, from 0 on, for a consumer that takes every TURNS-th of
    all."""
    return (turn - done % TURNS + TURNS) % TURNS


@gluon.jit
def multiply(tile, queries):
    """Start the product of a tile's keys [1, TILE, D] and some of a unit's lanes [lanes, D]."""
    COLUMNS: gl.constexpr = queries.shape[0]
    RESULT: gl.constexpr = product_layout(COLUMNS)
    keys = tile.reshape([TILE, queries.shape[1]])
    nothing = gl.zeros([TILE, COLUMNS], gl.float32, RESULT)
    return warpgroup_mma(keys, queries.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def share(total):
    """[begin, end) of ``total`` tiles: this program's."""
    program = gl.program_id(0)
    each = total // gl.num_programs(0)
    more = total - each * gl.num_programs(0)
    begin = program * each + gl.minimum(program, more)
    return begin, begin + each + (program < more).to(gl.int32)


@gluon.jit
def search(tiles, counted, begin, end, first, skipped, last):
    """Go on looking for the units of tiles ``begin`` and ``end - 1`` in the next chunk's ``tiles`` per unit.

    counted: tiles of the chunks before. first, last: units that end before either; skipped: tiles of those before
    ``begin``.
    """
    upto = gl.associative_scan(tiles, 0, _add) + counted
    before = upto <= begin
    first += gl.sum(before.to(gl.int32), 0)
    skipped = gl.maximum(skipped, gl.max(gl.where(before, upto, 0), 0))
    last += gl.sum((upto < end).to(gl.int32), 0)
    return first, skipped, last


@gluon.constexpr_function
def scores_layout(rows, axes=0):
    """Of a product's scores [TILE, rows]; with ``axes`` of 2 behind them, of shares by a lane's place among the four
    that share rows of the accumulator. The first of those axes lies in registers, and for it a bit of the scores in
    lanes, a row's first."""
    bits = [[0, 1], [0, 2]][: rows.bit_length() - 1] + [[8, 0], [0, 0]]
    moved = 1 if axes == 2 else 2
    places = [[0, 0] + [int(at == axis) for at in range(axes)] for axis in range(axes)]
    registers = [bit + [0] * axes for bit in bits[moved:-1]] + places[:1]
    lanes = places[1:] + [bit + [0] * axes for bit in bits[:moved][::-1] + [[1, 0], [2, 0], [4, 0]]]
    warps = [[16, 0] + [0] * axes, [32, 0] + [0] * axes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [TILE.value, rows] + [2] * axes)


@gluon.constexpr_function
def maxima_layout(rows, group):
    """What is left of scores_layout when each group of neighbouring keys is one: fp32 [TILE / group, rows]."""
    scores = scores_layout(rows)
    registers, lanes, warps = (
        [[key // group, row] for key, row in bases]
        for bases in (scores.reg_bases, scores.lane_bases, scores.warp_bases)
    )
    return gl.DistributedLinearLayout(
        [base for base in registers if any(base)], lanes, warps, [], [TILE.value // group, rows]
    )


@gluon.jit
def sums(product, halves, ROWS: gl.constexpr):
    """relu(product) [TILE, ROWS * heads] times the weights, over the heads of each row: fp32 [TILE, ROWS].

    halves: of the weights, for x + |x| is 2 * relu(x) of what fp8 codes give, finite or NaN, and an addition runs at
    twice the rate of a maximum. Four lanes have shares of four scores and end with one each, not all of them with all.
    """
    PAIRS: gl.constexpr = product.shape[1] // ROWS // 8
    weighed = (product + gl.abs(product)) * gl.expand_dims(halves, 0)
    columns = gl.permute(gl.reshape(weighed, [TILE, ROWS, PAIRS, 4, 2]), (0, 1, 3, 2, 4))
    shares = gl.sum(gl.reshape(columns, [TILE, ROWS, 2, 2, PAIRS * 2]), 4)
    shares = gl.sum(gl.convert_layout(shares, scores_layout(ROWS, 2)), 2)
    if ROWS > 1:
        shares = gl.convert_layout(shares, scores_layout(ROWS, 1))
    return gl.convert_layout(gl.sum(shares, 2), scores_layout(ROWS), assert_trivial=True)
