"""Sparse attention over paged fp8 latents on Hopper: the consumers of hopper.attend behind a producer that dequantises.

A record is LATENT codes, an fp32 scale per GROUP of them, and REST bf16 values. The producer holds half a tile's codes in
registers, one half ahead, multiplies them by their scale in fp32 and rounds once to bf16, which is what the reference
multiplies too; NaN codes stay NaN. The bf16 values are copied as they are. Rows that an index does not name are zeros.

Floor, bytes: a record per named key and block of heads. What bounds it: the latency of the producer's loads, for which rows
a pair ahead are fetched into the L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.ops.attention.hopper import (
    BARRIERS,
    FILLED,
    FREED,
    HALF,
    HEADS,
    PAIR,
    QUERY,
    REST,
    TILE,
    VALUE,
    barrier,
    gather,
    left,
    right,
    signal,
)

LINE = gl.constexpr(128)  # bytes fetched at once

# Four e4m3 codes and their fp32 scale -> four bf16 values in two words.
DEQUANTISE = gl.constexpr("""{
.reg .b16 low, high, x, y;
.reg .b32 pair;
.reg .f32 f, g;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 pair, low;
mov.b32 {x, y}, pair;
cvt.f32.f16 f, x;
cvt.f32.f16 g, y;
mul.rn.f32 f, f, $3;
mul.rn.f32 g, g, $3;
cvt.rn.bf16x2.f32 $0, g, f;
cvt.rn.f16x2.e4m3x2 pair, high;
mov.b32 {x, y}, pair;
cvt.f32.f16 f, x;
cvt.f32.f16 g, y;
mul.rn.f32 f, f, $3;
mul.rn.f32 g, g, $3;
cvt.rn.bf16x2.f32 $1, g, f;
}""")
FETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.jit
def _offsets(slot, valid, block_size, stride_block, RECORD: gl.constexpr, PAGED: gl.constexpr):
    """int64 offsets of records, in the units of ``stride_block`` and RECORD."""
    slot = gl.where(valid, slot, 0)
    if PAGED:
        block = slot // block_size
        return block.to(gl.int64) * stride_block + (slot - block * block_size) * RECORD
    else:
        return slot.to(gl.int64) * RECORD


@gluon.jit
def _slots(indices, at, count):
    return gl.load(indices + at, mask=at < count, other=-1)


@gluon.jit
def _readable(slot, num_slots):
    return (slot >= 0) & (slot < num_slots)


@gluon.jit
def _load_half(words, offsets, valid, half: gl.constexpr, LATENT: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr):
    """(codes int32 [TILE, groups, words], scales fp32 [TILE, groups]) of half a tile."""
    GROUPS: gl.constexpr = HALF // GROUP
    WORDS: gl.constexpr = GROUP // 4
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, SCALES))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    row = gl.expand_dims(offsets, 1)
    readable = gl.expand_dims(valid, 1)
    place = row + gl.expand_dims(group * WORDS + half * (HALF // 4), 0)
    codes = gl.load(
        words + gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0),
        mask=gl.expand_dims(readable, 2),
        other=0,
    )
    at = row + gl.expand_dims(group + half * GROUPS, 0) + LATENT // 4
    scales = gl.load(words.to(gl.pointer_type(gl.float32), bitcast=True) + at, mask=readable, other=0.0)
    return codes, scales


@gluon.jit
def _put_half(into, codes, scales, bars, which: gl.constexpr):
    """Dequantise half a tile into shared memory, seen as words, and hand it over."""
    factor, _ = gl.broadcast(gl.expand_dims(scales, 2), codes.to(gl.float32))
    low, high = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,=r,r,f", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    into.store(gl.reshape(gl.join(low, high), [TILE, HALF // 2]))
    fence_async_shared()
    signal(bars, FILLED + which)


@gluon.jit
def _fetch(cache, slot, num_slots, block_size, stride_block, RECORD: gl.constexpr, PAGED: gl.constexpr, LINES: gl.constexpr):
    """Ask the L2 for the records of a pair."""
    line = gl.arange(0, 8, layout=gl.SliceLayout(0, LINES))
    offset = _offsets(slot, _readable(slot, num_slots), block_size, stride_block * 4, RECORD, PAGED)
    pointers = cache + gl.expand_dims(offset, 1) + gl.expand_dims(gl.minimum(line * LINE, RECORD - 1), 0)
    gl.inline_asm_elementwise(FETCH, "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _dequantise(
    keys, keys_rest, bars, indices, count, cache, num_slots, block_size, stride_block, LATENT: gl.constexpr,
    GROUP: gl.constexpr, RECORD: gl.constexpr, REST_AT: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The producer. ``stride_block`` in words. Every index is read a pair before it is needed, so that no load waits for
    another one."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    tiles = keys._reinterpret(gl.int32, [2, TILE, VALUE // 2], WORD_TILES)
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    values = cache.to(gl.pointer_type(gl.bfloat16), bitcast=True) + REST_AT // 2
    place = gl.arange(0, TILE, layout=ROWS)
    place_rest = gl.arange(0, TILE, layout=gl.SliceLayout(1, LANES))
    place_line = gl.arange(0, PAIR, layout=gl.SliceLayout(1, LINES))
    pairs = gl.maximum((count + PAIR - 1) // PAIR, 1)
    phase = 1
    even_slot = _slots(indices, place, count)
    odd_slot = _slots(indices, TILE + place, count)
    even_rest = _slots(indices, place_rest, count)
    odd_rest = _slots(indices, TILE + place_rest, count)
    line_slot = _slots(indices, PAIR + place_line, count)
    even_valid = _readable(even_slot, num_slots)
    even = _offsets(even_slot, even_valid, block_size, stride_block, RECORD // 4, PAGED)
    codes, scales = _load_half(words, even, even_valid, 0, LATENT, GROUP, CODES)
    for i in range(pairs):
        zero = i >> 20
        _fetch(cache, line_slot, num_slots, block_size, stride_block, RECORD, PAGED, LINES)
        line_slot = _slots(indices, (i + 2) * PAIR + place_line, count)
        ahead = (i + 1) * PAIR + place
        odd_valid = _readable(odd_slot, num_slots)
        odd = _offsets(odd_slot, odd_valid, block_size, stride_block, RECORD // 4, PAGED)
        even_slot = _slots(indices, ahead, count)
        odd_slot = _slots(indices, TILE + ahead, count)

        mbarrier.wait(bars.index(FREED), phase)
        _put_half(tiles.index(zero).slice(0, HALF // 2, dim=1), codes, scales, bars, 0)
        codes, scales = _load_half(words, odd, odd_valid, 1, LATENT, GROUP, CODES)
        mbarrier.wait(bars.index(FREED + 3), phase)
        rest_valid = _readable(odd_rest, num_slots)
        rest = values + _offsets(odd_rest, rest_valid, block_size, stride_block * 2, RECORD // 2, PAGED)
        gather(keys_rest.index(zero + 1), rest, rest_valid, 0, REST, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED + 3), increment_count=False)
        odd_rest = _slots(indices, (i + 1) * PAIR + TILE + place_rest, count)
        _put_half(tiles.index(zero + 1).slice(HALF // 2, HALF // 2, dim=1), codes, scales, bars, 3)
        codes, scales = _load_half(words, even, even_valid, 1, LATENT, GROUP, CODES)
        mbarrier.wait(bars.index(FREED + 1), phase)
        rest_valid = _readable(even_rest, num_slots)
        rest = values + _offsets(even_rest, rest_valid, block_size, stride_block * 2, RECORD // 2, PAGED)
        gather(keys_rest.index(zero), rest, rest_valid, 0, REST, LANES)
        async_copy.mbarrier_arrive(bars.index(FILLED + 1), increment_count=False)
        even_rest = _slots(indices, (i + 1) * PAIR + place_rest, count)
        _put_half(tiles.index(zero).slice(HALF // 2, HALF // 2, dim=1), codes, scales, bars, 1)
        codes, scales = _load_half(words, odd, odd_valid, 0, LATENT, GROUP, CODES)
        even_valid = _readable(even_slot, num_slots)
        even = _offsets(even_slot, even_valid, block_size, stride_block, RECORD // 4, PAGED)
        mbarrier.wait(bars.index(FREED + 2), phase)
        _put_half(tiles.index(zero + 1).slice(0, HALF // 2, dim=1), codes, scales, bars, 2)
        codes, scales = _load_half(words, even, even_valid, 0, LATENT, GROUP, CODES)
        phase = phase ^ 1


@gluon.jit(do_not_specialize=["num_slots", "block_size", "capacity"])
def attend(
    q,  # bf16 [tokens, heads, VALUE + REST], heads a multiple of 64
    cache,  # uint8 [num_blocks, block_size, RECORD]
    indices,  # int32 [capacity]
    indptr,  # int32 [tokens + 1]
    sink,  # fp32 [heads]; anything without HAS_SINK
    out,  # bf16 [tokens, heads, VALUE]; SPLIT: fp32 [splits, tokens, heads, VALUE]
    lse,  # fp32 [tokens, heads], natural log; SPLIT: [splits, tokens, heads], base 2
    num_slots,
    block_size,
    capacity,
    head_blocks,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_cache_block,  # words
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_token,
    LATENT: gl.constexpr,
    GROUP: gl.constexpr,
    RECORD: gl.constexpr,
    REST_AT: gl.constexpr,
    PAGED: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * HEADS
    query = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, VALUE], TILES)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, VALUE], TILES)
    right_p = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, TILE], TILES)
    maxima = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    query_rest = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, REST], TILES)
    keys_rest = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, REST], TILES)
    left_p = keys_rest  # the even tile's rest is free once it was scored
    mbarrier.init(bars.index(FILLED), count=1)
    mbarrier.init(bars.index(FILLED + 1), count=129)  # with the copies of every thread of the producer
    mbarrier.init(bars.index(FILLED + 2), count=1)
    mbarrier.init(bars.index(FILLED + 3), count=129)
    for which in gl.static_range(FREED, QUERY):
        mbarrier.init(bars.index(which), count=1)
    mbarrier.init(bars.index(QUERY), count=2)
    fence_async_shared()
    barrier()

    begin = gl.maximum(gl.load(indptr + token), 0)
    count = gl.maximum(gl.minimum(gl.load(indptr + token + 1), capacity) - begin, 0)
    split = gl.program_id(1)
    if SPLIT:
        pairs = (count + PAIR - 1) // PAIR
        share = (pairs + gl.num_programs(1) - 1) // gl.num_programs(1) * PAIR
        before = gl.minimum(split * share, count)
        begin += before
        count = gl.minimum(count - before, share)
    wide = token.to(gl.int64)
    row = indices + begin
    source = q + wide * stride_q_token + first_head * stride_q_head
    target = out + split.to(gl.int64) * stride_out_split + wide * stride_out_token + first_head * stride_out_head
    sums_to = lse + split.to(gl.int64) * stride_lse_split + wide * stride_lse_token + first_head
    drain = sink + first_head
    gl.warp_specialize(
        [
            (left, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, row, count, num_slots,
                    scale_log2, target, sums_to, drain, stride_q_head, stride_out_head, True, HAS_SINK, SPLIT)),
            (right, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, row, count, num_slots,
                     scale_log2, target, sums_to, drain, stride_q_head, stride_out_head, True, HAS_SINK, SPLIT)),
            (_dequantise, (keys, keys_rest, bars, row, count, cache, num_slots, block_size, stride_cache_block, LATENT,
                           GROUP, RECORD, REST_AT, PAGED)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
