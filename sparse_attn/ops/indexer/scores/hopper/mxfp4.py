"""MXFP4 operands of the matrix unit on Hopper, decoded in registers.

A byte permutation looks four e2m1 codes up in a table of eight magnitudes. The magnitudes are e5m2 bytes, times a power
of two: a group's scale as far below the highest of its key, or of its head of a query. e5m2 holds every value of up to
WINDOW powers of two apart exactly, so operands are exact; the highest scales are applied to weights and scores.

Where some key of a tile or some head of its queries holds groups further apart, groups are multiplied one after the
other, and each product gets its scales in fp32 (``scores_of_groups``, 13 times the instructions).

Order of the product's 128 steps, for keys and queries alike: value 32 t + 8 j + 4 h + i of a record, word j of group t,
stands at 32 j + 16 h + 4 t + i. So a lane's codes of a key are one group's, 16 bytes, and every step of 32 takes a word
of each group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.device.hopper import signal
from sparse_attn.device.mxfp4_operand import decode, operand
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.indexer.scores.hopper import constants
from sparse_attn.ops.indexer.scores.hopper.common import (
    BLOCK_KV,
    CONSUMERS,
    Q_STAGES,
    Scalar,
    product_layout,
    scores_layout,
    weighed_sums,
)

WINDOW = gl.constexpr(constants.WINDOW)
TOP = gl.constexpr(constants.TOP)
RANGE = gl.constexpr(60)  # a head's highest scale is 2^-60 to 2^60, for its product with a weight to be normal
LOW_CODES = gl.constexpr(0x72706C00)  # e5m2 of 1.5, 1, 0.5 and 0 times 2^TOP
HIGH_CODES = gl.constexpr(0x7A787674)  # of 6, 4, 3 and 2
CHUNK = gl.constexpr(16)  # columns of a product whose groups get their scales one after the other


@aggregate
class Shared:
    """Rings in shared memory: tiles of packed keys, their scales, what becomes of those, where keys end; and query
    blocks.

    steps: of a key, a byte for each group: by how many powers of two its scale is below the key's highest. factors:
    the highest. apart: 1 where steps of some key that is seen are more than operands hold. queries, weights, fit: see
    prepare.
    """

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    steps: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    apart: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    fit: gl.shared_memory_descriptor


@aggregate
class Barriers:
    """mbarriers of a ring of tiles and of one of query blocks.

    full: a tile is there, one arrival and its bytes. ready: its steps and factors are, too. empty: its consumer
    has it in registers. q_ready: all consumers have written their part of a query block.
    """

    full: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    gl.static_assert(STAGES % CONSUMERS == 0)  # then own_tile keeps a stage to its consumers
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        if i < Q_STAGES:
            mbarrier.init(q_ready.index(i), count=CONSUMERS)
    return Barriers(full, ready, empty, q_ready)


@gluon.jit
def allocate(codes, scales, STAGES: gl.constexpr, MMA_COLUMNS: gl.constexpr):
    """(Shared, Barriers) of tiles that come as boxes of the descriptors ``codes`` and ``scales``, and of query blocks
    of ``MMA_COLUMNS`` columns."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    # Four fields by tile, three by query block; ends and apart are one number of a tile each.
    shared = Shared(
        codes=gl.allocate_shared_memory(codes.dtype, [STAGES] + codes.block_shape, codes.layout),
        scales=gl.allocate_shared_memory(scales.dtype, [STAGES] + scales.block_shape, scales.layout),
        steps=gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_KV], WORDS),
        factors=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_KV], WORDS),
        ends=gl.allocate_shared_memory(gl.int32, [STAGES, 1], WORDS),
        apart=gl.allocate_shared_memory(gl.int32, [STAGES, 1], WORDS),
        queries=gl.allocate_shared_memory(gl.float8e5, [Q_STAGES, MMA_COLUMNS, 128], QUERIES),
        weights=gl.allocate_shared_memory(gl.float32, [Q_STAGES, MMA_COLUMNS], WORDS),
        fit=gl.allocate_shared_memory(gl.int32, [Q_STAGES, CONSUMERS], WORDS),
    )
    return shared, _barriers(STAGES)


@aggregate
class QueryBlock:
    """Where a query block's codes and weights are. codes: int32 words of its first row, a row's codes of all heads,
    then their scales. present: rows of it."""

    codes: gl.tensor
    weights: gl.tensor
    present: gl.tensor
    stride_row: Scalar
    stride_weights_row: Scalar
    stride_weights_head: Scalar
    HEADS: gl.constexpr


