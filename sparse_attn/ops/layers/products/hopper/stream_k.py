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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import launch_dependents, next_stage, signal, wait
from sparse_attn.device.packed_dot import NAN_FLAGS, decode_scale
from sparse_attn.ops.layers.products.hopper.stream import (
    BLOCK_K,
    OUTPUTS,
    Output,
    Scales,
    finish,
    prepare,
    producer,
)

RESULT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
CODES = gl.constexpr(gl.DotOperandLayout(0, RESULT.value, 16))
ROWS = gl.constexpr(gl.DotOperandLayout(1, RESULT.value, 16))
OUTPUT = gl.constexpr(gl.SliceLayout(1, RESULT.value))
IN_ORDER = gl.constexpr((3, 1, 2))  # of _outputs, as finish takes it
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
    # Of all codes only those of NaN, 0x7F and 0xFF, carry into bit 7.
    each = (words & 0x7F7F7F7F) + 0x01010101
    each = gl.permute(gl.reshape(each, [OUTPUTS, 2, 4, 2, 2]), (0, 2, 1, 3, 4))  # a lane's words behind each other
    one, other = gl.split(each)
    one, other = gl.split(one | other)
    one, other = gl.split(one | other)
    return gl.convert_layout(one | other, FLAGS, assert_trivial=True)


@gluon.jit
def _consumer(shared, scales, output, run, which: gl.constexpr):
    """Multiply OUTPUTS outputs of every tile of the run."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    BLOCK_N: gl.constexpr = shared.codes.shape[1]
    BLOCK_M: gl.constexpr = shared.rows.shape[1]
    # PDL: rows and scales may be the launch before's.
    wait()
    launch_dependents()
    own = which * OUTPUTS + _outputs()
    stage, phase = 0, 0
    # The run's tiles, of which the first and the last may be shared.
    for tile in range(run.begin // run.steps, (run.end + run.steps - 1) // run.steps):
        begin = gl.maximum(run.begin - tile * run.steps, 0)
        end = gl.minimum(run.end - tile * run.steps, run.steps)
        # Each output's row of scales; outputs behind the last read that one's.
        out_column = tile * BLOCK_N + own
        scale_row = (gl.minimum(out_column, output.outputs - 1) + scales.first_row) // scales.BLOCK_ROWS
        scale_rows = scales.values + scale_row.to(gl.int64) * scales.stride
        ahead = gl.load(scale_rows + begin * BLOCK_K // scales.BLOCK_COLUMNS)
        sums = gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT)
        flags = gl.zeros([OUTPUTS, 4], gl.int32, FLAGS)
        for step in range(begin, end):
            # The next step's scale is on its way.
            scale = decode_scale(ahead, scales.E8M0)
            ahead = gl.load(scale_rows + gl.minimum(step + 1, end - 1) * BLOCK_K // scales.BLOCK_COLUMNS)
            mbarrier.wait(shared.full.index(stage), phase)
            # Codes and rows are in registers: the stage is free.
            words = shared.codes.index(stage).slice(which * OUTPUTS, OUTPUTS, dim=0).load(WORDS)
            rows = shared.rows.index(stage).permute((1, 0)).load(ROWS)
            signal(shared.empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            # DECODE makes 480 of NaN: remember which outputs have one.
            flags |= _nan_flags(words)
            product = mma_v2(_operand(words), rows, gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT))
            sums += product * gl.expand_dims(scale, 1)
        # Four lanes have seen an output's codes: any NaN makes it NaN.
        with_nan = gl.max(gl.where((flags & NAN_FLAGS) != 0, 1, 0), 1) > 0
        with_nan = gl.reshape(gl.permute(gl.reshape(with_nan, [OUTPUTS // 8, 2, 4]), (0, 2, 1)), [OUTPUTS])
        with_nan = gl.convert_layout(with_nan, OUTPUT)
        sums = gl.where(gl.expand_dims(with_nan, 1), float("nan"), sums)
        finish(sums, run, output, tile, which, BLOCK_N, IN_ORDER)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "first_row", "stride_scales"])
def stream_k(
    x,  # bf16 [rows, columns], boxes of BLOCK_M x BLOCK_K
    words,  # int32 [outputs, columns / 4] of four codes, boxes of BLOCK_N x BLOCK_K / 4
    scales,  # fp32 or uint8 [blocks of rows, blocks of columns], contiguous in a row
    out,  # bf16 [rows, outputs], contiguous
    partials,  # fp32 [CTAs, 2, BLOCK_M * BLOCK_N]
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
    TOGETHER: gl.constexpr,  # CTAs whose partials are read at once
):
    shared, run = prepare(words, x, outputs, steps, STAGES)
    scales = Scales(scales, first_row, stride_scales, E8M0, BLOCK_ROWS, BLOCK_COLUMNS)
    output = Output(out, partials, arrivals, rows, outputs, TOGETHER)
    gl.warp_specialize(
        [
            (_consumer, (shared, scales, output, run, 0)),
            (_consumer, (shared, scales, output, run, 1)),
            (producer, (shared, words, x, run)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
