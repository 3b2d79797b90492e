"""What two consumer warpgroups on Hopper do with a pair of 64-key tiles.

``left_pair`` takes the even tile's scores and owns the first 256 output columns, ``right_pair`` scores the odd tile and
owns the last 256; each multiplies its own probabilities out of registers and the other's out of shared memory, and the
two agree per pair on what these are relative to. Producers bring the tiles half by half, in the order in which the
consumers free the halves. Between the two products of a pair ``left`` is one chain: scores, maximum, exponentials.
What of a key only scores comes with its left half; of an odd tile it makes room for ``left``'s probabilities.
PERSISTENT: the consumers attend row after row (prefill_bf16) and look up which keys exist; else one row (seesaw_row), and are
told.

Shared memory is indexed by an opaque zero made in the loop, because otherwise every matrix descriptor is hoisted out of
it and spilled. ``mbarrier.arrive`` is one thread and waits for nobody: a barrier of the warpgroup stands before each.
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

from sparse_attn.device.hopper import signal
from sparse_attn.ops.attention.hopper.common import normalise
from sparse_attn.ops.attention.hopper.lazy_rescale import (
    denominator,
    lagged_max,
    origin,
    rescale_acc,
    rescale_factor,
    rescale_p,
)

HEADS = gl.constexpr(64)  # of a program
TILE = gl.constexpr(64)  # keys
PAIR = gl.constexpr(128)
HALF = gl.constexpr(256)  # columns of half a value
NARROW = gl.constexpr(128)  # columns of a product beside two producers: four warpgroups have too few registers for HALF
VALUE = gl.constexpr(512)
REST = gl.constexpr(64)  # columns behind the value that only score

UNIT = gl.constexpr(16)  # bytes of a load, in which strides of fp8 caches are counted
WORD = gl.constexpr(4)  # bytes, or codes

# mbarriers. The four halves of a pair, 2 * tile + half: filled by the producer, freed by the consumer that read it
# last.
FILLED = gl.constexpr(0)
FREED = gl.constexpr(4)
LEFT_MAX = gl.constexpr(8)
RIGHT_MAX = gl.constexpr(9)
LEFT_P = gl.constexpr(10)
RIGHT_P = gl.constexpr(11)
QUERY = gl.constexpr(12)
QUERY_FREED = gl.constexpr(13)  # where a program attends more than one row
BARRIERS = gl.constexpr(14)

# [HEADS, HALF] in the threads that hold it as sums, 8 bytes of a row each: only the four threads of a row exchange
# columns.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)

# The same in the order in which a thread holds them, 16 bytes of a row each: nothing is exchanged.
SHARES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)


@gluon.jit
def allocate_barriers():
    """One by one: between uses of one piece of shared memory the compiler would put a barrier of the warpgroup."""
    bars = ()
    for _ in gl.static_range(BARRIERS):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    return bars


@gluon.jit
def release(bar, EACH: gl.constexpr):
    """This warpgroup has read what it was given: each thread says so for itself, which takes no barrier, or one for
    all. (Nothing is handed over that a thread wrote: that needs ``signal``.)"""
    if EACH:
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        signal(bar)


@gluon.jit
def await_keys(bars, which: gl.constexpr, phase):
    mbarrier.wait(bars[FILLED + which], phase)
    fence_async_shared()


@gluon.jit
def score_half(query, keys, scores, half: gl.constexpr, first: gl.constexpr):
    """scores (+)= queries times one half of a tile, not awaited."""
    a = query.slice(half * HALF, HALF, dim=1)
    b = keys.slice(half * HALF, HALF, dim=1).permute((1, 0))
    return warpgroup_mma(a, b, scores, use_acc=not first, is_async=True)


@gluon.jit
def name_keys(named, tile: gl.constexpr, first, left_over, place, PERSISTENT: gl.constexpr):
    """What a tile's keys are called: the indices ``named`` from ``first`` on, of which ``left_over`` are the row's;
    unless PERSISTENT what the producer says in shared memory of the tiles' keys, once they are there."""
    if PERSISTENT:
        return gl.load(named + (first + place), mask=place < left_over, other=-1)
    else:
        return named.index(tile).load(place.type.layout)


