"""A linear of few rows and e4m3 weights on Hopper. README.md has the schedule, barriers, shared memory and registers.

The weight takes the matrix unit's M dimension, the rows its N (swap-AB). A unit of work is a step: BLOCK_K columns of
BLOCK_N outputs. The kernel is persistent; a CTA takes as many steps as any other, next to each other (stream-K). Steps
of one tile of outputs are added up in registers. Where a tile is of several CTAs, each leaves fp32 partials, and the
one that comes last adds them up in the order of the CTAs: what is added in which order follows from shapes alone.

A producer warp loads codes and rows by TMA. Two warpgroups have 64 outputs of a tile each. Nothing is brought into
another order: a lane reads 16 neighbours of a row, of codes as of rows, and takes them for what mma.m16n8k16 wants of
it. Which columns are multiplied together is all that matters, and those are.

Codes may be asked for before the launches in front of this one are done, for none of them writes a weight
(device/pdl.py); rows and scales may not.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.device import cast
from sparse_attn.device.hopper import barrier, launch_dependents, signal, tma_load, wait
from sparse_attn.device.packed_dot import NAN_FLAGS, decode_scale
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.grouped_linear.hopper import constants

BLOCK_K = gl.constexpr(constants.BLOCK_K)
WORDS_K = gl.constexpr(constants.BLOCK_K // 4)
OUTPUTS = gl.constexpr(constants.OUTPUTS)
TOGETHER = gl.constexpr(8)  # partials that are read at once
RESULT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
CODES = gl.constexpr(gl.DotOperandLayout(0, RESULT.value, 16))
ROWS = gl.constexpr(gl.DotOperandLayout(1, RESULT.value, 16))
OUTPUT = gl.constexpr(gl.SliceLayout(1, RESULT.value))
# Words of four codes [OUTPUTS, BLOCK_K / 4]. Lanes 0 to 7 have outputs 0 and 4, whose 16 bytes lie in other banks.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
)
FLAGS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [4, 0], [1, 0], [2, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
# Two pairs of values of a word $2: bits become exponent and mantissa of bf16, and 2^120 makes up for the bias.
DECODE = gl.constexpr(
    "{ .reg .b32 a, b, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7B807B80;\n"
    "prmt.b32 a, $2, $2, 0x9180; prmt.b32 b, $2, $2, 0xB3A2;\n"
    "shl.b32 a, a, 4; shl.b32 b, b, 4; and.b32 a, a, 0x87f087f0; and.b32 b, b, 0x87f087f0;\n"
    "fma.rn.bf16x2 $0, a, s, z; fma.rn.bf16x2 $1, b, s, z; }"
)


@aggregate
class Shared:
    """words: int32 [STAGES, BLOCK_N, BLOCK_K / 4] of four codes. rows: bf16 [STAGES, BLOCK_M, BLOCK_K]. full: both are
    there, an arrival and their bytes. empty: consumers have read them, an arrival of each."""

    words: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Run:
    """Steps [begin, end) of this CTA, and how all are dealt: the first ``more`` CTAs have one above ``each``. steps: of
    a tile."""

    begin: gl.tensor
    end: gl.tensor
    each: gl.tensor
    more: gl.tensor
    steps: gl.tensor


@aggregate
class Output:
    """out: bf16 [rows, outputs]. partials: fp32 [CTAs, 2, rows, BLOCK_N]. arrivals: int64 [tiles, CONSUMERS]."""

    out: gl.tensor
    partials: gl.tensor
    arrivals: gl.tensor
    rows: gl.tensor
    outputs: gl.tensor


@gluon.jit
def _begin_of(run, cta):
    return cta * run.each + gl.minimum(cta, run.more)


@gluon.jit
def _cta_of(run, step):
    """Whose step it is."""
    longer = run.more * (run.each + 1)
    behind = run.more + (step - longer) // gl.maximum(run.each, 1)
    return gl.where(step < longer, step // (run.each + 1), behind)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _producer(shared, words, rows, run):
    """Fill the ring with codes, wait for the rows, then load both as stages become empty."""
    STAGES: gl.constexpr = shared.words.shape[0]
    BLOCK_N: gl.constexpr = shared.words.shape[1]
    BYTES: gl.constexpr = BLOCK_N * BLOCK_K + shared.rows.shape[1] * BLOCK_K * 2
    early = gl.minimum(run.end, run.begin + STAGES)
    for step in range(run.begin, early):
        stage = step - run.begin
        full = shared.full.index(stage)
        mbarrier.expect(full, BYTES)
        tile = step // run.steps
        tma_load(words, [tile * BLOCK_N, (step - tile * run.steps) * WORDS_K], full, shared.words.index(stage))
    wait()
    for step in range(run.begin, early):
        stage = step - run.begin
        tma_load(rows, [0, step % run.steps * BLOCK_K], shared.full.index(stage), shared.rows.index(stage))
    stage, phase = 0, 0
    for step in range(early, run.end):
        mbarrier.wait(shared.empty.index(stage), phase)
        full = shared.full.index(stage)
        mbarrier.expect(full, BYTES)
        tile = step // run.steps
        k = step - tile * run.steps
        tma_load(words, [tile * BLOCK_N, k * WORDS_K], full, shared.words.index(stage))
        tma_load(rows, [0, k * BLOCK_K], full, shared.rows.index(stage))
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _outputs():
    """[OUTPUTS]: which output a row of a product is (WORDS)."""
    m = gl.arange(0, OUTPUTS, layout=OUTPUT)
    return (m & (OUTPUTS - 8)) | ((m & 1) << 2) | ((m >> 1) & 3)


@gluon.jit
def _operand(words):
    """bf16 [OUTPUTS, BLOCK_K] of words, outputs in the order of _outputs."""
    first, second = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = gl.reshape(gl.join(first, second), [OUTPUTS, BLOCK_K // 2])
    twice = gl.reshape(gl.join(pairs, pairs), [OUTPUTS // 8, 2, 4, BLOCK_K])  # a word for each value: no instruction
    twice = gl.reshape(gl.permute(twice, (0, 2, 1, 3)), [OUTPUTS, BLOCK_K])
    twice = gl.convert_layout(twice, CODES, assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _nan_flags(words):
    """int32 [OUTPUTS, 4]: bit 7 of a byte where a lane has a NaN of an output."""
    each = (words & 0x7F7F7F7F) + 0x01010101
    each = gl.permute(gl.reshape(each, [OUTPUTS, 2, 4, 2, 2]), (0, 2, 1, 3, 4))  # a lane's words behind each other
    one, other = gl.split(each)
    one, other = gl.split(one | other)
    one, other = gl.split(one | other)
    return gl.convert_layout(one | other, FLAGS, assert_trivial=True)


@gluon.jit
def _add_partials(partials, run, output, tile, first, last, at, mask, stride: gl.constexpr):
    """The sum of what CTAs first to last left of a tile. at: offsets of a CTA's own."""
    sums = gl.zeros(at.shape, gl.float32, RESULT)
    begin = tile * run.steps
    for cta in range(first, last + 1, TOGETHER):
        got = ()
        for n in gl.static_range(TOGETHER):
            second = (_begin_of(run, cta + n) < begin).to(gl.int64)  # it began in a tile before
            slot = ((cta + n).to(gl.int64) * 2 + gl.where(cta + n == first, second, 0)) * output.rows * stride
            there = mask & (cta + n <= last)
            got = got + (gl.load(partials + slot + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for n in gl.static_range(TOGETHER):
            sums += got[n]
    return sums


@gluon.jit
def _consumer(
    shared, scales, output, run, first_row, stride_scales, which: gl.constexpr, E8M0: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Multiply OUTPUTS outputs of every tile of the run."""
    STAGES: gl.constexpr = shared.words.shape[0]
    BLOCK_N: gl.constexpr = shared.words.shape[1]
    CONSUMERS: gl.constexpr = BLOCK_N // OUTPUTS
    BLOCK_M: gl.constexpr = shared.rows.shape[1]
    wait()
    launch_dependents()
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, RESULT))
    own = which * OUTPUTS + _outputs()
    stage, phase = 0, 0
    for tile in range(run.begin // run.steps, (run.end + run.steps - 1) // run.steps):
        begin = gl.maximum(run.begin - tile * run.steps, 0)
        end = gl.minimum(run.end - tile * run.steps, run.steps)
        out_column = tile * BLOCK_N + own
        scale_row = (gl.minimum(out_column, output.outputs - 1) + first_row) // BLOCK_ROWS
        scale_rows = scales + scale_row.to(gl.int64) * stride_scales
        ahead = gl.load(scale_rows + begin * BLOCK_K // BLOCK_COLUMNS)
        sums = gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT)
        flags = gl.zeros([OUTPUTS, 4], gl.int32, FLAGS)
        for step in range(begin, end):
            scale = decode_scale(ahead, E8M0)
            ahead = gl.load(scale_rows + gl.minimum(step + 1, end - 1) * BLOCK_K // BLOCK_COLUMNS)
            mbarrier.wait(shared.full.index(stage), phase)
            words = shared.words.index(stage).slice(which * OUTPUTS, OUTPUTS, dim=0).load(WORDS)
            rows = shared.rows.index(stage).permute((1, 0)).load(ROWS)
            signal(shared.empty.index(stage))
            stage, phase = _next(stage, phase, STAGES)
            flags |= _nan_flags(words)
            product = mma_v2(_operand(words), rows, gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT))
            sums += product * gl.expand_dims(scale, 1)
        with_nan = gl.max(gl.where((flags & NAN_FLAGS) != 0, 1, 0), 1) > 0
        with_nan = gl.reshape(gl.permute(gl.reshape(with_nan, [OUTPUTS // 8, 2, 4]), (0, 2, 1)), [OUTPUTS])
        with_nan = gl.convert_layout(with_nan, OUTPUT)
        sums = gl.where(gl.expand_dims(with_nan, 1), float("nan"), sums)
        there = gl.expand_dims(row < output.rows, 0) & gl.expand_dims(out_column < output.outputs, 1)
        whole = end - begin == run.steps
        if not whole:
            at = gl.expand_dims(row.to(gl.int64) * BLOCK_N, 0) + gl.expand_dims(own, 1)
            second = (run.begin < tile * run.steps).to(gl.int64)
            slot = (gl.program_id(0).to(gl.int64) * 2 + second) * output.rows * BLOCK_N
            gl.store(output.partials + slot + at, sums, mask=there)
            barrier()  # all of the warpgroup's partials are there before it says so
            first, last = _cta_of(run, tile * run.steps), _cta_of(run, tile * run.steps + run.steps - 1)
            arrival = output.arrivals + tile * CONSUMERS + which
            if gl.atomic_add(arrival, 1, sem="acq_rel") == last - first:
                gl.store(arrival, 0)
                sums = _add_partials(output.partials, run, output, tile, first, last, at, there, BLOCK_N)
                whole = True
        if whole:
            to = gl.expand_dims(row.to(gl.int64) * output.outputs, 0) + gl.expand_dims(out_column, 1)
            gl.store(output.out + to, cast.cast(sums, gl.bfloat16), mask=there)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "first_row", "stride_scales"])
def stream_k(
    x,  # bf16 [rows, columns], boxes of BLOCK_M x BLOCK_K
    words,  # int32 [outputs, columns / 4] of four codes, boxes of BLOCK_N x BLOCK_K / 4
    scales,  # fp32 or uint8 [blocks of rows, blocks of columns], contiguous in a row
    out,  # bf16 [rows, outputs], contiguous
    partials,  # fp32 [CTAs, 2, rows, BLOCK_N]
    arrivals,  # int64 [tiles of outputs, CONSUMERS], zero before and after
    rows,
    outputs,
    steps,  # of BLOCK_K columns
    first_row,  # rows of the first scale block that lie before the weight
    stride_scales,
    E8M0: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,  # of a scale block
    BLOCK_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    CONSUMERS: gl.constexpr = words.block_shape[0] // OUTPUTS
    shared = Shared(
        words=gl.allocate_shared_memory(words.dtype, [STAGES] + words.block_shape, words.layout),
        rows=gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=CONSUMERS)
    fence_async_shared()
    barrier()
    cta, ctas = gl.program_id(0), gl.num_programs(0)
    all_steps = (outputs + OUTPUTS * CONSUMERS - 1) // (OUTPUTS * CONSUMERS) * steps
    each = all_steps // ctas
    more = all_steps - each * ctas
    begin = cta * each + gl.minimum(cta, more)
    run = Run(begin, begin + each + (cta < more).to(gl.int32), each, more, steps)
    output = Output(out, partials, arrivals, rows, outputs)
    gl.warp_specialize(
        [
            (_consumer, (shared, scales, output, run, first_row, stride_scales, 0, E8M0, BLOCK_ROWS, BLOCK_COLUMNS)),
            (_consumer, (shared, scales, output, run, first_row, stride_scales, 1, E8M0, BLOCK_ROWS, BLOCK_COLUMNS)),
            (_producer, (shared, words, x, run)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
