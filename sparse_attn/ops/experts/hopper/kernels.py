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
from sparse_attn.device.hopper import barrier, launch_dependents, next_stage, signal, tma_load, wait
from sparse_attn.device.mxfp4_operand import exact_operand, operand
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
    """spans: int32 [spans, 3], as order_rows deals them. Unit u is tile u % outputs of span u / outputs. second: rows
    of the weight from the first box to the second. steps: of BLOCK_K columns. last: row of the weight. EACH: outputs
    from a tile to the next."""

    spans: gl.tensor
    units: gl.tensor
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
def _span(tiles, unit):
    """(expert or -1, first sorted row of the expert's, end of the expert's) of a unit, of the last one behind it. Its
    tile begins at the first one's multiple of ALIGN."""
    at = tiles.spans + gl.minimum(unit, tiles.units - 1) // tiles.outputs * 3
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
    next_span = _span(tiles, gl.program_id(0))
    for unit in range(gl.program_id(0), tiles.units, gl.num_programs(0)):
        expert, row, _ = next_span
        next_span = _span(tiles, unit + gl.num_programs(0))
        if expert >= 0:
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
def _words(first, second):
    """[64, 4, 4] of both parts, in the order of a product's rows."""
    both = gl.reshape(gl.join(first, second), [4, 8, WORDS_K, 2])
    words = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * OWN, 4, 4])
    return gl.convert_layout(words, WORDS, assert_trivial=True)


@gluon.jit
def _parts(sums):
    """(first, second) [OWN, BLOCK_M] of a product's sums."""
    sums = gl.permute(gl.reshape(sums, [4, 2, 8, sums.shape[1]]), (0, 2, 3, 1))
    first, second = gl.split(sums)
    return gl.reshape(first, [OWN, first.shape[2]]), gl.reshape(second, [OWN, second.shape[2]])


@gluon.jit
def _store(values, row, end, output, column):
    """values: [OWN, BLOCK_M] of sorted rows from ``row``'s multiple of ALIGN on, of which those from ``row`` to ``end``
    are the expert's, and of outputs from ``column`` on."""
    BLOCK_M: gl.constexpr = values.shape[1]
    EACH: gl.constexpr = 2 if output.PLACED else 8  # neighbours of a thread's
    TO: gl.constexpr = gl.BlockedLayout([1, EACH], [EACH, 32 // EACH], [4, 1], [1, 0])
    values = gl.convert_layout(gl.permute(values, (1, 0)), TO)
    at = row // ALIGN * ALIGN + gl.arange(0, BLOCK_M, gl.SliceLayout(1, TO))
    inside = (at >= row) & (at < end)
    to = at
    if not output.GATED:
        to = gl.load(output.order + at, mask=inside, other=0)
        values *= gl.expand_dims(gl.load(output.weights + to, mask=inside, other=0.0), 1)
    column = column + gl.arange(0, OWN, gl.SliceLayout(0, TO))
    mask = gl.expand_dims(inside, 1) & gl.expand_dims(column < output.columns, 0)
    if output.PLACED:  # as device/mxfp4_operand has bf16
        column = column // 128 * 128 + column % 32 // 4 * 16 + column // 2 % 2 * 8 + column // 32 % 4 * 2 + column % 2
    place = gl.expand_dims(to.to(gl.int64) * output.columns, 1) + gl.expand_dims(column, 0)
    gl.store(output.out + place, cast.cast(values, output.out.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(sums, row, end, output, column):
    first, second = _parts(sums)
    if output.GATED:
        _store(gated(first, second, output.clamp, output.CLAMPED), row, end, output, column)
    else:
        _store(first, row, end, output, column)
        _store(second, row, end, output, column + BOX)


@gluon.jit
def _start(words, scale, x, RESULT: gl.constexpr):
    """(the product of words and rows of fp8, under way; what is left of the words' scales int32 [64, 4]: one a row)."""
    BLOCK_M: gl.constexpr = x.shape[0]
    top = gl.max(scale, 1)
    up = scale - gl.expand_dims(top, 1) + UP
    there = up >= DOWN
    low = gl.where(there, LOW_CODES + up * 0x08080800, 0)
    high = gl.where(there, HIGH_CODES + up * 0x08080808, 0)
    codes = operand(words, low, high, RESULT).to(gl.float8e4nv, bitcast=True)
    none = gl.zeros([2 * OWN, BLOCK_M], gl.float32, RESULT)
    product = warpgroup_mma(codes, x.permute((1, 0)), none, use_acc=False, is_async=True)
    left = gl.where(top == E8M0_NAN, float("nan"), decode_exponent(top) * 2.0**-6)
    return product, gl.convert_layout(left, gl.SliceLayout(1, RESULT), assert_trivial=True)


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
    next_span = _span(tiles, gl.program_id(0))
    for unit in range(gl.program_id(0), tiles.units, gl.num_programs(0)):
        expert, row, end = next_span
        next_span = _span(tiles, unit + gl.num_programs(0))  # on its way meanwhile
        if expert >= 0:
            first = unit % tiles.outputs * tiles.EACH
            weight_row = gl.minimum(first + own, tiles.last)
            at = scales.values + expert.to(gl.int64) * scales.stride_expert
            at = gl.expand_dims(at + weight_row.to(gl.int64) * scales.stride_row, 1) + group
            ahead = gl.load(at)
            sums = gl.zeros([2 * OWN, BLOCK_M], gl.float32, RESULT)
            for step in range(tiles.steps):
                scale = ahead.to(gl.int32)
                ahead = gl.load(at + gl.minimum(step + 1, tiles.steps - 1) * 4)
                mbarrier.wait(shared.full.index(stage), phase)
                words = _words(_part(shared, 2 * stage, which), _part(shared, 2 * stage + 1, which))
                if EXACT:
                    sums = warpgroup_mma(
                        exact_operand(words, scale, RESULT), shared.x.index(stage).permute((1, 0)), sums, is_async=True
                    )
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                    signal(shared.empty.index(stage))
                else:
                    product, left = _start(words, scale, shared.x.index(stage), RESULT)
                    row_scale = shared.x_scales.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, RESULT))
                    product = warpgroup_mma_wait(0, deps=(product,))
                    signal(shared.empty.index(stage))
                    sums += product * (gl.expand_dims(left, 1) * gl.expand_dims(row_scale, 0))
                stage, phase = next_stage(stage, phase, STAGES)
            _finish(sums, row, end, output, first + which * OWN)


@gluon.jit(do_not_specialize=["spans_count", "outputs", "second", "steps", "last", "columns", "clamp"])
def multiply(
    x,  # e4m3 or bf16 [rows, columns], in the order of device/mxfp4_operand.py, boxes of BLOCK_M x BLOCK_K
    x_scales,  # of e4m3: fp32 [columns / 128, rows and more], boxes of 1 x BLOCK_M; else None
    codes,  # int32 [experts, rows of the weight, columns / 8], boxes of 1 x BOX x BLOCK_K / 8
    scales,  # uint8 [experts, rows of the weight, columns / 32], contiguous in a row
    spans,  # int32 [spans, 3]
    order,  # int32 [rows]
    weights,  # fp32 [rows]
    out,  # [rows, columns], contiguous
    spans_count,
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
    tiles = Tiles(spans, spans_count * outputs, outputs, second, steps, last, EACH)
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
