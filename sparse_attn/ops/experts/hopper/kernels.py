"""One of the experts' two products, of rows in fp8 or bf16 and MXFP4 codes. README.md has the schedule, barriers,
shared memory and registers.

The weight takes the matrix unit's M dimension, the rows its N (swap-AB). A tile is some sorted rows of one expert times
two boxes of outputs: gates and the ups that belong to them, or two neighbouring boxes of down. Warpgroups have half of
either box, so that a thread has a gate and its up. Beside fp8 rows, codes of e2m1 become e4m3 in registers
(device/mxfp4_operand.py), with a group's scale relative to the highest of eight: what is below 2^-11 of it counts as 0.
A product of 256 columns is then multiplied by that highest scale and added in fp32; the row's scale comes at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparse_attn.device import cast
from sparse_attn.device.fp8 import decode_exponent
from sparse_attn.device.hopper import barrier, keep_order, launch_dependents, next_stage, signal, tma_load, wait
from sparse_attn.device.mxfp4_operand import begin_decode, begin_exact, end_decode, exact_operand, operand
from sparse_attn.device.packed_dot import E8M0_NAN
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.experts.grouped.kernels import gated
from sparse_attn.ops.experts.hopper import constants

BLOCK_K = gl.constexpr(constants.BLOCK_K)
STEP = gl.constexpr(constants.STEP)
BOX = gl.constexpr(constants.BOX)
ROWS = gl.constexpr(constants.ROWS)
CONSUMERS = gl.constexpr(constants.CONSUMERS)
OWN = gl.constexpr(constants.BOX // constants.CONSUMERS)  # outputs of a box that a consumer has
WORDS = gl.constexpr(constants.STEP // 8)
UP, DOWN = gl.constexpr(6), gl.constexpr(-5)  # exponents that codes of e2m1 take and stay exact as e4m3
LOW_CODES = gl.constexpr(0x3C383000)  # e4m3 of 1.5, 1, 0.5 and 0
HIGH_CODES = gl.constexpr(0x4C484440)  # of 6, 4, 3 and 2
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# Words of a consumer's part of a box [OWN, WORDS]: a lane has a group of an output, 16 bytes, and the group 128 columns
# on. Eight lanes read outputs four apart, which lie in different banks: a product's rows are outputs 0, 4, 1, 5, 2, 6,
# 3 and 7 of eight.
PART = gl.constexpr(
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


@aggregate
class Shared:
    """Rings. codes: int32 [2 * STAGES, 1, BOX, WORDS], two boxes a stage. x: e4m3 or bf16 [2 * STAGES, BLOCK_M,
    BLOCK_K], both halves of a stage's columns. full: all of a stage are there, an arrival and their bytes. empty:
    consumers have read them, an arrival of each."""

    codes: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Tiles:
    """spans: int32 [spans, 3], as order_rows deals them, of which those with rows come first. count: int32 [1], how
    many that are. Unit u is tile u % outputs of span u / outputs. second: rows of the weight from the first box to the
    second. groups: of a row of the weight, a multiple of 4. last: row of the weight. EACH: outputs from a tile to the
    next."""

    spans: gl.tensor
    count: gl.tensor
    outputs: gl.tensor
    second: gl.tensor
    groups: gl.tensor
    last: gl.tensor
    EACH: gl.constexpr


@aggregate
class Scales:
    """values: uint8 [experts, rows of the weight, groups], groups contiguous."""

    values: gl.tensor
    stride_expert: gl.tensor
    stride_row: gl.tensor


@aggregate
class Output:
    """out: [rows, columns], contiguous: GATED rows as they are sorted, others where ``order`` says, times their
    weights. row_scales: fp32 [rows as they are sorted], what products of fp8 rows are multiplied by. clamp: of gates
    and ups. SCALED: whether there are row_scales. PLACED: in the order of an operand of bf16."""

    out: gl.tensor
    order: gl.tensor
    row_scales: gl.tensor
    weights: gl.tensor
    columns: gl.tensor
    clamp: gl.tensor
    GATED: gl.constexpr
    CLAMPED: gl.constexpr
    SCALED: gl.constexpr
    PLACED: gl.constexpr


@gluon.constexpr_function
def result_layout(rows, exact):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16 if exact else 32])


@gluon.jit
def _span(tiles, unit, units):
    """(expert, first sorted row of the tile's, end of the expert's) of a unit, of the last one behind it. There must
    be one."""
    at = tiles.spans + gl.minimum(unit, units - 1) // tiles.outputs * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _ask_for_scales(scales, tiles, expert, first):
    """Have a tile's scales brought to the L2, 128 bytes at a time: consumers read them a step before they need them,
    which is time enough for the L2 alone."""
    n = gl.arange(0, 2 * BOX, gl.BlockedLayout([1], [32], [1], [0]))
    row = gl.minimum(first + n % BOX + n // BOX * tiles.second, tiles.last)
    rows = scales.values + (expert.to(gl.int64) * scales.stride_expert + row.to(gl.int64) * scales.stride_row)
    for at in range(0, tiles.groups, 128):
        gl.inline_asm_elementwise(PREFETCH, "=r,l", [rows + at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _producer(shared, codes, x, scales, tiles):
    STAGES: gl.constexpr = shared.full.shape[0]
    BOXES: gl.constexpr = shared.x.shape[1] // ROWS  # of either half of a stage's columns
    OF_CODES: gl.constexpr = BOX * STEP  # bytes, two boxes of half a byte a code
    OF_ROWS: gl.constexpr = ROWS * STEP * x.dtype.primitive_bitwidth // 8
    wait()
    stage, phase = 0, 0
    units = gl.load(tiles.count) * tiles.outputs
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        expert, row, end = _span(tiles, unit, units)
        boxes = gl.minimum((end - row + ROWS - 1) // ROWS, BOXES)  # those behind have no rows of the expert's
        first = unit % tiles.outputs * tiles.EACH
        _ask_for_scales(scales, tiles, expert, first)
        for column in range(0, tiles.groups * 32, STEP):  # what is behind the last one is 0
            mbarrier.wait(shared.empty.index(stage), phase ^ 1)
            full = shared.full.index(stage)
            for n in gl.static_range(1, BOXES + 1):
                mbarrier.expect(full, OF_CODES + n * OF_ROWS, pred=boxes == n)
            word = column // 8
            tma_load(codes, [expert, first, word], full, shared.codes.index(2 * stage))
            tma_load(codes, [expert, first + tiles.second, word], full, shared.codes.index(2 * stage + 1))
            for n in gl.static_range(BOXES):
                here, more = shared.x.index(2 * stage), shared.x.index(2 * stage + 1)
                tma_load(x, [row + n * ROWS, column], full, here.slice(n * ROWS, ROWS), pred=n < boxes)
                tma_load(x, [row + n * ROWS, column + BLOCK_K], full, more.slice(n * ROWS, ROWS), pred=n < boxes)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _part(shared, box, which: gl.constexpr):
    """A consumer's words of a box, [4, 8, 2, 16]: eight outputs in a product's order, halves of the columns."""
    words = shared.codes.index(box).reshape([BOX, WORDS]).slice(which * OWN, OWN, dim=0).load(PART)
    words = gl.permute(gl.reshape(words, [OWN // 8, 2, 2, 2, WORDS]), (0, 2, 3, 1, 4))
    return gl.reshape(words, [OWN // 8, 8, 2, WORDS // 2])


@gluon.jit
def _words(shared, stage, which: gl.constexpr):
    """A consumer's words of both halves of a stage's columns, [64, 4, 4] each, in the order of a product's rows."""
    both = gl.join(_part(shared, 2 * stage, which), _part(shared, 2 * stage + 1, which))
    first, second = gl.split(gl.permute(both, (0, 4, 1, 3, 2)))
    first, second = gl.reshape(first, [2 * OWN, 4, 4]), gl.reshape(second, [2 * OWN, 4, 4])
    first = gl.convert_layout(first, OF_PRODUCT, assert_trivial=True)
    return first, gl.convert_layout(second, OF_PRODUCT, assert_trivial=True)


