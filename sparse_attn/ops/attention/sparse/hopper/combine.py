"""The LSE combine on Hopper: split-KV partials of a row into its output and lse.

SCALED partials, of decode_fp8, are fp16: 11 bits where the output has 8, times a scale for each half of a row. Their
columns stand in the order in which the threads of an accumulator hold them (seesaw.PARTIAL_LAYOUT), so that no thread
exchanges columns: of every 32, the pairs are transposed, 4 x 4. Other partials are fp32, in order.

Floor, bytes: splits * 1024 (SCALED) or 2048 in, and 1024 out, for a row and head. Schedule: loads of BLOCK_S splits are
under way together, by LANES lanes that take some of them each. The code is short, since a step finds it in no
instruction cache. Sums cross the lanes of a warp alone: shared memory, which the kernels before and after this one
divide otherwise, costs a step 4 to 9 us. README.md has the details.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device.hopper import launch_dependents, wait
from sparse_attn.ops.attention.sparse.hopper.common import D_V, normalise


@gluon.jit
def _by_half(each, ACC: gl.constexpr):
    """A number of each half, beside its columns."""
    return gl.expand_dims(gl.convert_layout(each, gl.SliceLayout(1, ACC)), 1)


@gluon.jit(
    do_not_specialize=["tokens", "splits", "tail_splits"],
    do_not_specialize_on_alignment=["sink", "lse", "max_logits"],  # of some rows of a step
)
def combine(
    out_partial,  # fp16 or fp32 [splits, tokens, heads, D_V]
    lse_partial,  # fp32 [splits, tokens, heads], base 2
    scale_partial,  # fp32 [splits, tokens, heads, 2]; anything without SCALED
    max_partial,  # as lse_partial: max_logits; None where there are none
    tail_out,  # HAS_TAIL: partials of the tail wave, whose rows come behind these and have more splits; else anything
    tail_lse,
    tail_scale,
    tail_max,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [all tokens, heads, D_V], contiguous
    lse,  # fp32 [all tokens, heads], natural log, contiguous
    max_logits,  # as lse, or None: the largest of max_partial
    tokens,
    splits,
    tail_splits,
    BLOCK_S: gl.constexpr,  # splits at a time
    BLOCK_M: gl.constexpr,  # heads of a CTA
    LANES: gl.constexpr,  # that share a block of splits
    SCALED: gl.constexpr,
    HAS_TAIL: gl.constexpr,
    HAS_SINK: gl.constexpr,
    INF_LSE: gl.constexpr,  # as normalise takes it
):
    # A thread loads 16 bytes of a split at once. LANES lanes of a warp share splits; warps share halves and columns.
    LOAD: gl.constexpr = 8 if SCALED else 4  # values of 16 bytes
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, LOAD], [LANES, 1, 32 // LANES], [1, 2, LANES], [2, 1, 0])
    EACH: gl.constexpr = gl.SliceLayout(2, WIDE)  # of a split and a half
    ACC: gl.constexpr = gl.SliceLayout(0, WIDE)
    # Rows of this layout are halves of heads: each has a scale of its own.
    split = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(1, EACH))
    half = gl.arange(0, 2 * BLOCK_M, layout=gl.SliceLayout(0, EACH))  # of the CTA's heads, one after the other
    column = gl.arange(0, D_V // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    inside = gl.expand_dims(gl.expand_dims(half * (D_V // 2), 0), 2) + gl.expand_dims(gl.expand_dims(column, 0), 1)
    heads = gl.num_programs(0) * BLOCK_M
    head = gl.program_id(0) * BLOCK_M
    row = gl.program_id(1).to(gl.int64)
    all_tokens = gl.num_programs(1)
    if HAS_TAIL:  # the few that have more splits first, while others combine theirs
        row = all_tokens - 1 - row
    # Partials are attention's; the next launch may begin at once, since it waits for this one.
    wait()
    launch_dependents()
    out_row = row * heads + head
    # Tail rows read other partials: choose by pointer, so that there is one loop.
    if HAS_TAIL:
        first = row < tokens
        out_partial = gl.where(first, out_partial, tail_out)
        lse_partial = gl.where(first, lse_partial, tail_lse)
        scale_partial = gl.where(first, scale_partial, tail_scale)
        if max_logits is not None:
            max_partial = gl.where(first, max_partial, tail_max)
        splits = gl.where(first, splits, tail_splits)
        row = gl.where(first, row, row - tokens)
        tokens = gl.where(first, tokens, all_tokens - tokens)
    stride_split = (tokens * heads).to(gl.int64)  # in rows of a head
    partial_row = row * heads + head
    # m and l by half of a head, though both halves have the same.
    m = gl.full([2 * BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    l = gl.zeros([2 * BLOCK_M], gl.float32, gl.SliceLayout(0, EACH))
    acc = gl.zeros([2 * BLOCK_M, D_V // 2], gl.float32, ACC)
    if max_logits is not None:
        largest = gl.full([2 * BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    for begin in range(0, splits, BLOCK_S):
        # All loads of BLOCK_S splits are issued before one is used. Splits beyond the last weigh nothing.
        valid = gl.expand_dims(begin + split < splits, 1)
        place = gl.expand_dims(partial_row + (begin + split) * stride_split, 1)
        pointers = out_partial + gl.expand_dims(place * D_V, 2) + inside
        values = gl.load(pointers, mask=gl.expand_dims(valid, 2), other=0.0)
        split_lse = gl.load(lse_partial + place + gl.expand_dims(half // 2, 0), mask=valid, other=float("-inf"))
        if SCALED:
            scale = gl.load(scale_partial + 2 * place + gl.expand_dims(half, 0), mask=valid, other=0.0)
        if max_logits is not None:
            split_max = gl.load(max_partial + place + gl.expand_dims(half // 2, 0), mask=valid, other=float("-inf"))
            largest = gl.maximum(largest, gl.max(split_max, 0))
        # Online softmax over splits, in base 2.
        m_new = gl.maximum(m, gl.max(split_lse, 0))
        # Where all splits are empty: -inf - -inf would be NaN.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = gl.exp2(m - base)
        m = m_new
        weight = gl.exp2(split_lse - gl.expand_dims(base, 0))
        l = l * rescale + gl.sum(weight, 0)
        # A partial is its fp16 values times its scale; the weight takes the scale in.
        if SCALED:
            weight = weight * scale
        acc = acc * _by_half(rescale, ACC) + gl.sum(values.to(gl.float32) * gl.expand_dims(weight, 2), 0)
    # Divide once, by all splits' denominator and the sink.
    head_sink = gl.load(sink + head + half // 2) if HAS_SINK else 0.0
    factor, lse_row = normalise(m, l, head_sink, HAS_SINK, False, INF_LSE)
    # Two halves have one lse: the first stores it.
    gl.store(lse + out_row + half // 2, lse_row, mask=half % 2 == 0)
    if max_logits is not None:
        gl.store(max_logits + out_row + half // 2, largest, mask=half % 2 == 0)
    result = (acc * _by_half(factor, ACC)).to(gl.bfloat16)
    # Undo the accumulator's order: of every 32 columns, the pairs are transposed back.
    if SCALED:
        result = gl.permute(gl.reshape(result, [BLOCK_M * D_V // 32, 4, 4, 2]), (0, 2, 1, 3))
    result = gl.reshape(result, [BLOCK_M * D_V])
    gl.store(out + out_row * D_V + gl.arange(0, BLOCK_M * D_V, layout=result.type.layout), result)