@gluon.jit
def within_loop(block, i):
    """``block`` as the compiler cannot take it out of the loop over i, at most 2^30 times. A rare branch computes its
    addresses itself then, and no registers hold them elsewhere."""
    zero = i >> 30
    return QueryBlock(
        block.codes + zero, block.weights + zero, block.present, block.stride_row, block.stride_weights_row,
        block.stride_weights_head, block.HEADS,
    )  # fmt: skip


@gluon.constexpr_function
def words_layout(rows, replicated=False, two_warps=False):
    """Of packed records [rows, 4 groups, 4 words]: a lane has a group of a row, four lanes a row; the rows of a thread
    are those that it has of an operand in registers."""
    high = [[8, 0, 0], [16, 0, 0], [32, 0, 0], [64, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    more = [base for base in high if base[0] < rows]
    if replicated:  # warps take rows, further ones go to registers; of fewer rows warps have the same
        bits = 1 if two_warps else 2
        warps, registers = (more + [[0, 0, 0]] * bits)[:bits], more[bits:]
    else:
        warps, registers = [[16, 0, 0], [32, 0, 0]], [[8, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]] + registers, lanes, warps, [], [rows, 4, 4])


KEYS_OF_A_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
KEY_WORDS = gl.constexpr(words_layout(BLOCK_KV.value))


@gluon.jit
def words_of(tile):
    """Packed records of a tile in shared memory: int32 [BLOCK_KV, 4 groups, 4 words]."""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return reinterpret(tile, gl.int32, [BLOCK_KV, 4, 4], LINEAR).load(KEY_WORDS)


@gluon.jit
def exponents(scales):
    """(highest, lowest) of the four ue8m0 bytes of words."""
    a, b, c, d = scales & 255, (scales >> 8) & 255, (scales >> 16) & 255, (scales >> 24) & 255
    return gl.maximum(gl.maximum(a, b), gl.maximum(c, d)), gl.minimum(gl.minimum(a, b), gl.minimum(c, d))


@gluon.jit
def power(exponent):
    """fp32 of a ue8m0 byte: 2^(exponent - 127), NaN of 255."""
    # 0 is 2^-127, which is subnormal; 255 is NaN. Both set the mantissa's highest bit.
    odd = (exponent == 0) | (exponent == 255)
    return ((exponent << 23) | gl.where(odd, 0x400000, 0)).to(gl.float32, bitcast=True)


@gluon.jit
def fits(highest, lowest):
    """Whether a head's groups are near enough to each other and its scale to 1; of a NaN it does not matter."""
    near = (highest - lowest <= WINDOW) & (highest >= 127 - RANGE) & (highest <= 127 + RANGE)
    return near | (highest == 255)


@gluon.jit
def turn_scales(shared, bars, stage, seen):
    """Turn a tile's scales into steps and factors, in one warp. seen: [BLOCK_KV], which keys are."""
    # One warp, two keys a lane, while other warps load and multiply.
    scale = shared.scales.index(stage).reshape([BLOCK_KV]).load(KEYS_OF_A_WARP)
    highest, lowest = exponents(scale)
    # Keys that no row sees do not send a tile the long way, nor do keys that are NaN.
    apart = seen & (highest - lowest > WINDOW) & (highest < 255)
    any_apart = gl.max(apart.to(gl.int32), 0)
    # No byte borrows: the highest is at least each of them. A NaN lies in the factor.
    shared.steps.index(stage).store(highest * 0x01010101 - scale)
    shared.factors.index(stage).store(power(highest))
    shared.apart.index(stage).store(gl.full([1], any_apart, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    # Consumers wait for ready behind full.
    signal(bars.ready.index(stage))


@gluon.jit
def _byte(words, place):
    return (words >> (place * 8)) & 255


@gluon.jit
def _tables(steps):
    """Bytes for codes 0 to 3 and 4 to 7, ``steps`` powers of two below 2^TOP."""
    return LOW_CODES - steps * 0x04040400, HIGH_CODES - steps * 0x04040404


@gluon.jit
def _multiply(words, low, high, q):
    """Start the product [BLOCK_KV, columns] of packed keys and an operand of queries [columns, 128]."""
    N: gl.constexpr = q.shape[0]
    RESULT: gl.constexpr = product_layout(N)
    # Operand A out of registers: keys are decoded there and never stored.
    keys = operand(decode(words, low, high), RESULT)
    keys = keys.to(gl.float8e5, bitcast=True)
    return warpgroup_mma(
        keys, q.permute((1, 0)), gl.zeros([BLOCK_KV, N], gl.float32, RESULT), use_acc=False, is_async=True
    )


@gluon.jit
def multiply_codes(words, steps, q):
    """Start the product of packed keys whose groups' scales are ``steps`` below their highest, a byte each."""
    # Each group's table is lowered by its own step; a lane has one group of a key.
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, KEY_WORDS)))
    low, high = _tables(_byte(gl.expand_dims(steps, 1), gl.expand_dims(group, 0)))
    return _multiply(words, low, high, q)


