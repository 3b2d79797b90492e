"""How fp8 records become keys on Hopper: the producers of decode_fp8.

Each dequantises one tile of every pair, half by half in the order in which the consumers free them, the codes of the
next half on their way in registers while it waits. Codes become bf16 exactly as the reference rounds them: NaN codes
stay NaN, scales of any size count. Rows that an index does not name are zeros, and the producers tell the consumers
which. The fence between these stores and the matrix unit is the consumers', after their wait: here it would await
loads, too.

Where rows are split, or some of a step's are, both halves of a tile are one piece of code, told at run time which it
is: a program walks few pairs, and in a layer code is found nowhere, and costs 4 to 5 us for 90 KB. Whole rows walk
many, and have either half's code.

Interleaved: a record is LATENT codes, an fp32 scale per GROUP of them, and REST bf16 values that only score. Planar:
VALUE - REST codes and REST bf16 values that are the last of the value; power-of-two scales lie behind the records of a
block, one byte per GROUP, four to a word and to half a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import barrier, signal, wait
from sparse_attn.device.triton_private import reinterpret
from sparse_attn.ops.attention.hopper.common import gather, row_range
from sparse_attn.ops.attention.hopper.seesaw import FILLED, FREED, HALF, REST, TILE, UNIT, VALUE, WORD

PART = gl.constexpr(128)  # columns of a part, two to half a tile


def _decode(pair: str) -> str:
    """PTX of four e4m3 codes in $2 -> four bf16 values in $0 and $1. pair: what becomes of two of them, f and g in
    fp32."""
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
def own_tiles(row, TWO: gl.constexpr, SPLIT: gl.constexpr):
    """(begin and count of the indices of this program's row, of those into the second cache; tiles of the first cache's
    keys; [start, end) of this program's tiles, where both caches' are one range)."""
    indptr, extra_indptr, capacity, extra_capacity, head_blocks = row
    token = gl.program_id(0) // head_blocks
    begin, count = row_range(indptr, token, capacity)
    extra_begin = begin
    extra_count = count
    if TWO:
        extra_begin, extra_count = row_range(extra_indptr, token, extra_capacity)
    tiles = (count + TILE - 1) // TILE
    end = tiles
    if TWO:
        end += (extra_count + TILE - 1) // TILE
    start = gl.program_id(1) * 0
    if SPLIT is None or SPLIT:
        share = (end + gl.num_programs(1) - 1) // gl.num_programs(1)
        start = gl.minimum(gl.program_id(1) * share, end)
        end = gl.minimum(start + share, end)
    return begin, count, extra_begin, extra_count, tiles, start, end


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
def _load_codes(
    record, valid, first: gl.constexpr, groups: gl.constexpr, missing, GROUP: gl.constexpr, CODES: gl.constexpr
):
    """Groups from column ``first`` of half a tile on, the last of which may be ``missing``: int32 [TILE, groups, words
    of a group]."""
    WORDS: gl.constexpr = GROUP // WORD
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    at = gl.expand_dims(record, 1) + gl.expand_dims(group * WORDS + first // WORD, 0)
    there = gl.expand_dims(valid, 1) & gl.expand_dims(group < groups - missing, 0)
    return gl.load(
        gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0), mask=gl.expand_dims(there, 2), other=0
    )


@gluon.jit
def _load_half(
    record, scales, valid, half, LATENT: gl.constexpr, GROUP: gl.constexpr, PLANAR: gl.constexpr, CODES: gl.constexpr,
    KNOWN: gl.constexpr,
):  # fmt: skip
    """(codes of both parts of half a tile, their scales). Planar: a word [TILE] holds the scales of the half, both
    times; else fp32 [TILE, groups] of either part."""
    near = record + half * (HALF // WORD)
    GROUPS: gl.constexpr = PART // GROUP
    groups: gl.constexpr = GROUPS - half if PLANAR and KNOWN else GROUPS
    missing = 0
    if PLANAR:
        first_scales = gl.load(scales + half, mask=valid, other=0)
        second_scales = first_scales
        if not KNOWN:
            missing = half  # bf16 values take the place of one group of the right half
    else:
        group = gl.arange(0, PART // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
        at = record.to(gl.pointer_type(gl.float32), bitcast=True) + (LATENT // WORD + half * (HALF // GROUP))
        at = gl.expand_dims(at, 1) + gl.expand_dims(group, 0)
        readable = gl.expand_dims(valid, 1)
        first_scales = gl.load(at, mask=readable, other=0.0)
        second_scales = gl.load(at + PART // GROUP, mask=readable, other=0.0)
    first_part = _load_codes(near, valid, 0, GROUPS, 0, GROUP, CODES)
    second_part = _load_codes(near, valid, PART, groups, missing, GROUP, CODES)
    return first_part, second_part, first_scales, second_scales


@gluon.jit
def put_codes(into, codes, factors):
    """Dequantise int32 words of codes [keys, groups, words] by fp32 factors [keys, groups] into shared memory, seen as
    words."""
    factor, _ = gl.broadcast(gl.expand_dims(factors, 2), codes.to(gl.float32))
    low, high = gl.inline_asm_elementwise(
        BY_FLOAT, "=r,=r,r,f", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    into.store(gl.reshape(gl.join(low, high), [codes.shape[0], codes.shape[1] * codes.shape[2] * 2]))


@gluon.jit
def _put_part(into, codes, scales, first: gl.constexpr, GROUP: gl.constexpr, PLANAR: gl.constexpr):
    """Dequantise a part, columns of half a tile from ``first`` on, into shared memory, seen as words."""
    GROUPS: gl.constexpr = codes.shape[1]
    target = into.slice(first // 2, GROUPS * GROUP // 2, dim=1)
    if PLANAR:
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, codes.type.layout)))
        shift = (group + first // GROUP) * 8
        exponents = (gl.expand_dims(scales, 1) >> gl.expand_dims(shift, 0)) & 0xFF
        factor = gl.where(exponents == 0, 0x00400040, exponents * 0x00800080)  # 2^-127 is subnormal
        factor, _ = gl.broadcast(gl.expand_dims(factor, 2), codes)
        low, high = gl.inline_asm_elementwise(
            BY_PAIR, "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        target.store(gl.reshape(gl.join(low, high), [TILE, GROUPS * GROUP // 2]))
    else:
        put_codes(target, codes, scales)


@gluon.jit
def _copy_rest(into, record, valid, REST_AT: gl.constexpr):
    """The bf16 values of a tile, not awaited."""
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # rows as those of codes
    source = (record + REST_AT // WORD).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    source = gl.convert_layout(source, gl.SliceLayout(1, COPIES))
    gather(into, source, gl.convert_layout(valid, gl.SliceLayout(1, COPIES)), 0, REST, COPIES)


@gluon.jit
def _put_half(
    into, half, first_part, second_part, first_scales, second_scales, GROUP: gl.constexpr, PLANAR: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """Dequantise half a tile into shared memory."""
    _put_part(into, first_part, first_scales, 0, GROUP, PLANAR)
    if PLANAR and second_part.shape[1] > 1:
        if half == 0:
            _put_part(into, second_part, second_scales, PART, GROUP, PLANAR)
        else:
            some, _ = gl.split(gl.permute(second_part, (0, 2, 1)))
            some = gl.convert_layout(gl.reshape(some, [TILE, 1, GROUP // WORD]), CODES)
            _put_part(into, some, second_scales, PART, GROUP, PLANAR)
    else:
        _put_part(into, second_part, second_scales, PART, GROUP, PLANAR)


@gluon.jit
def _tell(bar, COPIES: gl.constexpr):
    """Half a tile is there; COPIES: once what each thread had copied is, too."""
    if COPIES:  # behind what was stored: a barrier stands between two uses of an mbarrier
        async_copy.mbarrier_arrive(bar, increment_count=False)
    signal(bar)


@gluon.jit
def _bring(
    late, zero, given, state, tile: gl.constexpr, LATENT: gl.constexpr, GROUP: gl.constexpr, TOKEN: gl.constexpr,
    SCALES: gl.constexpr, REST_AT: gl.constexpr, PLANAR: gl.constexpr, PAGED: gl.constexpr, TWO: gl.constexpr,
    CODES: gl.constexpr, KNOWN: gl.constexpr,
):  # fmt: skip
    """The half of a tile that is needed first, or ``late``, into its place; then ask for the next one. given: to every
    one;
    state: of a producer between two halves. KNOWN: late is when the kernel is compiled."""
    SOON: gl.constexpr = tile
    LATER: gl.constexpr = 1 - tile
    (
        keys, keys_rest, halves, named, bars, tiles, end, words, indices, count, num_slots, block_size, stride_block,
        extra_words, extra_indices, extra_count, extra_num_slots, extra_block_size, extra_stride_block, place,
    ) = given  # fmt: skip
    valid, record, scales_at, next_slot, at, phase, pending = state
    here = zero + tile
    if late == 0:
        mbarrier.wait(bars[FREED + 2 * tile + SOON], phase)
        named.index(here).store(valid.to(gl.int32))
    else:
        mbarrier.wait(bars[FREED + 2 * tile + LATER], phase)
    if PLANAR:
        if (late ^ tile) == 1:
            _copy_rest(keys.index(here).slice(VALUE - REST, REST, dim=1), record, valid, REST_AT)
            barrier()  # which the compiler wants before the next store, and would have both halves pass
    first_part, second_part, first_scales, second_scales = pending
    into = halves.index(2 * here + (late ^ tile))
    _put_half(into, late ^ tile, first_part, second_part, first_scales, second_scales, GROUP, PLANAR, CODES)
    if late == 0:
        if not PLANAR and tile == 0:
            _copy_rest(keys_rest.index(here), record, valid, REST_AT)
            async_copy.mbarrier_arrive(bars[FILLED], increment_count=False)
        _tell(bars[FILLED + 2 * tile + SOON], PLANAR and SOON == 1)
        if not PLANAR and tile == 1:
            mbarrier.wait(bars[FREED + 1], phase)  # left's probabilities were read there
            _copy_rest(keys_rest.index(here), record, valid, REST_AT)
            async_copy.mbarrier_arrive(bars[FILLED + 2], increment_count=False)
    else:
        _tell(bars[FILLED + 2 * tile + LATER], PLANAR and LATER == 1)
        at += 2
        phase = phase ^ 1
        valid, record, scales_at = _locate(
            next_slot, at, tiles, words, num_slots, block_size, stride_block, extra_words, extra_num_slots,
            extra_block_size, extra_stride_block, TOKEN // WORD, SCALES // WORD, PAGED, TWO,
        )  # fmt: skip
    pending = _load_half(record, scales_at, valid, late ^ LATER, LATENT, GROUP, PLANAR, CODES, KNOWN)
    if late == 1:
        next_slot = _slots(at + 2, end, tiles, indices, count, extra_indices, extra_count, place, TWO)
    return valid, record, scales_at, next_slot, at, phase, pending


@gluon.jit
def dequantise(
    row, producer, tile: gl.constexpr, LATENT: gl.constexpr, GROUP: gl.constexpr, TOKEN: gl.constexpr, SCALES: gl.constexpr,
    REST_AT: gl.constexpr, PLANAR: gl.constexpr, PAGED: gl.constexpr, TWO: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """A producer: the even (``tile`` 0) or odd tiles of a program's. Left takes the halves of an even tile in their
    order, right those of an odd one in the other. ptxas has a thread await all its loads together, so records are
    located and indices are read where codes have just been put away."""
    (
        keys, keys_rest, named, bars, cache, indices, num_slots, block_size, stride_block, extra_cache, extra_indices,
        extra_num_slots, extra_block_size, extra_stride_block,
    ) = producer  # fmt: skip
    wait()
    begin, count, extra_begin, extra_count, tiles, start, end = own_tiles(row, TWO, SPLIT)
    indices += begin
    extra_indices += extra_begin
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    SOON: gl.constexpr = tile  # the half that is needed first
    KNOWN: gl.constexpr = SPLIT is not None and not SPLIT
    halves = reinterpret(keys, gl.int32, [4, TILE, HALF // 2], WORD_TILES)
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
    pending = _load_half(record, scales_at, valid, SOON, LATENT, GROUP, PLANAR, CODES, KNOWN)
    given = (
        keys, keys_rest, halves, named, bars, tiles, end, words, indices, count, num_slots, block_size, stride_block,
        extra_words, extra_indices, extra_count, extra_num_slots, extra_block_size, extra_stride_block, place,
    )  # fmt: skip
    state = valid, record, scales_at, next_slot, at, phase, pending
    if KNOWN:
        for i in range(pairs):
            for late in gl.static_range(2):
                state = _bring(
                    late,
                    i >> 20,
                    given,
                    state,
                    tile,
                    LATENT,
                    GROUP,
                    TOKEN,
                    SCALES,
                    REST_AT,
                    PLANAR,
                    PAGED,
                    TWO,
                    CODES,
                    True,
                )
    else:
        for step in range(2 * pairs):
            state = _bring(
                step & 1,
                step >> 20,
                given,
                state,
                tile,
                LATENT,
                GROUP,
                TOKEN,
                SCALES,
                REST_AT,
                PLANAR,
                PAGED,
                TWO,
                CODES,
                False,
            )
