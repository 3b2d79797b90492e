"""The two consumers of seesaw over the pairs of one row, whose queries they fetch. Producers say which keys
exist."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparse_attn.device.hopper import async_load, signal
from sparse_attn.ops.attention.hopper.lazy_rescale import initial_max
from sparse_attn.ops.attention.hopper.seesaw import (
    FREED,
    HALF,
    HEADS,
    NARROW,
    QUERY,
    REST,
    TILE,
    VALUE,
    finish,
    left_pair,
    name_keys,
    release,
    right_pair,
    score_even,
)


@gluon.jit
def ask_queries(query, rest, source, stride_head, half: gl.constexpr, HAS_REST: gl.constexpr):
    """Have this warpgroup's half of the queries copied."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE)) + half * HALF
    part = query.index(0).slice(half * HALF, HALF, dim=1)
    async_load(part, source + gl.expand_dims(head * stride_head, 1) + gl.expand_dims(column, 0))
    if HAS_REST and half == 0:
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        head_r = gl.arange(0, HEADS, layout=gl.SliceLayout(1, NARROW))
        column_r = gl.arange(0, REST, layout=gl.SliceLayout(0, NARROW)) + VALUE
        async_load(rest.index(0), source + gl.expand_dims(head_r * stride_head, 1) + gl.expand_dims(column_r, 0))
    async_copy.commit_group()


@gluon.jit
def _await_queries(bars):
    """This warpgroup's half, then the other one's."""
    async_copy.wait_group(0)
    fence_async_shared()
    signal(bars[QUERY])
    mbarrier.wait(bars[QUERY], 0)


@gluon.jit
def left(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, pairs, scale_log2, out,
    lse, scales, sink, stride_out_head, split, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """The left-hand consumer of one row, whose queries are under way."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    _await_queries(bars)
    acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
    m = gl.full([HEADS], initial_max(scale_log2), gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    nothing = gl.zeros([HEADS, TILE], gl.float32, SCORES)
    phase = 0
    pending = score_even(query, query_rest, keys, keys_rest, bars, 0, phase, nothing, 0, HAS_REST)
    pending = score_even(query, query_rest, keys, keys_rest, bars, 0, phase, pending, 1, HAS_REST)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    for i in range(pairs):
        zero = i >> 20
        slot = name_keys(named, 0, 0, 0, place, False)
        product, m, l = left_pair(
            scores, slot, acc, m, l, keys, right_p, left_p, maxima, sums, bars, 0, scale_log2, zero, phase, False, HAS_REST, False,
        )  # fmt: skip
        phase = phase ^ 1
        if i + 1 < pairs:
            pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, nothing, 0, HAS_REST)
            acc = warpgroup_mma_wait(1 + HAS_REST, deps=(product,))
            release(bars[FREED + 2], False)
            pending = score_even(query, query_rest, keys, keys_rest, bars, zero, phase, pending, 1, HAS_REST)
            scores = warpgroup_mma_wait(0, deps=(pending,))
        else:
            acc = warpgroup_mma_wait(0, deps=(product,))
            scores = nothing
    l = l + sums.index(1).load(ROW)
    finish(acc, l, m, scale_log2, 0, out, lse, scales, sink, stride_out_head, HAS_SINK, split, ACC)


@gluon.jit
def right(
    query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, pairs, scale_log2, out,
    lse, scales, sink, stride_out_head, split, HAS_REST: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """The right-hand consumer of one row, whose queries are under way."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    _await_queries(bars)
    acc = gl.zeros([HEADS, HALF], gl.float32, ACC)
    m = gl.full([HEADS], initial_max(scale_log2), gl.float32, ROW)
    l = gl.zeros([HEADS], gl.float32, ROW)
    phase = 0
    for i in range(pairs):
        acc, m, l = right_pair(
            named, 0, 0, place, acc, m, l, query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, 0,
            scale_log2, i >> 20, phase, False, HAS_REST, False,
        )  # fmt: skip
        phase = phase ^ 1
    l = l + sums.index(0).load(ROW)
    finish(acc, l, m, scale_log2, 1, out, lse, scales, sink, stride_out_head, HAS_SINK, split, ACC)
