"""stream_k of more rows, which the matrix unit takes from shared memory (wgmma). README.md has what differs.

Codes come in pairs, so that a lane has of 16 columns the two pairs that an operand wants of it. Rows and outputs keep
their order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.device.hopper import launch_dependents, next_stage, signal, wait
from sparse_attn.device.packed_dot import decode_scale
from sparse_attn.ops.layers.products.hopper.stream import (
    BLOCK_K,
    OUTPUTS,
    Output,
    Scales,
    finish,
    prepare,
    producer,
)

IN_ORDER = gl.constexpr((1, 2, 3))  # as finish takes it
# Pairs of codes [OUTPUTS, BLOCK_K / 2], as the operand has them: 8 bytes of each of eight outputs at once, which lie in
# 16 banks.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )
)  # fmt: skip
FLAGS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
# $0: two values of a pair $2, whose bits become exponent and mantissa of bf16; 2^120 makes up for the bias. $1: FLAG in
# a half whose code is NaN.
DECODE = gl.constexpr(
    "{ .reg .b32 a, s, z; mov.b32 z, 0x80008000; mov.b32 s, 0x7B807B80;\n"
    "prmt.b32 a, $2, $2, 0x9180; shl.b32 a, a, 4; and.b32 a, a, 0x87f087f0;\n"
    "add.s32 $1, a, 0x00100010; fma.rn.bf16x2 $0, a, s, z; }"
)
FLAG = gl.constexpr(0x08000800)


@gluon.constexpr_function
def result_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def _operand(pairs, RESULT: gl.constexpr):
    """(bf16 [OUTPUTS, BLOCK_K], int32 [OUTPUTS, 4]: FLAG where a lane has a NaN of an output)."""
    values, flags = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,r", [pairs.to(gl.int32)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    twice = gl.reshape(gl.join(values, values), [OUTPUTS, BLOCK_K])  # a pair for each value: no instruction
    twice = gl.convert_layout(twice, gl.DotOperandLayout(0, RESULT, 2), assert_trivial=True)
    values = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2)
    flags = gl.permute(gl.reshape(flags, [OUTPUTS, 2, 2, 2, 2, 4]), (0, 5, 1, 2, 3, 4))  # a lane's behind each other
    for _ in gl.static_range(4):
        one, other = gl.split(flags)
        flags = one | other
    return values, gl.convert_layout(flags, FLAGS, assert_trivial=True)


@gluon.jit
def _consumer(shared, scales, output, run, which: gl.constexpr):
    """Multiply OUTPUTS outputs of every tile of the run."""
    STAGES: gl.constexpr = shared.codes.shape[0]
    BLOCK_N: gl.constexpr = shared.codes.shape[1]
    BLOCK_M: gl.constexpr = shared.rows.shape[1]
    RESULT: gl.constexpr = result_layout(BLOCK_M)
    # PDL: rows and scales may be the launch before's.
    wait()
    launch_dependents()
    own = which * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, RESULT))
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
            # The weight out of registers, rows out of shared memory.
            pairs = shared.codes.index(stage).slice(which * OUTPUTS, OUTPUTS, dim=0).load(PAIRS)
            values, nan = _operand(pairs, RESULT)
            product = warpgroup_mma(
                values, shared.rows.index(stage).permute((1, 0)), gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            flags |= nan
            # The matrix unit reads rows until it is done: only then is the stage free.
            product = warpgroup_mma_wait(0, deps=(product,))
            signal(shared.empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            sums += product * gl.expand_dims(scale, 1)
        # Four lanes have seen an output's codes: any NaN makes it NaN.
        with_nan = gl.max(gl.where((flags & FLAG) != 0, 1, 0), 1)
        with_nan = gl.convert_layout(with_nan, gl.SliceLayout(1, RESULT), assert_trivial=True)
        sums = gl.where(gl.expand_dims(with_nan, 1) > 0, float("nan"), sums)
        finish(sums, run, output, tile, which, BLOCK_N, IN_ORDER)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "first_row", "stride_scales"])
def stream_k_wide(
    x,  # bf16 [rows, columns], boxes of BLOCK_M x BLOCK_K
    codes,  # int16 [outputs, columns / 2] of two codes, boxes of BLOCK_N x BLOCK_K / 2
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
    shared, run = prepare(codes, x, outputs, steps, STAGES)
    scales = Scales(scales, first_row, stride_scales, E8M0, BLOCK_ROWS, BLOCK_COLUMNS)
    output = Output(out, partials, arrivals, rows, outputs, TOGETHER)
    gl.warp_specialize(
        [
            (_consumer, (shared, scales, output, run, 0)),
            (_consumer, (shared, scales, output, run, 1)),
            (producer, (shared, codes, x, run)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
