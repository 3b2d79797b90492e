"""Weights of the experts' product on Hopper: codes from shared memory, their scales, and the operands they become."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device.fp8 import decode_exponent
from sparse_attn.device.mxfp4_operand import begin_exact, decode, exact_operand, operand
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.layers.products.hopper import constants

BOX = gl.constexpr(constants.BOX)
CONSUMERS = gl.constexpr(constants.CONSUMERS)
WORDS = gl.constexpr(constants.STEP // 8)
UP, DOWN = gl.constexpr(6), gl.constexpr(-5)  # exponents that codes of e2m1 take and stay exact as e4m3
LOW_CODES = gl.constexpr(0x3C383000)  # e4m3 of 1.5, 1, 0.5 and 0
HIGH_CODES = gl.constexpr(0x4C484440)  # of 6, 4, 3 and 2
# Words of a consumer's part of a box [BOX, WORDS]: a lane has a group of an output, 16 bytes, and the group 128 columns
# on. Eight lanes read outputs four apart, which lie in different banks: a product's rows are outputs 0, 4, 1, 5, 2, 6,
# 3 and 7 of eight.
OF_BOX = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16]], [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [32, 32]
    )
)
# Words of 128 columns of both parts [64, 4 groups, 4], in the order of a product's rows: of 16 eight of the first, then
# eight of the second.
OF_PRODUCT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
    )
)  # fmt: skip
GROUPS = gl.constexpr(gl.SliceLayout(2, OF_PRODUCT.value))
COPIED = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the producer's warp


@aggregate
class Scales:
    """words: int64 [experts, rows of the weight, groups / 8], eight scales each, contiguous in a row."""

    words: gl.tensor
    stride_expert: gl.tensor
    stride_row: gl.tensor


@gluon.jit
def scale_pointers(scales, tiles, expert, first):
    """Pointers [64 * CONSUMERS] to the first eight scales of all outputs of a tile, in the order of products' rows."""
    # Of 16 rows of a product eight are of the first box, eight of the second.
    m = gl.arange(0, 2 * BOX * CONSUMERS, COPIED)
    own = m // (2 * BOX) * BOX + m // 8 % 2 * tiles.second  # a consumer's, a box's
    own += m % (2 * BOX) // 16 * 8 + m % 2 * 4 + m % 8 // 2
    row = (first + own).to(gl.int64)
    return scales.words + (expert.to(gl.int64) * scales.stride_expert + row * scales.stride_row)


@gluon.jit
def read_scales(words):
    """int64 [64] in shared memory -> a lane's own, uint8 [64, 4] of either half of the groups."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    eight = reinterpret(words, gl.uint8, [2 * BOX, 8], FLAT)
    return eight.slice(0, 4, dim=1).load(GROUPS), eight.slice(4, 4, dim=1).load(GROUPS)


@gluon.jit
def _part(shared, box, which: gl.constexpr):
    """Words of a consumer's part of a box, [4, 8, 2, 16]: eight outputs in a product's order, halves of the columns."""
    words = shared.codes.index(box).reshape([CONSUMERS * BOX, WORDS]).slice(which * BOX, BOX).load(OF_BOX)
    words = gl.permute(gl.reshape(words, [BOX // 8, 2, 2, 2, WORDS]), (0, 2, 3, 1, 4))
    return gl.reshape(words, [BOX // 8, 8, 2, WORDS // 2])


@gluon.jit
def read_words(shared, stage, which: gl.constexpr):
    """Words of both halves of a stage's columns of a consumer's outputs, [64, 4, 4] each, in the order of a product's
    rows."""
    # Boxes take turns by eight outputs; then the halves of the columns come apart.
    both = gl.join(_part(shared, 2 * stage, which), _part(shared, 2 * stage + 1, which))
    first, second = gl.split(gl.permute(both, (0, 4, 1, 3, 2)))
    first, second = gl.reshape(first, [2 * BOX, 4, 4]), gl.reshape(second, [2 * BOX, 4, 4])
    first = gl.convert_layout(first, OF_PRODUCT, assert_trivial=True)
    return first, gl.convert_layout(second, OF_PRODUCT, assert_trivial=True)


@gluon.jit
def tables_of(scales, EXACT: gl.constexpr, RESULT: gl.constexpr):
    """Of scales, uint8 [64, 4] of either half of a step: what decodes the first half's words and what the second's, a
    pair of int32 [64, 4] each, and what is left of the scale of all eight groups [64]. A pair is magnitudes of low and
    of high codes; of EXACT codes the scales, and nothing is left."""
    first, second = scales[0].to(gl.int32), scales[1].to(gl.int32)
    if EXACT:
        tables, more_tables = (first, first), (second, second)
        left = gl.zeros([2 * BOX], gl.float32, gl.SliceLayout(1, GROUPS))
    else:
        # e4m3 holds a group's scale relative to the highest of eight.
        top = gl.max(gl.maximum(first, second), 1)
        tables, more_tables = _magnitudes(first, top), _magnitudes(second, top)
        power = decode_exponent(top)
        left = power * 2.0**-6 + (power - power)  # 255 is NaN, and its power inf
    return tables, more_tables, gl.convert_layout(left, gl.SliceLayout(1, RESULT), assert_trivial=True)


@gluon.jit
def _magnitudes(scale, top):
    """(those of low codes, of high ones) as e4m3, of groups with ``scale`` beside the highest."""
    up = scale - gl.expand_dims(top, 1) + UP
    there = up >= DOWN
    return gl.where(there, LOW_CODES + up * 0x08080800, 0), gl.where(there, HIGH_CODES + up * 0x08080808, 0)


@gluon.jit
def decode_operand(words, tables, zero, EXACT: gl.constexpr, RESULT: gl.constexpr):
    """[64, BLOCK_K]. zero: as decode's."""
    low, high = tables
    if EXACT:
        weight = exact_operand(begin_exact(words, zero), low, RESULT)
    else:
        weight = operand(decode(words, low, high, zero), RESULT).to(gl.float8e4nv, bitcast=True)
    return weight
