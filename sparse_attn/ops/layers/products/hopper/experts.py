"""One of the experts' two products, of rows in fp8 or bf16 and MXFP4 codes. experts.md has the schedule, barriers,
shared memory and registers.

The weight takes the matrix unit's M dimension, the rows its N (swap-AB). A tile is some sorted rows of one expert times
two boxes of 64 outputs, half of each for either consumer: gates and the ups that belong to them, so that a thread has a
gate and its up, or neighbouring boxes of down. Beside fp8 rows, codes of e2m1 become e4m3 in registers
(device/mxfp4_operand.py), with a group's scale relative to the highest of eight: what is below 2^-11 of it counts as 0.
A product of 256 columns is then multiplied by that highest scale and added in fp32; the row's scale comes at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import (
    async_load,
    barrier,
    keep_order,
    launch_dependents,
    next_stage,
    signal,
    tma_load,
    wait,
)
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.layers.products.hopper import constants
from sparse_attn.ops.layers.products.hopper.experts_codes import (
    Scales,
    decode_operand,
    read_scales,
    read_words,
    scale_pointers,
    tables_of,
)
from sparse_attn.ops.layers.products.hopper.experts_output import Output, finish, halves

BLOCK_K = gl.constexpr(constants.BLOCK_K)
STEP = gl.constexpr(constants.STEP)
REGISTERS = gl.constexpr(constants.REGISTERS)
BOX = gl.constexpr(constants.BOX)
CONSUMERS = gl.constexpr(constants.CONSUMERS)
ROWS = gl.constexpr(constants.ROWS)


@aggregate
class Shared:
    """Rings. codes: int32 [STAGES * 2, 1, CONSUMERS * BOX, WORDS]. x: e4m3 or bf16 [STAGES * 2, BLOCK_M, BLOCK_K], both
    halves of a stage's columns. scales: int64 [STAGES * CONSUMERS, 64], the next step's. full: all of a stage are
    there, an arrival and the bytes of TMA, and an arrival of each thread that copied scales. empty: consumers have read
    them, an arrival of each. first_scales, first_full: those of the first step."""

    codes: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    first_scales: gl.shared_memory_descriptor
    first_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Tiles:
    """spans: int32 [spans, 3], as order_rows deals them, of which those with rows come first. count: int32 [1], how
    many that are. Unit u is tile u % outputs of span u / outputs. second: rows of the weight from a tile's first box to
    its second. groups: of a row of the weight, a multiple of 8. STRIDE: rows of the weight from a tile to the next."""

    spans: gl.tensor
    count: gl.tensor
    outputs: gl.tensor
    second: gl.tensor
    groups: gl.tensor
    STRIDE: gl.constexpr


@gluon.constexpr_function
def result_layout(rows, exact):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16 if exact else 32])


@gluon.jit
def _span(tiles, unit, units):
    """(expert, its first sorted row in the tile, the end of its rows) of a unit. A unit behind the last one gives the
    last one's. There must be one."""
    at = tiles.spans + gl.minimum(unit, units - 1) // tiles.outputs * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _first_output(tiles, unit):
    return unit % tiles.outputs * tiles.STRIDE