@gluon.jit
def masked(scores, slot, num_rows, PERSISTENT: gl.constexpr):
    """Scores of a tile, -inf where ``slot`` names no row."""
    if PERSISTENT:
        valid = (slot >= 0) & (slot < num_rows)
    else:
        valid = slot != 0
    return gl.where(gl.expand_dims(valid, 0), scores, -float("inf"))


@gluon.jit
def _powers(sums):
    """(2^-n, 2^n) for each row of ``sums``, such that 2^-n times the largest of them lies in [2^14, 2^15); of a row
    with an infinite one (1, 1). (A maximum leaves NaN out.)"""
    exponent = gl.max(gl.abs(sums), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 127 + 14, gl.maximum(exponent, 15))
    down = (127 + 14 + 127 - exponent) << 23
    up = (exponent - 14) << 23
    return down.to(gl.float32, bitcast=True), up.to(gl.float32, bitcast=True)


@gluon.jit
def _store(out, stride_head, values, half: gl.constexpr, LAYOUT: gl.constexpr):
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT)) + half * HALF
    pointers = out + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0)
    gl.store(pointers, gl.convert_layout(values, LAYOUT))


@gluon.jit
def finish(
    acc, l, m, scale_log2, half: gl.constexpr, out, lse, scales, sink, stride_head, HAS_SINK: gl.constexpr, split,
    ACC: gl.constexpr,
):  # fmt: skip
    """Divide by the denominator (a sink adds to it, not to lse) and store this warpgroup's half of the columns as bf16;
    or where rows are ``split`` as fp16, by which ``scales`` [HEADS, 2] are to be multiplied, with lse in base 2: to
    2^-11 of each value, an eighth of what rounding the output costs, or 2^-39 of the row's largest in this half."""
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    head = gl.arange(0, HEADS, layout=m.type.layout)
    drain = gl.load(sink + head) if HAS_SINK else 0.0
    top = m * scale_log2
    factor, logarithm = normalise(top, denominator(top, l), drain, HAS_SINK, split)
    if half == 0:
        gl.store(lse + head, logarithm)
    factor = gl.convert_layout(factor, ROW)
    if split:
        down, up = _powers(acc)
        gl.store(scales + 2 * gl.arange(0, HEADS, layout=ROW) + half, up * factor)
        values = (acc * gl.expand_dims(down, 1)).to(gl.float16).to(gl.bfloat16, bitcast=True)
        mixed = gl.permute(gl.reshape(values, [HEADS, HALF // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
        _store(out, stride_head, gl.reshape(mixed, [HEADS, HALF]), half, SHARES)
    else:
        _store(out, stride_head, (acc * gl.expand_dims(factor, 1)).to(gl.bfloat16), half, LINES)


@gluon.jit
def score_left(query, query_rest, keys, keys_rest, zero, nothing, HAS_REST: gl.constexpr):
    """An even tile's scores by its left half and its rest, not awaited."""
    pending = score_half(query.index(zero), keys.index(zero), nothing, 0, True)
    if HAS_REST:
        pending = warpgroup_mma(query_rest.index(zero), keys_rest.index(zero).permute((1, 0)), pending, is_async=True)
    return pending


@gluon.jit
def score_even(
    query, query_rest, keys, keys_rest, bars, zero, phase, nothing, half: gl.constexpr, HAS_REST: gl.constexpr
):
    """One half of an even tile's share of its scores, not awaited. nothing: what the left half starts from, whose
    result the right half starts from."""
    await_keys(bars, half, phase)
    if half == 0:
        return score_left(query, query_rest, keys, keys_rest, zero, nothing, HAS_REST)
    else:
        return score_half(query.index(zero), keys.index(zero), nothing, 1, False)


@gluon.jit
def left_pair(
    scores, slot, acc, m, l, keys, right_p, left_p, maxima, sums, bars, num_rows, scale_log2, zero, phase, last,
    HAS_REST: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """From an even tile's scores to (the product of the odd one, not awaited, m, l). PERSISTENT: after the
    ``last`` pair of a row the queries' memory is wanted for the next one's."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    z = masked(scores, slot, num_rows, PERSISTENT)
    top = lagged_max(m, gl.max(z, 1), scale_log2)
    scale, base = origin(top, scale_log2)
    rescale = rescale_factor(m, top, scale_log2)
    p = gl.exp2(z * gl.expand_dims(scale, 1) - gl.expand_dims(base, 1))
    l = l * rescale + gl.sum(p, 1)
    m = top
    maxima.store(top)
    signal(bars[LEFT_MAX])
    if PERSISTENT:
        if last:
            release(bars[QUERY_FREED], True)
    acc = rescale_acc(acc, rescale)
    own = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
    product = warpgroup_mma(own, keys.index(zero).slice(0, HALF, dim=1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(bars[FREED], PERSISTENT)
    mbarrier.wait(bars[RIGHT_MAX], phase)
    top = maxima.load(ROW)
    rescale = rescale_factor(m, top, scale_log2)
    l = l * rescale
    sums.index(0).store(l)
    if not PERSISTENT and not HAS_REST:  # elsewhere nothing is gained, or registers are spilled
        left_p.index(zero).store(rescale_p(own, rescale))
    else:
        left_p.index(zero + HAS_REST).store((p * gl.expand_dims(rescale, 1)).to(gl.bfloat16))
    fence_async_shared()
    signal(bars[LEFT_P])
    acc = rescale_acc(acc, rescale)
    mbarrier.wait(bars[RIGHT_P], phase)
    product = warpgroup_mma(right_p.index(zero), keys.index(zero + 1).slice(0, HALF, dim=1), acc, is_async=True)
    return product, top, l


@gluon.jit
def right_pair(
    named, first, left_over, place, acc, m, l, query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars,
    num_rows, scale_log2, zero, phase, last, HAS_REST: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """All of a pair: (acc, m, l). named, first, left_over: as in name_keys of the odd tile; PERSISTENT as in
    left_pair."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    nothing = gl.zeros([HEADS, TILE], gl.float32, SCORES)
    await_keys(bars, 3, phase)
    pending = score_half(query.index(zero), keys.index(zero + 1), nothing, 1, True)
    await_keys(bars, 2, phase)
    pending = score_half(query.index(zero), keys.index(zero + 1), pending, 0, False)
    if HAS_REST:
        pending = warpgroup_mma(
            query_rest.index(zero), keys_rest.index(zero + 1).permute((1, 0)), pending, is_async=True
        )
    slot = name_keys(named, 1, first, left_over, place, PERSISTENT)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    z = masked(scores, slot, num_rows, PERSISTENT)
    top = gl.max(z, 1)
    mbarrier.wait(bars[LEFT_MAX], phase)
    top = lagged_max(maxima.load(ROW), top, scale_log2)
    maxima.store(top)
    signal(bars[RIGHT_MAX])
    if PERSISTENT:
        if last:
            release(bars[QUERY_FREED], True)
    scale, base = origin(top, scale_log2)
    rescale = rescale_factor(m, top, scale_log2)
    p = gl.exp2(z * gl.expand_dims(scale, 1) - gl.expand_dims(base, 1))
    l = l * rescale + gl.sum(p, 1)
    acc = rescale_acc(acc, rescale)
    rounded = p.to(gl.bfloat16)
    own = gl.convert_layout(rounded, OPERAND)
    product = warpgroup_mma(own, keys.index(zero + 1).slice(HALF, HALF, dim=1), acc, is_async=True)
    sums.index(1).store(l)
    right_p.index(zero).store(rounded)
    fence_async_shared()
    signal(bars[RIGHT_P])
    mbarrier.wait(bars[LEFT_P], phase)
    product = warpgroup_mma(
        left_p.index(zero + HAS_REST), keys.index(zero).slice(HALF, HALF, dim=1), product, is_async=True
    )
    product = warpgroup_mma_wait(1, deps=(product,))
    release(bars[FREED + 3], PERSISTENT)
    acc = warpgroup_mma_wait(0, deps=(product,))
    release(bars[FREED + 1], PERSISTENT)
    return acc, top, l
