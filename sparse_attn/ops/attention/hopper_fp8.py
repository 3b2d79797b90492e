"""Sparse decode over paged fp8 keys on Hopper, of one cache or two: the consumers of hopper_row behind two producers.

Each producer dequantises one tile of every pair, half by half in the order in which the consumers free them, the codes of
the next half on their way in registers while it waits. Codes become bf16 exactly as the reference rounds them: NaN codes
stay NaN, scales of any size count. Rows that an index does not name are zeros, and the producers tell the consumers which.
The tiles of a row are those of its first cache, then those of the second. The fence between these stores and the matrix
unit is the consumers', after their wait: here it would await loads, too.

Keys come in two forms. Interleaved: a record is LATENT codes, an fp32 scale per GROUP of them, and REST bf16 values that
only score. Planar: VALUE - REST codes and REST bf16 values that are part of the value; power-of-two scales lie behind the
records of a block, one byte per GROUP, four to a word and to half a tile.

Floor, bytes: a record per named key and block of heads. What bounds it: of the four halves of a pair three are freed within
1300 cycles, and two producers hold two halves in registers: the third comes a put and a load's latency later, and right's
scores with it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparse_attn.device.hopper import barrier, signal, start_next, wait
from sparse_attn.ops.attention.hopper_pair import (
    FILLED,
    FREED,
    HALF,
    HEADS,
    QUERY,
    REST,
    TILE,
    UNIT,
    VALUE,
    WORD,
    allocate_barriers,
    gather,
    row_range,
)
from sparse_attn.ops.attention.hopper_row import left, right

PART = gl.constexpr(128)  # columns of a part, two to half a tile


def _decode(pair: str) -> str:
    """PTX of four e4m3 codes in $2 -> four bf16 values in $0 and $1. pair: what becomes of two of them, f and g in fp32."""
    halves = (
        f"""cvt.rn.f16x2.e4m3x2 pair, {half};
mov.b32 {{x, y}}, pair;
cvt.f32.f16 f, x;
cvt.f32.f16 g, y;
{pair.format(out)}
"""
        for half, out in (("low", "$0"), ("high", "$1"))
    )
    return f"""{{
.reg .b16 low, high, x, y;
.reg .b32 pair;
.reg .f32 f, g;
mov.b32 {{low, high}}, $2;
{"".join(halves)}}}"""


# By an fp32 scale, $3.
BY_FLOAT = gl.constexpr(
    _decode("""mul.rn.f32 f, f, $3;
mul.rn.f32 g, g, $3;
cvt.rn.bf16x2.f32 {}, g, f;""")
)
# By a scale that is a bf16 value, twice in its word: codes are bf16 values too, so one product rounds once.
BY_PAIR = gl.constexpr(
    _decode("""cvt.rn.bf16x2.f32 pair, g, f;