@gluon.jit
def _columns(block, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """(row, head, whether the row exists) of the ``COUNT`` columns of a query block from ``first`` on."""
    column = first + gl.arange(0, COUNT, layout=LAYOUT)
    row = column // block.HEADS
    return row, column % block.HEADS, row < block.present


@gluon.jit
def column_scales(block, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of four scales of columns; 1 where there is no such row."""
    row, head, there = _columns(block, first, COUNT, LAYOUT)
    at = block.codes + row * block.stride_row + (block.HEADS * 16 + head)
    return gl.load(at, mask=there, other=0x7F7F7F7F)


@gluon.jit
def half_weights_of(block, first, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Half the weights of columns."""
    row, head, there = _columns(block, first, COUNT, LAYOUT)
    at = block.weights + row * block.stride_weights_row + head * block.stride_weights_head
    return 0.5 * gl.load(at, mask=there, other=0.0)


@gluon.constexpr_function
def _weights_layout(columns):
    """Of weights in the order of ``_for_lanes``: four together that one thread needs."""
    # Threads hold weights in groups of four, for loads of 16 bytes.
    registers = [[1], [2]] + [[1 << bit] for bit in range(4, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[4], [8], [0], [0], [0]], [[0], [0]], [], [columns])


@gluon.jit
def _for_lanes(weights):
    """Of 16 columns, those that a lane has of a product, together: columns 8 j + 2 lane + i at 4 lane + 2 j + i.
    Applied twice it gives the order of columns."""
    PAIRS: gl.constexpr = weights.shape[0] // 16
    return gl.reshape(gl.permute(gl.reshape(weights, [PAIRS, 2, 4, 2]), (0, 2, 1, 3)), [weights.shape[0]])


@gluon.jit
def weights_of(memory, IN_ORDER: gl.constexpr):
    """Half weights of a product's columns, as ``prepare`` writes them."""
    COLUMNS: gl.constexpr = memory.shape[0]
    COLUMN: gl.constexpr = gl.SliceLayout(0, product_layout(COLUMNS))
    if IN_ORDER:
        return memory.load(COLUMN)
    else:
        of_lanes = gl.reshape(memory.load(_weights_layout(COLUMNS)), [COLUMNS // 16, 4, 2, 2])
        in_order = gl.reshape(gl.permute(of_lanes, (0, 2, 1, 3)), [COLUMNS])
        return gl.convert_layout(in_order, COLUMN, assert_trivial=True)


@gluon.jit
def query_tables(scales, group):
    """Of columns' scales: (low, high) for ``decode``, the highest for ``weight_factor``, whether they fit."""
    # Where a head's groups are too far apart, or its scale too near the ends of fp32, steps stay 0.
    highest, lowest = exponents(scales)
    folded = fits(highest, lowest)
    steps = gl.where(folded, highest * 0x01010101 - scales, 0)
    low, high = _tables(_byte(gl.expand_dims(steps, 1), gl.expand_dims(group, 0)))
    return low, high, highest, folded


@gluon.jit
def weight_factor(highest):
    """What columns' weights are multiplied by: their highest scale, without the 2^TOP of both operands."""
    return power(highest) * 2.0 ** (-2 * TOP)


@gluon.jit
def prepare(block, queries, weights, fit, PART: gl.constexpr, which: gl.constexpr, IN_ORDER: gl.constexpr):
    """Write a consumer's part of a query block to shared memory: the operand of ``PART`` columns, with steps where they
    fit and without where they do not, half their weights times their highest scale, and whether all fit. IN_ORDER:
    weights stand as columns do; otherwise for loads of 16 bytes, by ``weights_of``.

    queries: e5m2 [columns, 128]. weights: fp32 [columns]. fit: int32 [CONSUMERS]."""
    LAYOUT: gl.constexpr = words_layout(PART, True)
    GROUPS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(1, GROUPS)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FIRST: gl.constexpr = which * PART
    # Codes of this consumer's columns. Rows that do not exist have codes 0 and scale 1.
    row, head, there = _columns(block, FIRST, PART, COLUMN)
    at = block.codes + row * block.stride_row + head * 16
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    at = gl.expand_dims(gl.expand_dims(at, 1) + gl.expand_dims(group * 4, 0), 2)
    at = at + gl.expand_dims(gl.expand_dims(word, 0), 0)
    words = gl.load(at, mask=gl.expand_dims(gl.expand_dims(there, 1), 2), other=0)
    scales = column_scales(block, FIRST, PART, COLUMN)
    half_weights = half_weights_of(block, FIRST, PART, COLUMN)
    low, high, highest, folded = query_tables(scales, group)
    # The operand of the matrix unit: four e5m2 values a word.
    COLUMNS: gl.constexpr = queries.shape[0]
    operand = reinterpret(queries, gl.int32, [COLUMNS, 32], WORDS)
    operand.slice(FIRST, PART, dim=0).store(decode(words, low, high))
    # The highest scale of a head goes to its weight, since it is common to all products.
    half_weights = half_weights * weight_factor(highest)
    if not IN_ORDER:
        half_weights = _for_lanes(half_weights)
    weights.slice(FIRST, PART, dim=0).store(half_weights)
    # Consumers look at all parts before they choose how to score.
    all_fit = gl.min(folded.to(gl.int32), 0)
    fit.slice(which, 1, dim=0).store(gl.full([1], all_fit, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def _times_power(x, exponent):
    """x * 2^exponent, in two steps for exponents that no fp32 has."""
    # Each half of the exponent is a power that fp32 has.
    half = exponent >> 1
    once = (gl.maximum(half + 127, 0) << 23).to(gl.float32, bitcast=True)
    again = (gl.maximum(exponent - half + 127, 0) << 23).to(gl.float32, bitcast=True)
    return x * once * again


@gluon.jit
def _scores_of_columns(words, key_scales, q, block, first, COUNT: gl.constexpr):
    """fp32 [BLOCK_KV, 1]: of the columns from ``first`` on, whose operand is q."""
    RESULT: gl.constexpr = product_layout(COUNT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, RESULT)
    # Scales of the keys, and of the columns' heads. Folded heads have their steps in the operand already.
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, KEY_WORDS))), 0)
    key_scale = key_scales.load(gl.SliceLayout(1, RESULT))
    scale = column_scales(block, first, COUNT, COLUMN)
    highest, lowest = exponents(scale)
    folded = fits(highest, lowest)
    half_weights = gl.where(highest == 255, float("nan"), half_weights_of(block, first, COUNT, COLUMN))
    total = gl.zeros([BLOCK_KV, COUNT], gl.float32, RESULT)
    none = gl.zeros([BLOCK_KV, 4], gl.int32, gl.SliceLayout(2, KEY_WORDS))
    # One group at a time: tables of zeros take the others out of the product.
    for g in range(4):
        low, high = gl.where(group == g, LOW_CODES, none), gl.where(group == g, HIGH_CODES, none)
        product = warpgroup_mma_wait(0, deps=(_multiply(words, low, high, q),))
        # 2^TOP of either operand is taken out with the scales.
        of_key = gl.expand_dims(_byte(key_scale, g) - (127 + TOP), 1)
        of_query = gl.expand_dims(gl.where(folded, highest, _byte(scale, g)) - (127 + TOP), 0)
        total += _times_power(product, of_key + of_query)
    return weighed_sums(total, half_weights, 1)


@gluon.jit
def _scores_of_row(words, key_scales, operands, block, first_column):
    """fp32 [BLOCK_KV]: of the row whose columns begin at ``first_column``. operands: [chunks, CHUNK, 128]."""
    scores = gl.zeros([BLOCK_KV, 1], gl.float32, scores_layout(1))
    for first in range(first_column, first_column + block.HEADS, CHUNK):
        scores += _scores_of_columns(words, key_scales, operands.index(first // CHUNK), block, first, CHUNK)
    return gl.reshape(scores, [BLOCK_KV])


@gluon.jit
def scores_of_groups(words, key_scales, queries, block, first_column, ROWS: gl.constexpr):
    """fp32 [BLOCK_KV, ROWS] of groups of any scales: of rows whose columns of a query block begin at
    ``first_column``. key_scales: words of four scales, in shared memory. queries: operands [columns, 128]."""
    # Queries are seen in chunks, so that the number of a chunk may be known at run time only.
    CHUNKS: gl.constexpr = queries.shape[0] // CHUNK
    HEADS: gl.constexpr = block.HEADS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    operands = reinterpret(queries, gl.float8e5, [CHUNKS, CHUNK, 128], LAYOUT)
    first = _scores_of_row(words, key_scales, operands, block, first_column)
    if ROWS == 1:
        scores = gl.reshape(first, [BLOCK_KV, 1])
    else:
        second = _scores_of_row(words, key_scales, operands, block, first_column + HEADS)
        if ROWS == 2:
            scores = gl.join(first, second)
        else:
            gl.static_assert(ROWS == 4)
            third = _scores_of_row(words, key_scales, operands, block, first_column + 2 * HEADS)
            fourth = _scores_of_row(words, key_scales, operands, block, first_column + 3 * HEADS)
            scores = gl.reshape(gl.join(gl.join(first, third), gl.join(second, fourth)), [BLOCK_KV, 4])
    return gl.convert_layout(scores, scores_layout(ROWS))
