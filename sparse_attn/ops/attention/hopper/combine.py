"""Merging the shares of split rows on Hopper.

SCALED ones, of ``seesaw.finish``, are fp16, which holds 11 bits where the output has 8, times a scale for each
half of a row. They stand in the order in which the threads of a matrix product hold them, so that nobody exchanges
columns: of 32, the pairs are transposed, 4 x 4. Others are fp32, in order.

Floor, bytes: states * 1024 (or 2048) in and 1024 out for a row and head. Of STATES of them all loads are under way
together, by threads that take some of them each: little code, which a step finds in no cache. Only the lanes of a warp
exchange sums: shared memory, which the kernels before and after this one divide otherwise, costs a step 4 to 9 us.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device.hopper import launch_dependents, wait
from sparse_attn.ops.attention.hopper.seesaw import HALF, VALUE, normalise


@gluon.jit
def _by_half(each, SUMS: gl.constexpr):
    """A number of each half, beside its columns."""
    return gl.expand_dims(gl.convert_layout(each, gl.SliceLayout(1, SUMS)), 1)


@gluon.jit(
    do_not_specialize=["tokens", "states", "more_states"],
    do_not_specialize_on_alignment=["sink", "lse"],  # of some rows of a step
)
def merge(
    outs,  # fp16 or fp32 [states, tokens, heads, VALUE]
    lses,  # fp32 [states, tokens, heads], base 2
    scales,  # fp32 [states, tokens, heads, 2]; anything without SCALED
    more_outs,  # with MORE those of the tokens behind these, of another number of states; else anything
    more_lses,
    more_scales,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [all tokens, heads, VALUE], contiguous
    lse,  # fp32 [all tokens, heads], natural log, contiguous
    tokens,
    states,
    more_states,
    STATES: gl.constexpr,  # at a time
    HEADS: gl.constexpr,  # of a program
    SHARERS: gl.constexpr,  # lanes that share them
    SCALED: gl.constexpr,
    MORE: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    LOAD: gl.constexpr = 8 if SCALED else 4  # values of 16 bytes
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, LOAD], [SHARERS, 1, 32 // SHARERS], [1, 2, SHARERS], [2, 1, 0])
    EACH: gl.constexpr = gl.SliceLayout(2, WIDE)  # of a state and a half
    SUMS: gl.constexpr = gl.SliceLayout(0, WIDE)
    state = gl.arange(0, STATES, layout=gl.SliceLayout(1, EACH))
    half = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(0, EACH))  # of the program's heads, one after the other
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    inside = gl.expand_dims(gl.expand_dims(half * HALF, 0), 2) + gl.expand_dims(gl.expand_dims(column, 0), 1)
    heads = gl.num_programs(0) * HEADS
    head = gl.program_id(0) * HEADS
    row = gl.program_id(1).to(gl.int64)
    all_tokens = gl.num_programs(1)
    if MORE:  # the few that have more states first, while others merge theirs
        row = all_tokens - 1 - row
    wait()
    launch_dependents()
    to = row * heads + head
    if MORE:
        first = row < tokens
        outs = gl.where(first, outs, more_outs)
        lses = gl.where(first, lses, more_lses)
        scales = gl.where(first, scales, more_scales)
        states = gl.where(first, states, more_states)
        row = gl.where(first, row, row - tokens)
        tokens = gl.where(first, tokens, all_tokens - tokens)
    step = (tokens * heads).to(gl.int64)  # from state to state, in rows of a head
    at = row * heads + head
    m = gl.full([2 * HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, EACH))
    l = gl.zeros([2 * HEADS], gl.float32, gl.SliceLayout(0, EACH))
    total = gl.zeros([2 * HEADS, HALF], gl.float32, SUMS)
    for begin in range(0, states, STATES):
        there = gl.expand_dims(begin + state < states, 1)
        place = gl.expand_dims(at + (begin + state) * step, 1)
        pointers = outs + gl.expand_dims(place * VALUE, 2) + inside
        values = gl.load(pointers, mask=gl.expand_dims(there, 2), other=0.0)
        share = gl.load(lses + place + gl.expand_dims(half // 2, 0), mask=there, other=float("-inf"))
        if SCALED:
            scale = gl.load(scales + 2 * place + gl.expand_dims(half, 0), mask=there, other=0.0)
        top = gl.maximum(m, gl.max(share, 0))
        base = gl.where(top == float("-inf"), 0.0, top)
        rescale = gl.exp2(m - base)
        m = top
        weight = gl.exp2(share - gl.expand_dims(base, 0))
        l = l * rescale + gl.sum(weight, 0)
        if SCALED:
            weight = weight * scale
        total = total * _by_half(rescale, SUMS) + gl.sum(values.to(gl.float32) * gl.expand_dims(weight, 2), 0)
    drain = gl.load(sink + head + half // 2) if HAS_SINK else 0.0
    factor, logarithm = normalise(m, l, drain, HAS_SINK, False)
    gl.store(lse + to + half // 2, logarithm, mask=half % 2 == 0)
    merged = (total * _by_half(factor, SUMS)).to(gl.bfloat16)
    if SCALED:
        merged = gl.permute(gl.reshape(merged, [HEADS * VALUE // 32, 4, 4, 2]), (0, 2, 1, 3))
    merged = gl.reshape(merged, [HEADS * VALUE])
    gl.store(out + to * VALUE + gl.arange(0, HEADS * VALUE, layout=merged.type.layout), merged)