@gluon.jit
def _parts(sums):
    """(first, second) [OWN, BLOCK_M] of a product's sums, outputs in their order."""
    sums = gl.permute(gl.reshape(sums, [OWN // 8, 2, 2, 2, 2, sums.shape[1]]), (0, 4, 2, 3, 5, 1))
    first, second = gl.split(sums)
    return gl.reshape(first, [OWN, sums.shape[4]]), gl.reshape(second, [OWN, sums.shape[4]])


@gluon.constexpr_function
def rows_layout(placed):
    """Of a tile's values as they are stored [BLOCK_M, OWN]: a thread has neighbours of a row."""
    each = 2 if placed else 8
    return gl.BlockedLayout([1, each], [each, 32 // each], [4, 1], [1, 0])


@gluon.jit
def _rows(row, end, output, BLOCK_M: gl.constexpr):
    """(rows of ``out``, what their values are multiplied by, whether they are the expert's) of sorted rows from ``row``
    on, of which those before ``end`` are the expert's."""
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_layout(output.PLACED))
    at = row + gl.arange(0, BLOCK_M, ROWS)
    inside = at < end
    if output.GATED:
        to, factor = at, gl.zeros([BLOCK_M], gl.float32, ROWS)
    else:
        to = gl.load(output.order + at, mask=inside, other=0)
        factor = gl.load(output.weights + to, mask=inside, other=0.0)
        if output.SCALED:
            factor *= gl.load(output.row_scales + at, mask=inside, other=0.0)
    return to, factor, inside


@gluon.jit
def _store(values, rows, output, column):
    """values: [OWN, BLOCK_M] of outputs from ``column`` on. rows: what _rows returns."""
    TO: gl.constexpr = rows_layout(output.PLACED)
    to, factor, inside = rows
    values = gl.convert_layout(gl.permute(values, (1, 0)), TO)
    if not output.GATED:
        values *= gl.expand_dims(factor, 1)
    column = column + gl.arange(0, OWN, gl.SliceLayout(0, TO))
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(column < output.columns, 0)
    if output.PLACED:  # as device/mxfp4_operand has bf16
        column = column // 128 * 128 + column % 32 // 4 * 16 + column // 2 % 2 * 8 + column // 32 % 4 * 2 + column % 2
    place = gl.expand_dims(to.to(gl.int64) * output.columns, 1) + gl.expand_dims(column, 0)
    gl.store(output.out + place, cast.cast(values, output.out.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(sums, row, end, output, column):
    BLOCK_M: gl.constexpr = sums.shape[1]
    rows = _rows(row, end, output, BLOCK_M)
    if output.GATED:
        if output.SCALED:
            at = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, sums.type.layout))
            sums *= gl.expand_dims(gl.load(output.row_scales + at, mask=at < end, other=0.0), 0)
        first, second = _parts(sums)
        _store(gated(first, second, output.clamp, output.CLAMPED), rows, output, column)
    else:
        first, second = _parts(sums)
        _store(first, rows, output, column)
        _store(second, rows, output, column + BOX)


@gluon.jit
def _scales_at(scales, tiles, expert, first, own):
    """Where those of a tile's outputs begin [64, 4]."""
    row = gl.minimum(first + own, tiles.last)
    at = scales.values + (expert.to(gl.int64) * scales.stride_expert + row.to(gl.int64) * scales.stride_row)
    return gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUPS)), 0)


@gluon.jit
def _scales(at, group, tiles):
    """Those of eight groups from ``group`` on, as two of four; of the last groups where there are fewer."""
    last = tiles.groups - 4
    return gl.load(at + gl.minimum(group, last)), gl.load(at + gl.minimum(group + 4, last))


@gluon.jit
def _tables(scales, EXACT: gl.constexpr, RESULT: gl.constexpr):
    """Of scales, uint8 [64, 4] of either half of a step: what decodes each half's words, twice int32 [64, 4], and what
    is left of the scale of all eight groups [64]. That is magnitudes of low and of high codes; of EXACT codes the
    scales, and nothing is left."""
    first, second = scales[0].to(gl.int32), scales[1].to(gl.int32)
    if EXACT:
        halves = (first, first), (second, second)
        left = gl.zeros([2 * OWN], gl.float32, gl.SliceLayout(1, GROUPS))
    else:
        top = gl.max(gl.maximum(first, second), 1)
        halves = _magnitudes(first, top), _magnitudes(second, top)
        left = gl.where(top == E8M0_NAN, float("nan"), decode_exponent(top) * 2.0**-6)
    return halves, gl.convert_layout(left, gl.SliceLayout(1, RESULT), assert_trivial=True)


@gluon.jit
def _magnitudes(scale, top):
    """(those of low codes, of high ones) as e4m3, of groups with ``scale`` beside the highest."""
    up = scale - gl.expand_dims(top, 1) + UP
    there = up >= DOWN
    return gl.where(there, LOW_CODES + up * 0x08080800, 0), gl.where(there, HIGH_CODES + up * 0x08080808, 0)


@gluon.jit
def _begin(words, tables, EXACT: gl.constexpr):
    """Most of the decoding of half a step's words, and what _end needs beside it."""
    low, high = tables
    if EXACT:
        begun = begin_exact(words), low
    else:
        begun = begin_decode(words, low, high)
    return begun


@gluon.jit
def _end(begun, EXACT: gl.constexpr, RESULT: gl.constexpr):
    """An operand, [64, BLOCK_K]."""
    first, second = begun
    if EXACT:
        weight = exact_operand(first, second, RESULT)
    else:
        weight = operand(end_decode(first, second), RESULT).to(gl.float8e4nv, bitcast=True)
    return weight


@gluon.jit
def _work(shared, scales, tiles, output, units, which: gl.constexpr):
    """A CTA's units, of which there is one."""
    STAGES: gl.constexpr = shared.full.shape[0]
    BLOCK_M: gl.constexpr = shared.x.shape[1]
    EXACT: gl.constexpr = shared.x.dtype == gl.bfloat16
    RESULT: gl.constexpr = result_layout(BLOCK_M, EXACT)
    m = gl.arange(0, 2 * OWN, gl.SliceLayout(1, GROUPS))
    own = which * OWN + m // 16 * 8 + m % 2 * 4 + m % 8 // 2 + m // 8 % 2 * tiles.second  # row of the weight
    stage, phase = 0, 0
    next_span = _span(tiles, gl.program_id(0), units)
    at_next = _scales_at(scales, tiles, next_span[0], gl.program_id(0) % tiles.outputs * tiles.EACH, own)
    tables, left = _tables(_scales(at_next, 0, tiles), EXACT, RESULT)
    mbarrier.wait(shared.full.index(stage), phase)
    words, more_words = _words(shared, stage, which)
    begun, more_tables = _begin(words, tables[0], EXACT), tables[1]
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _, row, end = next_span
        at = at_next
        next_unit = unit + gl.num_programs(0)
        next_span = _span(tiles, next_unit, units)
        at_next = _scales_at(scales, tiles, next_span[0], next_unit % tiles.outputs * tiles.EACH, own)
        sums = gl.zeros([2 * OWN, BLOCK_M], gl.float32, RESULT)
        for group in range(0, tiles.groups, 8):
            last = group + 8 >= tiles.groups
            ahead = _scales(gl.where(last, at_next, at), gl.where(last, 0, group + 8), tiles)
            x, more_x = shared.x.index(2 * stage).permute((1, 0)), shared.x.index(2 * stage + 1).permute((1, 0))
            empty = shared.empty.index(stage)
            product = warpgroup_mma(_end(begun, EXACT, RESULT), x, sums, use_acc=EXACT, is_async=True)
            more_words ^= keep_order(end)  # or both halves are decoded before the first is multiplied
            weight = _end(_begin(more_words, more_tables, EXACT), EXACT, RESULT)
            product = warpgroup_mma(weight, more_x, product, is_async=True)
            keep_order(end)
            tables, left_ahead = _tables(ahead, EXACT, RESULT)
            more_tables = tables[1]
            next_one, next_phase = next_stage(stage, phase, STAGES)
            there = (group + 8 < tiles.groups) | (next_unit < units)  # else nothing comes: this one is read again
            stage, phase = gl.where(there, next_one, stage), gl.where(there, next_phase, phase)
            mbarrier.wait(shared.full.index(stage), phase)
            words, more_words = _words(shared, stage, which)
            begun = _begin(words, tables[0], EXACT)
            keep_order(end)
            product = warpgroup_mma_wait(0, deps=(product,))
            signal(empty)
            if EXACT:
                sums = product
            else:
                sums += product * gl.expand_dims(left, 1)
            left = left_ahead
        _finish(sums, row, end, output, unit % tiles.outputs * tiles.EACH + which * OWN)


@gluon.jit
def _consumer(shared, scales, tiles, output, which: gl.constexpr):
    wait()
    launch_dependents()
    units = gl.load(tiles.count) * tiles.outputs
    if gl.program_id(0) < units:
        _work(shared, scales, tiles, output, units, which)


@gluon.jit(do_not_specialize=["outputs", "second", "groups", "last", "columns", "clamp"])
def multiply(
    x,  # e4m3 or bf16 [rows, columns], in the order of device/mxfp4_operand.py, boxes of ROWS x BLOCK_K
    x_scales,  # of e4m3: fp32 [rows]; else None
    codes,  # int32 [experts, rows of the weight, columns / 8], boxes of 1 x BOX x STEP / 8
    scales,  # uint8 [experts, rows of the weight, columns / 32], contiguous in a row
    spans,  # int32 [spans, 3]: expert, its first sorted row here, its end
    count,  # int32 [1]: of spans
    order,  # int32 [rows]
    weights,  # fp32 [rows]
    out,  # [rows, columns], contiguous
    outputs,  # tiles of outputs
    second,  # rows of the weight from a tile's first box to the second
    groups,  # columns / 32
    last,  # row of the weight
    columns,  # of out
    clamp,
    stride_scales_expert,
    stride_scales_row,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    BLOCK_M: gl.constexpr,  # rows of a tile
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    SCALED: gl.constexpr = x_scales is not None
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        codes=gl.allocate_shared_memory(codes.dtype, [2 * STAGES] + codes.block_shape, codes.layout),
        x=gl.allocate_shared_memory(x.dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x.layout),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barrier()
    EACH: gl.constexpr = BOX if GATED else 2 * BOX
    tiles = Tiles(spans, count, outputs, second, groups, last, EACH)
    scales = Scales(scales, stride_scales_expert, stride_scales_row)
    row_scales = x_scales if SCALED else weights  # which nobody looks at
    output = Output(out, order, row_scales, weights, columns, clamp, GATED, CLAMPED, SCALED, GATED and not SCALED)
    gl.warp_specialize(
        [
            (_consumer, (shared, scales, tiles, output, 0)),
            (_consumer, (shared, scales, tiles, output, 1)),
            (_producer, (shared, codes, x, scales, tiles)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
