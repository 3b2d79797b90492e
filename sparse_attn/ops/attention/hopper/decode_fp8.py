"""Sparse decode over paged fp8 keys on Hopper, of one cache or two: the consumers of seesaw_row behind two producers.

The producers are dequant', a tile of every pair each. The tiles of a row are those of its first cache, then
those of the second. Warps specialise while the launch before still runs: each then waits for it and finds its program's
tiles by itself, the consumers while their queries are under way.

Floor, bytes: a record per named key and block of heads. What bounds it: of the four halves of a pair three are freed
within 1300 cycles, and two producers hold two halves in registers: the third comes a put and a load's latency later,
and right's scores with it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.device.hopper import barrier, launch_dependents, wait
from sparse_attn.ops.attention.hopper.dequant import dequantise, own_tiles
from sparse_attn.ops.attention.hopper.seesaw import FILLED, FREED, HEADS, QUERY, REST, TILE, VALUE, allocate_barriers
from sparse_attn.ops.attention.hopper.seesaw_row import ask_queries, left, right


@gluon.jit
def _consume(
    row, consumer, early, half: gl.constexpr, HAS_REST: gl.constexpr, TWO: gl.constexpr, HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The consumer of one half of the value's columns."""
    (
        query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, q, scale_log2, out, lse, scales, sink,
        stride_q_token, stride_q_head, stride_out_split, stride_out_token, stride_out_head, stride_lse_split, stride_lse_token,
    ) = consumer  # fmt: skip
    head_blocks = row[4]
    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * HEADS
    wait()
    if half == 0:
        if early != 0:
            launch_dependents()
    ask_queries(
        query, query_rest, q + token * stride_q_token + first_head * stride_q_head, stride_q_head, half, HAS_REST
    )
    _, _, _, _, _, start, end = own_tiles(row, TWO, SPLIT)
    if SPLIT is None:
        split = gl.num_programs(1) > 1
    else:
        split: gl.constexpr = SPLIT
    pairs = gl.maximum((end - start + 1) // 2, 1)
    which = gl.program_id(1).to(gl.int64)
    target = out + which * stride_out_split + token * stride_out_token + first_head * stride_out_head
    place = which * stride_lse_split + token * stride_lse_token + first_head
    if half == 0:
        left(
            query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, pairs, scale_log2, target,
            lse + place, scales + 2 * place, sink + first_head, stride_out_head, split, HAS_REST, HAS_SINK,
        )  # fmt: skip
    else:
        right(
            query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, pairs, scale_log2, target,
            lse + place, scales + 2 * place, sink + first_head, stride_out_head, split, HAS_REST, HAS_SINK,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "num_slots", "block_size", "capacity", "extra_num_slots", "extra_block_size", "extra_capacity",
        "stride_cache_block", "stride_extra_block", "head_blocks", "early",
    ],
    do_not_specialize_on_alignment=["indptr", "extra_indptr"],  # of some rows of a step
)  # fmt: skip
def attend(
    q,  # bf16 [tokens, heads, VALUE], interleaved: VALUE + REST; heads a multiple of 64
    cache,  # uint8 [num_blocks, block_size, row]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    extra_cache,  # the second cache, of the same layout, and its indices; anything without TWO
    extra_indices,
    extra_indptr,
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, VALUE]; fp16 [splits, tokens, heads, VALUE] where rows are split, by a bf16 pointer
    lse,  # fp32 [tokens, heads], natural log; [splits, tokens, heads], base 2
    scales,  # fp32 [splits, tokens, heads, 2], of both halves of the columns; anything where no rows are split
    num_slots,
    block_size,
    capacity,
    extra_num_slots,
    extra_block_size,
    extra_capacity,
    head_blocks,
    early,  # whether the next launch may start while this one runs
    scale_log2,  # above 0: the largest product gives the largest score
    stride_q_token,
    stride_q_head,
    stride_cache_block,  # in UNITs
    stride_extra_block,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    LATENT: gl.constexpr,  # codes of a record
    GROUP: gl.constexpr,
    TOKEN: gl.constexpr,  # bytes from record to record
    SCALES: gl.constexpr,  # planar: bytes of a token's scales, behind a block's records; else 0
    REST_AT: gl.constexpr,  # byte of a record where its bf16 values start
    PAGED: gl.constexpr,  # slots do not follow each other through the whole cache
    TWO: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,  # whether programs share a row; None: told by the grid, for a step in two parts
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLANAR: gl.constexpr = SCALES > 0
    HAS_REST: gl.constexpr = not PLANAR
    query = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, VALUE], TILES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, VALUE], TILES)
    right_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
    maxima = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    named = gl.allocate_shared_memory(gl.int32, [2, TILE], FLAT)
    bars = allocate_barriers()
    if HAS_REST:
        query_rest = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, REST], TILES)
        keys_rest = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, REST], TILES)
        left_p = keys_rest  # the odd tile's rest is free once it was scored
    else:
        left_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
        query_rest = query
        keys_rest = keys
    for which in gl.static_range(FILLED, FREED):  # with bf16 values: every thread of a producer, too
        mbarrier.init(bars[which], count=129 if (which % 2 == 1) == PLANAR else 1)
    for which in gl.static_range(FREED, QUERY):
        mbarrier.init(bars[which], count=1)
    mbarrier.init(bars[QUERY], count=2)
    fence_async_shared()
    barrier()
    row = (indptr, extra_indptr, capacity, extra_capacity, head_blocks)
    consumer = (
        query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, named, bars, q, scale_log2, out, lse, scales, sink,
        stride_q_token, stride_q_head, stride_out_split, stride_out_token, stride_out_head, stride_lse_split, stride_lse_token,
    )  # fmt: skip
    producer = (
        keys, keys_rest, named, bars, cache, indices, num_slots, block_size, stride_cache_block, extra_cache, extra_indices,
        extra_num_slots, extra_block_size, stride_extra_block,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (row, consumer, early, 0, HAS_REST, TWO, HAS_SINK, SPLIT)),
            (_consume, (row, consumer, early, 1, HAS_REST, TWO, HAS_SINK, SPLIT)),
            (dequantise, (row, producer, 0, LATENT, GROUP, TOKEN, SCALES, REST_AT, PLANAR, PAGED, TWO, SPLIT)),
            (dequantise, (row, producer, 1, LATENT, GROUP, TOKEN, SCALES, REST_AT, PLANAR, PAGED, TWO, SPLIT)),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
