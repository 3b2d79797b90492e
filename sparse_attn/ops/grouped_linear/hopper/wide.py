"""stream_k of more rows, which the matrix unit takes from shared memory (wgmma). README.md has what differs.

Rows are placed by a launch before, so that a product's operand of codes keeps its lanes (device/packed_dot.py): of 32
columns a lane has the eight codes of two neighbouring words.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparse_attn.device.hopper import launch_dependents, signal, wait
from sparse_attn.device.packed_dot import FAST_E4M3, NAN_FLAGS, decode_scale
from sparse_attn.ops.grouped_linear.hopper.stream import (
    BLOCK_K,
    OUTPUTS,
    Output,
    Scales,
    finish,
    next_stage,
    prepare,
    producer,
)

IN_ORDER = gl.constexpr((2, 3, 1))  # of _outputs, as finish takes it
BF16X4 = gl.constexpr((gl.bfloat16,) * 4)
# Words of four codes [OUTPUTS, BLOCK_K / 4]. 16 lanes read 32 bytes of outputs 0, 2, 4 and 6, which lie in all banks.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16]], [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
)
FLAGS = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [2, 0], [4, 0], [1, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.constexpr_function
def result_layout(rows):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def _in_order(values):
    """[OUTPUTS, n] of outputs in the order of a product's rows, whose lanes have outputs 0, 2, 4, 6, 1, 3, 5 and 7 of
    eight."""
    n: gl.constexpr = values.shape[1]
    of_bits = gl.permute(gl.reshape(values, [OUTPUTS // 8, 2, 2, 2, n]), (0, 3, 1, 2, 4))
    return gl.reshape(of_bits, [OUTPUTS, n])


@gluon.jit
def _outputs(LAYOUT: gl.constexpr):
    """[OUTPUTS]: which output a row of a product is."""
    m = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    return (m & (OUTPUTS - 8)) | ((m & 1) << 1) | ((m & 2) << 1) | ((m >> 2) & 1)


@gluon.jit
def _operand(words, RESULT: gl.constexpr):
    """bf16 [OUTPUTS, BLOCK_K] of words, outputs and columns in the order of the product."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        FAST_E4M3, "=&r,=&r,=&r,=&r,r,r", [words], dtype=BF16X4, is_pure=True, pack=2
    )
    codes = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # [OUTPUTS, words, code / 2, code % 2]
    codes = gl.permute(gl.reshape(codes, [OUTPUTS, BLOCK_K // 32, 8, 4]), (0, 1, 3, 2))
    codes = _in_order(gl.reshape(codes, [OUTPUTS, BLOCK_K]))
    return gl.convert_layout(codes, gl.DotOperandLayout(0, RESULT, 2), assert_trivial=True)


@gluon.jit
def _nan_flags(words):
    """int32 [OUTPUTS, 4]: bit 7 of a byte where a lane has a NaN of an output."""
    each = (words & 0x7F7F7F7F) + 0x01010101
    each = gl.permute(gl.reshape(each, [OUTPUTS, 2, 2, 4, 2]), (0, 3, 1, 2, 4))  # a lane's words behind each other
    one, other = gl.split(each)
    one, other = gl.split(one | other)
    one, other = gl.split(one | other)
    return gl.convert_layout(one | other, FLAGS, assert_trivial=True)


@gluon.jit
def _consumer(shared, scales, output, run, which: gl.constexpr):
    """Multiply OUTPUTS outputs of every tile of the run."""
    STAGES: gl.constexpr = shared.words.shape[0]
    BLOCK_N: gl.constexpr = shared.words.shape[1]
    BLOCK_M: gl.constexpr = shared.rows.shape[1]
    RESULT: gl.constexpr = result_layout(BLOCK_M)
    wait()
    launch_dependents()
    own = which * OUTPUTS + _outputs(RESULT)
    stage, phase = 0, 0
    for tile in range(run.begin // run.steps, (run.end + run.steps - 1) // run.steps):
        begin = gl.maximum(run.begin - tile * run.steps, 0)
        end = gl.minimum(run.end - tile * run.steps, run.steps)
        out_column = tile * BLOCK_N + own
        scale_row = (gl.minimum(out_column, output.outputs - 1) + scales.first_row) // scales.BLOCK_ROWS
        scale_rows = scales.values + scale_row.to(gl.int64) * scales.stride
        ahead = gl.load(scale_rows + begin * BLOCK_K // scales.BLOCK_COLUMNS)
        sums = gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT)
        flags = gl.zeros([OUTPUTS, 4], gl.int32, FLAGS)
        for step in range(begin, end):
            scale = decode_scale(ahead, scales.E8M0)
            ahead = gl.load(scale_rows + gl.minimum(step + 1, end - 1) * BLOCK_K // scales.BLOCK_COLUMNS)
            mbarrier.wait(shared.full.index(stage), phase)
            words = shared.words.index(stage).slice(which * OUTPUTS, OUTPUTS, dim=0).load(WORDS)
            product = warpgroup_mma(
                _operand(words, RESULT), shared.rows.index(stage).permute((1, 0)),
                gl.zeros([OUTPUTS, BLOCK_M], gl.float32, RESULT), use_acc=False, is_async=True,
            )  # fmt: skip
            flags |= _nan_flags(words)
            product = warpgroup_mma_wait(0, deps=(product,))
            signal(shared.empty.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            sums += product * gl.expand_dims(scale, 1)
        with_nan = gl.max(gl.where((flags & NAN_FLAGS) != 0, 1, 0), 1)
        with_nan = gl.reshape(_in_order(gl.expand_dims(with_nan, 1)), [OUTPUTS])
        with_nan = gl.convert_layout(with_nan, gl.SliceLayout(1, RESULT))
        sums = gl.where(gl.expand_dims(with_nan, 1) > 0, float("nan"), sums)
        finish(sums, run, output, tile, which, BLOCK_N, IN_ORDER)


@gluon.jit(do_not_specialize=["rows", "outputs", "steps", "first_row", "stride_scales"])
def stream_k_wide(
    x,  # bf16 [rows, columns], placed, boxes of BLOCK_M x BLOCK_K
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
