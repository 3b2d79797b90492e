"""One of the experts' two products, of rows in fp8 and MXFP4 codes. README.md has the schedule, barriers, shared memory
and registers.

The weight takes the matrix unit's M dimension, the rows its N (swap-AB). A tile is some sorted rows of one expert times
two boxes of outputs: gates and the ups that belong to them, or two neighbouring boxes of down. Warpgroups have half of
either box, so that a thread has a gate and its up. Codes of e2m1 become e4m3 in registers (device/mxfp4_operand.py),
with a group's scale relative to the highest of four: what is below 2^-11 of it counts as 0. A product of 128 columns is
then multiplied by that highest scale and the row's, and added in fp32.
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

ALIGN = gl.constexpr(constants.ALIGN)
BLOCK_K = gl.constexpr(constants.BLOCK_K)
BOX = gl.constexpr(constants.BOX)
CONSUMERS = gl.constexpr(constants.CONSUMERS)
OWN = gl.constexpr(constants.BOX // constants.CONSUMERS)  # outputs of a box that a consumer has
WORDS_K = gl.constexpr(constants.BLOCK_K // 8)
UP, DOWN = gl.constexpr(6), gl.constexpr(-5)  # exponents that codes of e2m1 take and stay exact as e4m3
LOW_CODES = gl.constexpr(0x3C383000)  # e4m3 of 1.5, 1, 0.5 and 0
HIGH_CODES = gl.constexpr(0x4C484440)  # of 6, 4, 3 and 2
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# Words of a consumer's part of a box [OWN, WORDS_K]: a lane has a group of an output, 16 bytes.
PART = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
)
# Words of groups [64, 4, 4] of both parts, in the order of a product's rows: of 16 eight of the first, then eight of
# the second.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
    )
)  # fmt: skip
GROUPS = gl.constexpr(gl.SliceLayout(2, WORDS.value))


@aggregate
class Shared:
    """Rings. codes: int32 [2 * STAGES, 1, BOX, WORDS_K], two boxes a stage. x: e4m3 [STAGES, BLOCK_M, BLOCK_K].
    x_scales: fp32 [STAGES, 1, BLOCK_M]. full: all of a stage are there, an arrival and their bytes. empty: consumers
    have read them, an arrival of each."""

    codes: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    x_scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Tiles:
    """spans: int32 [spans, 3], as order_rows deals them, of which those with rows come first. count: int32 [1], how
    many that are. Unit u is tile u % outputs of span u / outputs. second: rows of the weight from the first box to the
    second. steps: of BLOCK_K columns. last: row of the weight. EACH: outputs from a tile to the next."""

    spans: gl.tensor
    count: gl.tensor
    outputs: gl.tensor
    second: gl.tensor
    steps: gl.tensor
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
    weights. clamp: of gates and ups. PLACED: in the order of an operand of bf16."""

    out: gl.tensor
    order: gl.tensor
    weights: gl.tensor
    columns: gl.tensor
    clamp: gl.tensor
    GATED: gl.constexpr
    CLAMPED: gl.constexpr
    PLACED: gl.constexpr


@gluon.constexpr_function
def result_layout(rows, exact):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16 if exact else 32])