@gluon.jit
def _producer(shared, codes, x, scales, tiles):
    STAGES: gl.constexpr = shared.full.shape[0]
    BOXES: gl.constexpr = shared.x.shape[1] // ROWS  # of either half of a stage's columns
    OF_CODES: gl.constexpr = CONSUMERS * BOX * STEP  # bytes, two boxes of half a byte a code
    OF_ROWS: gl.constexpr = ROWS * STEP * x.dtype.primitive_bitwidth // 8
    FLAT: gl.constexpr = shared.scales.layout
    ring = reinterpret(shared.scales, gl.int64, [STAGES, 2 * BOX * CONSUMERS], FLAT)
    # PDL: rows and spans are launches' before.
    wait()
    stage, phase = 0, 0
    units = gl.load(tiles.count) * tiles.outputs
    if gl.program_id(0) < units:
        next_expert, next_row, next_end = _span(tiles, gl.program_id(0), units)
        first = _first_output(tiles, gl.program_id(0))
        # The first step's scales have memory of their own; each later one's come with the step before.
        pointers = scale_pointers(scales, tiles, next_expert, first)
        async_load(reinterpret(shared.first_scales, gl.int64, [2 * BOX * CONSUMERS], FLAT), pointers)
        async_copy.mbarrier_arrive(shared.first_full, increment_count=False)
        for unit in range(gl.program_id(0), units, gl.num_programs(0)):
            expert, row, end = next_expert, next_row, next_end
            next_unit = unit + gl.num_programs(0)
            next_expert, next_row, next_end = _span(tiles, next_unit, units)
            # The next tile is known a tile ahead, for its first scales.
            first, next_first = _first_output(tiles, unit), _first_output(tiles, next_unit)
            boxes = gl.minimum((end - row + ROWS - 1) // ROWS, BOXES)  # those behind have no rows of the expert's
            for group in range(0, tiles.groups, 8):
                # Both consumers have read the stage.
                mbarrier.wait(shared.empty.index(stage), phase ^ 1)
                full = shared.full.index(stage)
                # A tile with fewer rows brings fewer boxes, and its barrier expects fewer bytes.
                for n in gl.static_range(1, BOXES + 1):
                    mbarrier.expect(full, OF_CODES + n * OF_ROWS, pred=boxes == n)
                # Codes of both boxes of outputs, a consumer's half of each.
                column, word = group * 32, group * 4
                tma_load(codes, [expert, first, word], full, shared.codes.index(2 * stage))
                tma_load(codes, [expert, first + tiles.second, word], full, shared.codes.index(2 * stage + 1))
                for n in gl.static_range(BOXES):
                    here, more = shared.x.index(2 * stage), shared.x.index(2 * stage + 1)
                    tma_load(x, [row + n * ROWS, column], full, here.slice(n * ROWS, ROWS), pred=n < boxes)
                    tma_load(x, [row + n * ROWS, column + BLOCK_K], full, more.slice(n * ROWS, ROWS), pred=n < boxes)
                pointers += 1
                if group + 8 == tiles.groups:  # behind this step comes the next tile's first
                    pointers = scale_pointers(scales, tiles, next_expert, next_first)
                # Eight scales of each output: of the next step, with this one's codes.
                async_load(ring.index(stage), pointers)
                async_copy.mbarrier_arrive(full, increment_count=False)
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _work(shared, tiles, output, units, which: gl.constexpr):
    """A CTA's units, of which there is one."""
    STAGES: gl.constexpr = shared.full.shape[0]
    BLOCK_M: gl.constexpr = shared.x.shape[1]
    EXACT: gl.constexpr = shared.x.dtype == gl.bfloat16
    RESULT: gl.constexpr = result_layout(BLOCK_M, EXACT)
    none = gl.zeros([2 * BOX, BLOCK_M], gl.float32, RESULT)
    stage, phase = 0, 0
    # The first step's tables; later ones are made while products run.
    mbarrier.wait(shared.first_full, 0)
    tables, more_tables, left = tables_of(read_scales(shared.first_scales.index(which)), EXACT, RESULT)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _, row, end = _span(tiles, unit, units)  # on its way meanwhile
        sums = none
        for _ in range(0, tiles.groups, 8):
            x, more_x = shared.x.index(2 * stage).permute((1, 0)), shared.x.index(2 * stage + 1).permute((1, 0))
            mbarrier.wait(shared.full.index(stage), phase)
            # Out of shared memory at once: words of this step, scales of the next.
            words, more_words = read_words(shared, stage, which)
            ahead = read_scales(shared.scales.index(stage * CONSUMERS + which))
            # The first half is multiplied while the second is decoded.
            weight = decode_operand(words, tables, None, EXACT, RESULT)
            product = warpgroup_mma(weight, x, sums if EXACT else none, use_acc=EXACT, is_async=True)
            if EXACT and BLOCK_M == 32:  # registers hold one half's operand
                product = warpgroup_mma_wait(0, deps=(product,))
            zero = keep_order(units)  # or both halves are decoded before the first is multiplied
            weight = decode_operand(more_words, more_tables, zero, EXACT, RESULT)
            product = warpgroup_mma(weight, more_x, product, is_async=True)
            keep_order(units)
            # The next step's tables, beside this step's products.
            tables, more_tables, next_left = tables_of(ahead, EXACT, RESULT)
            keep_order(units)
            # Codes were decoded relative to the highest scale of eight groups: apply it in fp32.
            product = warpgroup_mma_wait(0, deps=(product,))
            sums = product if EXACT else sums + product * gl.expand_dims(left, 1)
            signal(shared.empty.index(stage))
            left = next_left
            stage, phase = next_stage(stage, phase, STAGES)
        # All columns are added up: gate or weigh, and store.
        first = _first_output(tiles, unit) + which * BOX
        if BLOCK_M == 128:  # what brings all of them in order would not fit into shared memory
            some, others = halves(sums)
            finish(some, row, end, output, first)
            if row + BLOCK_M // 2 < end:
                finish(others, row + BLOCK_M // 2, end, output, first)
        else:
            finish(sums, row, end, output, first)


@gluon.jit
def _consumer(shared, tiles, output, which: gl.constexpr):
    wait()
    launch_dependents()
    units = gl.load(tiles.count) * tiles.outputs
    if gl.program_id(0) < units:
        _work(shared, tiles, output, units, which)


@gluon.jit(
    do_not_specialize=[
        "outputs", "second", "groups", "blocks", "clamp", "stride_scales_expert", "stride_scales_row"
    ]
)  # fmt: skip
def multiply(
    x,  # e4m3 or bf16 [rows, columns], in the order of device/mxfp4_operand.py, boxes of ROWS x BLOCK_K
    x_scales,  # of e4m3: fp32 [rows]; else None
    codes,  # int32 [experts, rows of the weight, columns / 8], boxes of 1 x CONSUMERS * BOX x STEP / 8
    scales,  # int64 [experts, rows of the weight, columns / 256], eight scales each, contiguous in a row
    spans,  # int32 [spans, 3]: expert, its first sorted row here, its end
    count,  # int32 [1]: of spans
    order,  # int32 [rows]
    weights,  # fp32 [rows]
    out,  # [rows, 128 * blocks], contiguous
    outputs,  # tiles of outputs
    second,  # rows of the weight from a tile's first box to its second
    groups,  # columns / 32
    blocks,  # of 128 columns of out
    clamp,
    stride_scales_expert,
    stride_scales_row,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    BLOCK_M: gl.constexpr,  # rows of a tile
    CTAS: gl.constexpr,  # that share an SM
    STAGES: gl.constexpr,
):
    SCALED: gl.constexpr = x_scales is not None
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        codes=gl.allocate_shared_memory(codes.dtype, [2 * STAGES] + codes.block_shape, codes.layout),
        x=gl.allocate_shared_memory(x.dtype, [2 * STAGES, BLOCK_M, BLOCK_K], x.layout),
        scales=gl.allocate_shared_memory(gl.int64, [STAGES * CONSUMERS, 2 * BOX], WORDS),
        first_scales=gl.allocate_shared_memory(gl.int64, [CONSUMERS, 2 * BOX], WORDS),
        first_full=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    # 32 lanes arrive with their copies of scales; the other arrival is TMA's.
    mbarrier.init(shared.first_full, count=32)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=1 + 32)
        mbarrier.init(shared.empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barrier()
    STRIDE: gl.constexpr = CONSUMERS * BOX if GATED else 2 * CONSUMERS * BOX
    tiles = Tiles(spans, count, outputs, second, groups, STRIDE)
    scales = Scales(scales, stride_scales_expert, stride_scales_row)
    row_scales = x_scales if SCALED else weights  # which nobody looks at
    output = Output(out, order, row_scales, weights, blocks, clamp, GATED, CLAMPED, SCALED, GATED and not SCALED)
    gl.warp_specialize(
        [
            (_consumer, (shared, tiles, output, 0)),
            (_consumer, (shared, tiles, output, 1)),
            (_producer, (shared, codes, x, scales, tiles)),
        ],
        [4, 1],
        REGISTERS[CTAS],
    )