mul.rn.bf16x2 {}, pair, $3;""")
)


@gluon.jit
def _either(first, second, take_first, TWO: gl.constexpr):
    if TWO:
        return gl.where(take_first, first, second)
    else:
        return first


@gluon.jit
def _slots(tile, end, tiles, indices, count, extra_indices, extra_count, place, TWO: gl.constexpr):
    """What the indices of a tile say, -1 beyond the row."""
    near = tile < tiles
    at = _either(tile, tile - tiles, near, TWO) * TILE + place
    limit = gl.where(tile < end, _either(count, extra_count, near, TWO), 0)
    return gl.load(_either(indices, extra_indices, near, TWO) + at, mask=at < limit, other=-1)


@gluon.jit
def _locate(
    slot, tile, tiles, words, num_slots, block_size, stride_block, extra_words, extra_num_slots, extra_block_size,
    extra_stride_block, TOKEN: gl.constexpr, SCALES: gl.constexpr, PAGED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """(which slots may be read, pointers to their records, pointers to their scales; planar, as words)."""
    near = tile < tiles
    valid = (slot >= 0) & (slot < _either(num_slots, extra_num_slots, near, TWO))
    slot = gl.where(valid, slot, 0)
    cache = _either(words, extra_words, near, TWO)
    if PAGED:
        size = _either(block_size, extra_block_size, near, TWO)
        block = (slot.to(gl.uint32) // size.to(gl.uint32)).to(gl.int32)
        place = (slot - block * size).to(gl.int64)
        base = cache + block.to(gl.int64) * _either(stride_block, extra_stride_block, near, TWO) * (UNIT // WORD)
        return valid, base + place * TOKEN, base + (size.to(gl.int64) * TOKEN + place * SCALES)
    else:
        record = cache + slot.to(gl.int64) * TOKEN
        return valid, record, record


@gluon.jit
def _load_codes(record, valid, first: gl.constexpr, columns: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr):
    """int32 [TILE, groups, words of a group] of the columns [first, first + columns)."""
    WORDS: gl.constexpr = GROUP // WORD
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    group = gl.arange(0, columns // GROUP, layout=gl.SliceLayout(0, SCALES))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    at = gl.expand_dims(record, 1) + gl.expand_dims(group * WORDS + first // WORD, 0)
    return gl.load(
        gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0),
        mask=gl.expand_dims(gl.expand_dims(valid, 1), 2),
        other=0,
    )


@gluon.jit
def _load_half(
    record, scales, valid, half: gl.constexpr, LATENT: gl.constexpr, GROUP: gl.constexpr, PLANAR: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """(codes of both parts of half a tile, their scales). Planar: a word [TILE] holds the scales of the half, both times;
    else fp32 [TILE, groups] of either part."""
    FIRST: gl.constexpr = half * HALF
    if PLANAR:
        first_scales = gl.load(scales + half, mask=valid, other=0)
        second_scales = first_scales
    else:
        group = gl.arange(0, PART // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
        at = record.to(gl.pointer_type(gl.float32), bitcast=True) + LATENT // WORD
        at = gl.expand_dims(at, 1) + gl.expand_dims(group + FIRST // GROUP, 0)
        readable = gl.expand_dims(valid, 1)
        first_scales = gl.load(at, mask=readable, other=0.0)
        second_scales = gl.load(at + PART // GROUP, mask=readable, other=0.0)
    first_part = _load_codes(record, valid, FIRST, PART, GROUP, CODES)
    second_part = _load_codes(record, valid, FIRST + PART, min(PART, LATENT - FIRST - PART), GROUP, CODES)
    return first_part, second_part, first_scales, second_scales


@gluon.jit
def put_codes(into, codes, factors):
    """Dequantise int32 words of codes [keys, groups, words] by fp32 factors [keys, groups] into shared memory, seen as words."""
    factor, _ = gl.broadcast(gl.expand_dims(factors, 2), codes.to(gl.float32))
    low, high = gl.inline_asm_elementwise(
        BY_FLOAT, "=r,=r,r,f", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    into.store(gl.reshape(gl.join(low, high), [codes.shape[0], codes.shape[1] * codes.shape[2] * 2]))


@gluon.jit
def _put_part(into, codes, scales, part: gl.constexpr, GROUP: gl.constexpr, PLANAR: gl.constexpr):
    """Dequantise a part into shared memory, seen as words."""
    GROUPS: gl.constexpr = codes.shape[1]
    if PLANAR:
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, codes.type.layout)))
        shift = (group + part * (PART // GROUP)) * 8
        exponents = (gl.expand_dims(scales, 1) >> gl.expand_dims(shift, 0)) & 0xFF
        factor = gl.where(exponents == 0, 0x00400040, exponents * 0x00800080)  # 2^-127 is subnormal
        factor, _ = gl.broadcast(gl.expand_dims(factor, 2), codes)
        low, high = gl.inline_asm_elementwise(
            BY_PAIR, "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        into.store(gl.reshape(gl.join(low, high), [TILE, GROUPS * GROUP // 2]))
    else:
        put_codes(into, codes, scales)


@gluon.jit
def _put_half(
    words, first_part, second_part, first_scales, second_scales, half: gl.constexpr, LATENT: gl.constexpr,
    GROUP: gl.constexpr, PLANAR: gl.constexpr,
):  # fmt: skip
    """Dequantise half a tile into shared memory."""
    FIRST: gl.constexpr = half * HALF
    _put_part(words.slice(FIRST // 2, PART // 2, dim=1), first_part, first_scales, 0, GROUP, PLANAR)
    SECOND: gl.constexpr = min(PART, LATENT - FIRST - PART)
    _put_part(words.slice((FIRST + PART) // 2, SECOND // 2, dim=1), second_part, second_scales, 1, GROUP, PLANAR)


@gluon.jit
def _copy_rest(into, record, valid, bar, REST_AT: gl.constexpr):
    """The bf16 values of a tile; ``bar`` is told when they are there."""
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # rows as those of codes
    source = (record + REST_AT // WORD).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    source = gl.convert_layout(source, gl.SliceLayout(1, COPIES))
    gather(into, source, gl.convert_layout(valid, gl.SliceLayout(1, COPIES)), 0, REST, COPIES)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _dequantise(
    keys, keys_rest, named, bars, start, end, tiles, cache, indices, count, num_slots, block_size, stride_block,
    extra_cache, extra_indices, extra_count, extra_num_slots, extra_block_size, extra_stride_block, tile: gl.constexpr,
    LATENT: gl.constexpr, GROUP: gl.constexpr, TOKEN: gl.constexpr, SCALES: gl.constexpr, REST_AT: gl.constexpr,
    PLANAR: gl.constexpr, PAGED: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """A producer: the even (``tile`` 0) or odd tiles of [start, end). Left takes the halves of an even tile in their
    order, right those of an odd one in the other. ptxas has a thread await all its loads together, so records are located
    and indices are read where codes have just been put away."""
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    SOON: gl.constexpr = tile  # the half that is needed first
    LATER: gl.constexpr = 1 - tile
    REST_FILLED: gl.constexpr = FILLED + 2 * tile + (1 if PLANAR else 0)  # bf16 values come with the right or the left half
    tiles_seen = keys._reinterpret(gl.int32, [2, TILE, VALUE // 2], WORD_TILES)
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_cache.to(gl.pointer_type(gl.int32), bitcast=True)
    place = gl.arange(0, TILE, layout=ROWS)
    pairs = gl.maximum((end - start + 1) // 2, 1)
    at = start + tile
    phase = 1
    slot = _slots(at, end, tiles, indices, count, extra_indices, extra_count, place, TWO)
    next_slot = _slots(at + 2, end, tiles, indices, count, extra_indices, extra_count, place, TWO)
    valid, record, scales_at = _locate(
        slot, at, tiles, words, num_slots, block_size, stride_block, extra_words, extra_num_slots, extra_block_size,
        extra_stride_block, TOKEN // WORD, SCALES // WORD, PAGED, TWO,
    )  # fmt: skip
    first_part, second_part, first_scales, second_scales = _load_half(
        record, scales_at, valid, SOON, LATENT, GROUP, PLANAR, CODES
    )
    for i in range(pairs):
        here = (i >> 20) + tile
        mbarrier.wait(bars[FREED + 2 * tile + SOON], phase)
        named.index(here).store(valid.to(gl.int32))
        if PLANAR:
            rest = keys.index(here).slice(VALUE - REST, REST, dim=1)
        else:
            rest = keys_rest.index(here)
        if PLANAR and SOON == 1:
            _copy_rest(rest, record, valid, bars[REST_FILLED], REST_AT)
        _put_half(
            tiles_seen.index(here), first_part, second_part, first_scales, second_scales, SOON, LATENT, GROUP, PLANAR
        )
        if not PLANAR and tile == 0:
            _copy_rest(rest, record, valid, bars[REST_FILLED], REST_AT)
        signal(bars[FILLED + 2 * tile + SOON])
        if not PLANAR and tile == 1:
            mbarrier.wait(bars[FREED + 1], phase)  # left's probabilities were read there
            _copy_rest(rest, record, valid, bars[REST_FILLED], REST_AT)
        at += 2
        first_part, second_part, first_scales, second_scales = _load_half(
            record, scales_at, valid, LATER, LATENT, GROUP, PLANAR, CODES
        )
        mbarrier.wait(bars[FREED + 2 * tile + LATER], phase)
        if PLANAR and LATER == 1:
            _copy_rest(rest, record, valid, bars[REST_FILLED], REST_AT)
        _put_half(
            tiles_seen.index(here), first_part, second_part, first_scales, second_scales, LATER, LATENT, GROUP, PLANAR
        )
        signal(bars[FILLED + 2 * tile + LATER])
        valid, record, scales_at = _locate(
            next_slot, at, tiles, words, num_slots, block_size, stride_block, extra_words, extra_num_slots,
            extra_block_size, extra_stride_block, TOKEN // WORD, SCALES // WORD, PAGED, TWO,
        )  # fmt: skip
        first_part, second_part, first_scales, second_scales = _load_half(
            record, scales_at, valid, SOON, LATENT, GROUP, PLANAR, CODES
        )
        next_slot = _slots(at + 2, end, tiles, indices, count, extra_indices, extra_count, place, TWO)
        phase = phase ^ 1


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
    token = gl.program_id(0) // head_blocks
    first_head = gl.program_id(0) % head_blocks * HEADS
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
    wait()
    if early != 0:
        start_next()
    barrier()

    begin, count = row_range(indptr, token, capacity)
    extra_begin = begin
    extra_count = count
    if TWO:
        extra_begin, extra_count = row_range(extra_indptr, token, extra_capacity)
    tiles = (count + TILE - 1) // TILE
    end = tiles
    if TWO:
        end += (extra_count + TILE - 1) // TILE
    which = gl.program_id(1)
    start = which * 0
    if SPLIT is None:
        split = gl.num_programs(1) > 1
    else:
        split: gl.constexpr = SPLIT
    if SPLIT is None or SPLIT:  # the tiles of both rows count as one range
        share = (end + gl.num_programs(1) - 1) // gl.num_programs(1)
        start = gl.minimum(which * share, end)
        end = gl.minimum(start + share, end)
    keys_here = (end - start) * TILE
    wide = token.to(gl.int64)
    row = indices + begin
    extra_row = extra_indices + extra_begin
    source = q + wide * stride_q_token + first_head * stride_q_head
    target = out + which.to(gl.int64) * stride_out_split + wide * stride_out_token + first_head * stride_out_head
    place = which.to(gl.int64) * stride_lse_split + wide * stride_lse_token + first_head
    sums_to = lse + place
    scales_to = scales + 2 * place
    drain = sink + first_head
    gl.warp_specialize(
        [
            (left, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, named, keys_here, 0,
                    scale_log2, target, sums_to, scales_to, drain, stride_q_head, stride_out_head, split, HAS_REST, HAS_SINK,
                    True)),
            (right, (query, query_rest, keys, keys_rest, right_p, left_p, maxima, sums, bars, source, named, keys_here, 0,
                     scale_log2, target, sums_to, scales_to, drain, stride_q_head, stride_out_head, split, HAS_REST, HAS_SINK,
                     True)),
            (_dequantise, (keys, keys_rest, named, bars, start, end, tiles, cache, row, count, num_slots, block_size,
                           stride_cache_block, extra_cache, extra_row, extra_count, extra_num_slots, extra_block_size,
                           stride_extra_block, 0, LATENT, GROUP, TOKEN, SCALES, REST_AT, PLANAR, PAGED, TWO)),
            (_dequantise, (keys, keys_rest, named, bars, start, end, tiles, cache, row, count, num_slots, block_size,
                           stride_cache_block, extra_cache, extra_row, extra_count, extra_num_slots, extra_block_size,
                           stride_extra_block, 1, LATENT, GROUP, TOKEN, SCALES, REST_AT, PLANAR, PAGED, TWO)),
        ],
        [4, 4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