@gluon.jit
def _span(tiles, unit, units):
    """(expert, first sorted row of the expert's, end of the expert's) of a unit, of the last one behind it. Its tile
    begins at the first one's multiple of ALIGN."""
    at = tiles.spans + gl.maximum(gl.minimum(unit, units - 1), 0) // tiles.outputs * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _ask_for_scales(scales, tiles, expert, first):
    """Have a tile's scales brought to the L2, 128 bytes at a time: consumers read them a step before they need them,
    which is time enough for the L2 alone."""
    n = gl.arange(0, 2 * BOX, gl.BlockedLayout([1], [32], [1], [0]))
    row = gl.minimum(first + n % BOX + n // BOX * tiles.second, tiles.last)
    rows = scales.values + (expert.to(gl.int64) * scales.stride_expert + row.to(gl.int64) * scales.stride_row)
    for at in range(0, tiles.steps * 4, 128):
        gl.inline_asm_elementwise(PREFETCH, "=r,l", [rows + at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _producer(shared, codes, x, x_scales, scales, tiles):
    STAGES: gl.constexpr = shared.x.shape[0]
    BLOCK_M: gl.constexpr = shared.x.shape[1]
    EXACT: gl.constexpr = shared.x.dtype == gl.bfloat16
    OF_A_ROW: gl.constexpr = 2 * BLOCK_K if EXACT else BLOCK_K + 4
    BYTES: gl.constexpr = BOX * BLOCK_K + BLOCK_M * OF_A_ROW  # two boxes of half a byte a code
    wait()
    stage, phase = 0, 0
    units = gl.load(tiles.count) * tiles.outputs
    next_span = _span(tiles, gl.program_id(0), units)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        expert, row, _ = next_span
        next_span = _span(tiles, unit + gl.num_programs(0), units)
        first = unit % tiles.outputs * tiles.EACH
        row = row // ALIGN * ALIGN
        _ask_for_scales(scales, tiles, expert, first)
        for step in range(tiles.steps):
            mbarrier.wait(shared.empty.index(stage), phase ^ 1)
            full = shared.full.index(stage)
            mbarrier.expect(full, BYTES)
            word = step * WORDS_K
            tma_load(codes, [expert, first, word], full, shared.codes.index(2 * stage))
            tma_load(codes, [expert, first + tiles.second, word], full, shared.codes.index(2 * stage + 1))
            tma_load(x, [row, step * BLOCK_K], full, shared.x.index(stage))
            if not EXACT:
                tma_load(x_scales, [step, row], full, shared.x_scales.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _part(shared, box, which: gl.constexpr):
    """A consumer's words of a box."""
    return shared.codes.index(box).reshape([BOX, WORDS_K]).slice(which * OWN, OWN, dim=0).load(PART)


@gluon.jit
def _words(shared, stage, which: gl.constexpr):
    """A consumer's words of a stage [64, 4, 4], in the order of a product's rows."""
    first, second = _part(shared, 2 * stage, which), _part(shared, 2 * stage + 1, which)
    both = gl.reshape(gl.join(first, second), [4, 8, WORDS_K, 2])
    words = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * OWN, 4, 4])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def _parts(sums):
    """(first, second) [OWN, BLOCK_M] of a product's sums."""
    sums = gl.permute(gl.reshape(sums, [4, 2, 8, sums.shape[1]]), (0, 2, 3, 1))
    first, second = gl.split(sums)
    return gl.reshape(first, [OWN, first.shape[2]]), gl.reshape(second, [OWN, second.shape[2]])


@gluon.constexpr_function
def rows_layout(placed):
    """Of a tile's values as they are stored [BLOCK_M, OWN]: a thread has neighbours of a row."""
    each = 2 if placed else 8
    return gl.BlockedLayout([1, each], [each, 32 // each], [4, 1], [1, 0])


@gluon.jit
def _rows(row, end, output, BLOCK_M: gl.constexpr):
    """(rows of ``out``, their weights, whether they are the expert's) of the sorted rows from ``row``'s multiple of
    ALIGN on, of which those from ``row`` to ``end`` are the expert's."""
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_layout(output.PLACED))
    at = row // ALIGN * ALIGN + gl.arange(0, BLOCK_M, ROWS)
    inside = (at >= row) & (at < end)
    if output.GATED:
        to, weight = at, gl.zeros([BLOCK_M], gl.float32, ROWS)
    else:
        to = gl.load(output.order + at, mask=inside, other=0)
        weight = gl.load(output.weights + to, mask=inside, other=0.0)
    return to, weight, inside


@gluon.jit
def _store(values, rows, output, column):
    """values: [OWN, BLOCK_M] of outputs from ``column`` on. rows: what _rows returns."""
    TO: gl.constexpr = rows_layout(output.PLACED)
    to, weight, inside = rows
    values = gl.convert_layout(gl.permute(values, (1, 0)), TO)
    if not output.GATED:
        values *= gl.expand_dims(weight, 1)
    column = column + gl.arange(0, OWN, gl.SliceLayout(0, TO))
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(column < output.columns, 0)
    if output.PLACED:  # as device/mxfp4_operand has bf16
        column = column // 128 * 128 + column % 32 // 4 * 16 + column // 2 % 2 * 8 + column // 32 % 4 * 2 + column % 2
    place = gl.expand_dims(to.to(gl.int64) * output.columns, 1) + gl.expand_dims(column, 0)
    gl.store(output.out + place, cast.cast(values, output.out.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(sums, rows, output, column):
    first, second = _parts(sums)
    if output.GATED:
        _store(gated(first, second, output.clamp, output.CLAMPED), rows, output, column)
    else:
        _store(first, rows, output, column)
        _store(second, rows, output, column + BOX)


@gluon.jit
def _tables(scale, EXACT: gl.constexpr, RESULT: gl.constexpr):
    """What decodes words, twice int32 [64, 4], and what is left of the scale of all four groups [64], from scales uint8
    [64, 4]: tables of magnitudes of low and of high codes; of EXACT codes the scales, and nothing is left."""
    scale = scale.to(gl.int32)
    if EXACT:
        low, high, left = scale, scale, gl.zeros([2 * OWN], gl.float32, gl.SliceLayout(1, GROUPS))
    else:
        top = gl.max(scale, 1)
        up = scale - gl.expand_dims(top, 1) + UP
        there = up >= DOWN
        low = gl.where(there, LOW_CODES + up * 0x08080800, 0)
        high = gl.where(there, HIGH_CODES + up * 0x08080808, 0)
        left = gl.where(top == E8M0_NAN, float("nan"), decode_exponent(top) * 2.0**-6)
    return low, high, gl.convert_layout(left, gl.SliceLayout(1, RESULT), assert_trivial=True)


@gluon.jit
def _begin(words, low, high, EXACT: gl.constexpr):
    """What _start takes, of words and their tables."""
    if EXACT:
        begun, rest = begin_exact(words), low
    else:
        begun, rest = begin_decode(words, low, high)
    return begun, rest


@gluon.jit
def _start(begun, rest, x, sums):
    """A step's product, under way: exact ones add to ``sums``."""
    RESULT: gl.constexpr = sums.type.layout
    if x.dtype == gl.bfloat16:
        product = warpgroup_mma(exact_operand(begun, rest, RESULT), x.permute((1, 0)), sums, is_async=True)
    else:
        codes = operand(end_decode(begun, rest), RESULT).to(gl.float8e4nv, bitcast=True)
        none = gl.zeros(sums.shape, gl.float32, RESULT)
        product = warpgroup_mma(codes, x.permute((1, 0)), none, use_acc=False, is_async=True)
    return product


@gluon.jit
def _add(sums, product, left, shared, stage):
    """Wait for a product, empty its stage, and add it."""
    RESULT: gl.constexpr = sums.type.layout
    if shared.x.dtype == gl.bfloat16:
        sums = warpgroup_mma_wait(0, deps=(product,))
        signal(shared.empty.index(stage))
    else:
        row_scale = shared.x_scales.index(stage).reshape([sums.shape[1]]).load(gl.SliceLayout(0, RESULT))
        product = warpgroup_mma_wait(0, deps=(product,))
        signal(shared.empty.index(stage))
        sums += product * (gl.expand_dims(left, 1) * gl.expand_dims(row_scale, 0))
    return sums


@gluon.jit
def _consumer(shared, scales, tiles, output, which: gl.constexpr):
    STAGES: gl.constexpr = shared.x.shape[0]
    BLOCK_M: gl.constexpr = shared.x.shape[1]
    EXACT: gl.constexpr = shared.x.dtype == gl.bfloat16
    RESULT: gl.constexpr = result_layout(BLOCK_M, EXACT)
    wait()
    launch_dependents()
    m = gl.arange(0, 2 * OWN, gl.SliceLayout(1, GROUPS))
    own = which * OWN + m // 16 * 8 + m % 8 + m // 8 % 2 * tiles.second  # row of the weight
    group = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, GROUPS)), 0)
    stage, phase = 0, 0
    units = gl.load(tiles.count) * tiles.outputs
    next_span = _span(tiles, gl.program_id(0), units)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        expert, row, end = next_span
        next_span = _span(tiles, unit + gl.num_programs(0), units)  # on its way meanwhile
        first = unit % tiles.outputs * tiles.EACH
        weight_row = gl.minimum(first + own, tiles.last)
        at = scales.values + expert.to(gl.int64) * scales.stride_expert
        at = gl.expand_dims(at + weight_row.to(gl.int64) * scales.stride_row, 1) + group
        last = tiles.steps - 1
        scale, ahead = gl.load(at), gl.load(at + gl.minimum(1, last) * 4)
        far_ahead = gl.load(at + gl.minimum(2, last) * 4)
        low, high, left = _tables(scale, EXACT, RESULT)
        mbarrier.wait(shared.full.index(stage), phase)
        begun, rest = _begin(_words(shared, stage, which), low, high, EXACT)
        low, high, left_ahead = _tables(ahead, EXACT, RESULT)
        sums = gl.zeros([2 * OWN, BLOCK_M], gl.float32, RESULT)
        for step in range(last):
            of_product = stage
            stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(shared.full.index(stage), phase)
            product = _start(begun, rest, shared.x.index(of_product), sums)
            keep_order(end)
            begun, rest = _begin(_words(shared, stage, which), low, high, EXACT)
            keep_order(end)
            ahead = far_ahead
            far_ahead = gl.load(at + gl.minimum(step + 3, last) * 4)
            sums = _add(sums, product, left, shared, of_product)
            left = left_ahead
            low, high, left_ahead = _tables(ahead, EXACT, RESULT)
        product = _start(begun, rest, shared.x.index(stage), sums)
        rows = _rows(row, end, output, BLOCK_M)  # read while the last product is under way
        sums = _add(sums, product, left, shared, stage)
        stage, phase = next_stage(stage, phase, STAGES)
        _finish(sums, rows, output, first + which * OWN)


@gluon.jit(do_not_specialize=["outputs", "second", "steps", "last", "columns", "clamp"])
def multiply(
    x,  # e4m3 or bf16 [rows, columns], in the order of device/mxfp4_operand.py, boxes of BLOCK_M x BLOCK_K
    x_scales,  # of e4m3: fp32 [columns / 128, rows and more], boxes of 1 x BLOCK_M; else None
    codes,  # int32 [experts, rows of the weight, columns / 8], boxes of 1 x BOX x BLOCK_K / 8
    scales,  # uint8 [experts, rows of the weight, columns / 32], contiguous in a row
    spans,  # int32 [spans, 3]: expert, its first sorted row here, its end
    count,  # int32 [1]: of spans
    order,  # int32 [rows]
    weights,  # fp32 [rows]
    out,  # [rows, columns], contiguous
    outputs,  # tiles of outputs
    second,  # rows of the weight from a tile's first box to the second
    steps,
    last,  # row of the weight
    columns,  # of out
    clamp,
    stride_scales_expert,
    stride_scales_row,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    EXACT: gl.constexpr = x.dtype == gl.bfloat16
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    if EXACT:  # it has no such scales: what stands for them is not looked at
        x_scales, row_scales = x, full
    else:
        shape: gl.constexpr = [STAGES] + x_scales.block_shape
        row_scales = gl.allocate_shared_memory(x_scales.dtype, shape, x_scales.layout)
    shared = Shared(
        codes=gl.allocate_shared_memory(codes.dtype, [2 * STAGES] + codes.block_shape, codes.layout),
        x=gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout),
        x_scales=row_scales,
        full=full,
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barrier()
    EACH: gl.constexpr = BOX if GATED else 2 * BOX
    tiles = Tiles(spans, count, outputs, second, steps, last, EACH)
    scales = Scales(scales, stride_scales_expert, stride_scales_row)
    output = Output(out, order, weights, columns, clamp, GATED, CLAMPED, GATED and EXACT)
    gl.warp_specialize(
        [
            (_consumer, (shared, scales, tiles, output, 0)),
            (_consumer, (shared, scales, tiles, output, 1)),
            (_producer, (shared, codes, x, x_scales, scales, tiles)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
