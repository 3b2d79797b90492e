"""The producers of decode_fp8 on Hopper: two warpgroups that dequantise fp8 records to bf16 tiles.

Each dequantises one tile of every pair, half-tile by half-tile in the order in which the consumers free them:

    1. wait until the half-tile is empty; 2. dequantise the codes in registers into it; 3. signal that it is full, with
    the first half which keys are valid; 4. load the codes of the next half-tile into registers.

Codes become bf16 exactly as the reference rounds them: NaN codes stay NaN, scales of any size count. Rows that no index
names are zeros. The fence between these stores and the matrix unit is the consumers', after their wait: here it would
await loads, too.

If rows are split, or some of a step's are, both halves of a tile are one piece of code that learns at run time which
half it is: a CTA walks few pairs, and in a layer code is found in no cache, and costs 4 to 5 us for 90 KB. Whole rows
walk many pairs, and have a piece of code for each half.

Interleaved records: LATENT codes, an fp32 scale per GROUP of them, and D_ROPE bf16 values that QK alone reads. Planar
records: D_V - D_ROPE codes and D_ROPE bf16 values, the last of the value. Their power-of-two scales lie behind the
records of a block, a byte per GROUP, four to a word and to half a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import barrier, signal, wait
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.attention.sparse.hopper.common import (
    BLOCK_N,
    D_ROPE,
    D_V,
    LOAD_BYTES,
    WORD_BYTES,
    KvCache,
    Scalar,
    gather,
    row_range,
)
from sparse_attn.ops.attention.sparse.hopper.seesaw import K0L, K0R, K1L

QUARTER = gl.constexpr(128)  # columns that are dequantised at a time, two to half a tile


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


@aggregate
class TileRange:
    """The indices of a CTA's row, and which tiles of them are the CTA's. Tiles of both caches are one range."""

    begin: Scalar
    count: Scalar
    extra_begin: Scalar
    extra_count: Scalar
    tiles: Scalar  # of the first cache's keys
    start: Scalar  # of the CTA
    end: Scalar


@aggregate
class KeySource:
    """Where a producer reads from: a row's indices and the caches as words, told apart by the tile."""

    tiles: Scalar  # of the first cache's keys
    end: Scalar
    kv: KvCache
    count: Scalar
    extra_kv: KvCache
    extra_count: Scalar
    key: gl.tensor  # of a tile
    HAS_EXTRA_CACHE: gl.constexpr


@aggregate
class Codes:
    """Half a tile in registers: two quarters of codes, and their scales. Scales are fp32 [BLOCK_N, groups] of
    either quarter. Planar: both are the same word [BLOCK_N], which holds the scales of the half."""

    first: gl.tensor
    second: gl.tensor
    first_scales: gl.tensor
    second_scales: gl.tensor


@aggregate
class ProducerState:
    """Between two half-tiles: a tile's records, the slots of the producer's next tile, and codes under way."""

    kv_valid: gl.tensor
    record: gl.tensor
    scales: gl.tensor
    next_slot: gl.tensor
    tile: gl.tensor
    phase: gl.tensor
    codes: Codes


@gluon.jit
def own_tiles(rows, HAS_EXTRA_CACHE: gl.constexpr, SPLIT: gl.constexpr):
    """The TileRange of this CTA."""
    token = gl.program_id(0) // rows.head_blocks
    begin, count = row_range(rows.indptr, rows.lengths, token, rows.capacity)
    extra_begin = begin
    extra_count = count
    if HAS_EXTRA_CACHE:
        extra_begin, extra_count = row_range(rows.extra_indptr, rows.extra_lengths, token, rows.extra_capacity)
    # Tiles of both caches count as one range; a tile lies in one cache.
    tiles = (count + BLOCK_N - 1) // BLOCK_N
    end = tiles
    if HAS_EXTRA_CACHE:
        end += (extra_count + BLOCK_N - 1) // BLOCK_N
    # Equal shares of the range. The last CTAs may have none.
    start = gl.program_id(1) * 0
    if SPLIT is None or SPLIT:
        tiles_per_split = (end + gl.num_programs(1) - 1) // gl.num_programs(1)
        start = gl.minimum(gl.program_id(1) * tiles_per_split, end)
        end = gl.minimum(start + tiles_per_split, end)
    return TileRange(begin, count, extra_begin, extra_count, tiles, start, end)


@gluon.jit
def _either(first, extra, is_first, HAS_EXTRA_CACHE: gl.constexpr):
    if HAS_EXTRA_CACHE:
        return gl.where(is_first, first, extra)
    else:
        return first


@gluon.jit
def _slots(source, tile):
    """The indices of a tile's keys, -1 beyond the row."""
    BOTH: gl.constexpr = source.HAS_EXTRA_CACHE
    is_first = tile < source.tiles
    at = _either(tile, tile - source.tiles, is_first, BOTH) * BLOCK_N + source.key
    # Behind the last tile, of an odd number, keys do not exist.
    limit = gl.where(tile < source.end, _either(source.count, source.extra_count, is_first, BOTH), 0)
    return gl.load(_either(source.kv.indices, source.extra_kv.indices, is_first, BOTH) + at, mask=at < limit, other=-1)


@gluon.jit
def _locate(source, slot, tile, record):
    """(which slots may be read, pointers to their records, pointers to their scales; planar, as words)."""
    BOTH: gl.constexpr = source.HAS_EXTRA_CACHE
    kv = source.kv
    extra_kv = source.extra_kv
    is_first = tile < source.tiles
    # Invalid slots are located at 0, so that every pointer is inside the cache.
    kv_valid = (slot >= 0) & (slot < _either(kv.num_slots, extra_kv.num_slots, is_first, BOTH))
    slot = gl.where(kv_valid, slot, 0)
    cache = _either(kv.cache, extra_kv.cache, is_first, BOTH)
    TOKEN: gl.constexpr = record.TOKEN // WORD_BYTES
    # A block may have padding behind it: find it, then the token inside.
    if record.PADDED_BLOCKS:
        size = _either(kv.block_size, extra_kv.block_size, is_first, BOTH)
        block = (slot.to(gl.uint32) // size.to(gl.uint32)).to(gl.int32)
        place = (slot - block * size).to(gl.int64)
        stride = _either(kv.stride_block, extra_kv.stride_block, is_first, BOTH)
        # stride_block is in LOAD_BYTES, pointers are of words.
        base = cache + block.to(gl.int64) * stride * (LOAD_BYTES // WORD_BYTES)
        return (
            kv_valid,
            base + place * TOKEN,
            base + (size.to(gl.int64) * TOKEN + place * (record.SCALES // WORD_BYTES)),
        )
    else:
        records = cache + slot.to(gl.int64) * TOKEN
        return kv_valid, records, records


@gluon.jit
def _load_codes(
    records, kv_valid, first: gl.constexpr, groups: gl.constexpr, missing, GROUP: gl.constexpr, CODES: gl.constexpr
):
    """Groups from column ``first`` of half a tile on, the last of which may be ``missing``: int32 [BLOCK_N, groups,
    words of a group]."""
    WORDS: gl.constexpr = GROUP // WORD_BYTES
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    # A masked key has codes of 0, which are zeros.
    at = gl.expand_dims(records, 1) + gl.expand_dims(group * WORDS + first // WORD_BYTES, 0)
    mask = gl.expand_dims(kv_valid, 1) & gl.expand_dims(group < groups - missing, 0)
    return gl.load(
        gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0), mask=gl.expand_dims(mask, 2), other=0
    )


@gluon.jit
def _load_half(
    records, scales, kv_valid, half, record, CODES: gl.constexpr, STATIC_HALF: gl.constexpr
):  # fmt: skip
    """The Codes of half a tile, not awaited."""
    GROUP: gl.constexpr = record.GROUP
    near = records + half * (D_V // 2 // WORD_BYTES)
    GROUPS: gl.constexpr = QUARTER // GROUP
    # The right half of a planar record has three groups: a static half is as wide as that.
    groups: gl.constexpr = GROUPS - half if record.PLANAR and STATIC_HALF else GROUPS
    missing = 0
    # One word holds the four scales of a half.
    if record.PLANAR:
        first_scales = gl.load(scales + half, mask=kv_valid, other=0)
        second_scales = first_scales
        if not STATIC_HALF:
            missing = half  # bf16 values take the place of one group of the right half
    else:
        # An fp32 scale for each group, behind the record's codes.
        group = gl.arange(0, QUARTER // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
        at = records.to(gl.pointer_type(gl.float32), bitcast=True)
        at = at + (record.LATENT // WORD_BYTES + half * (D_V // 2 // GROUP))
        at = gl.expand_dims(at, 1) + gl.expand_dims(group, 0)
        readable = gl.expand_dims(kv_valid, 1)
        first_scales = gl.load(at, mask=readable, other=0.0)
        second_scales = gl.load(at + QUARTER // GROUP, mask=readable, other=0.0)
    # All loads are issued here; registers are awaited where they are dequantised.
    first = _load_codes(near, kv_valid, 0, GROUPS, 0, GROUP, CODES)
    second = _load_codes(near, kv_valid, QUARTER, groups, missing, GROUP, CODES)
    return Codes(first, second, first_scales, second_scales)


@gluon.jit
def dequant_codes(into, codes, factors):
    """Dequantise int32 words of codes [keys, groups, words] by fp32 factors [keys, groups] into shared memory, seen as
    words."""
    # A group shares a factor: spread it over the group's words.
    factor, _ = gl.broadcast(gl.expand_dims(factors, 2), codes.to(gl.float32))
    low, high = gl.inline_asm_elementwise(
        BY_FLOAT, "=r,=r,r,f", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    into.store(gl.reshape(gl.join(low, high), [codes.shape[0], codes.shape[1] * codes.shape[2] * 2]))


@gluon.jit
def _dequant_quarter(into, codes, scales, first: gl.constexpr, record):
    """Dequantise a quarter, columns of half a tile from ``first`` on, into shared memory, seen as words."""
    GROUP: gl.constexpr = record.GROUP
    GROUPS: gl.constexpr = codes.shape[1]
    columns = into.slice(first // 2, GROUPS * GROUP // 2, dim=1)
    if record.PLANAR:
        # The group's byte of the word is a ue8m0 exponent.
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, codes.type.layout)))
        shift = (group + first // GROUP) * 8
        exponents = (gl.expand_dims(scales, 1) >> gl.expand_dims(shift, 0)) & 0xFF
        # As bf16 bits, in both halves of a word: exponent << 7.
        factor = gl.where(exponents == 0, 0x00400040, exponents * 0x00800080)  # 2^-127 is subnormal
        factor, _ = gl.broadcast(gl.expand_dims(factor, 2), codes)
        low, high = gl.inline_asm_elementwise(
            BY_PAIR, "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        columns.store(gl.reshape(gl.join(low, high), [BLOCK_N, GROUPS * GROUP // 2]))
    else:
        dequant_codes(columns, codes, scales)


@gluon.jit
def _dequant_half(into, half, codes, record, CODES: gl.constexpr):
    """Dequantise half a tile into shared memory."""
    _dequant_quarter(into, codes.first, codes.first_scales, 0, record)
    if record.PLANAR and codes.second.shape[1] > 1:
        if half == 0:
            _dequant_quarter(into, codes.second, codes.second_scales, QUARTER, record)
        else:
            # Of this quarter's two groups the second is bf16 values: dequantise the first alone.
            some, _ = gl.split(gl.permute(codes.second, (0, 2, 1)))
            some = gl.convert_layout(gl.reshape(some, [BLOCK_N, 1, record.GROUP // WORD_BYTES]), CODES)
            _dequant_quarter(into, some, codes.second_scales, QUARTER, record)
    else:
        _dequant_quarter(into, codes.second, codes.second_scales, QUARTER, record)


@gluon.jit
def _copy_rope(into, records, kv_valid, ROPE_OFFSET: gl.constexpr):
    """The bf16 values of a tile, not awaited."""
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # rows as those of codes
    source = (records + ROPE_OFFSET // WORD_BYTES).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    source = gl.convert_layout(source, gl.SliceLayout(1, COPIES))
    gather(into, source, gl.convert_layout(kv_valid, gl.SliceLayout(1, COPIES)), 0, D_ROPE, COPIES)


@gluon.jit
def _signal_full(bar, COPIES: gl.constexpr):
    """Half a tile is full; COPIES: once what each thread had copied is there, too."""
    if COPIES:  # behind what was stored: a barrier stands between two uses of an mbarrier
        async_copy.mbarrier_arrive(bar, increment_count=False)
    signal(bar)


@gluon.jit
def _half_step(
    state, later, zero, smem, half_tiles, bars, source, tile: gl.constexpr, record, CODES: gl.constexpr,
    STATIC_HALF: gl.constexpr,
):  # fmt: skip
    """Dequantise the half of a tile that is scored first, or ``later`` the other one, once it is empty; then load the
    next one. tile: 0 or 1 of the pair. STATIC_HALF: later is known when the kernel is compiled."""
    # Which half comes SOON: wg0 scores K0l first, wg1 K1r.
    SOON: gl.constexpr = tile
    LATER: gl.constexpr = 1 - tile
    PLANAR: gl.constexpr = record.PLANAR
    here = zero + tile
    phase = state.phase
    kv_valid = state.kv_valid
    records = state.record
    scales = state.scales
    next_slot = state.next_slot
    at = state.tile
    # Consumers have read this half of the pair before; kv_valid is free with the half that is scored first.
    if later == 0:
        mbarrier.wait(bars.k_empty[2 * tile + SOON], phase)
        smem.kv_valid.index(here).store(kv_valid.to(gl.int32))
    else:
        mbarrier.wait(bars.k_empty[2 * tile + LATER], phase)
    # Planar: the last 64 columns of the right half are bf16, and are copied as they are.
    if PLANAR:
        if (later ^ tile) == 1:
            _copy_rope(smem.k.index(here).slice(D_V - D_ROPE, D_ROPE, dim=1), records, kv_valid, record.ROPE_OFFSET)
            barrier()  # which the compiler wants before the next store, and would have both halves pass
    # Codes were loaded a step before: they arrive during that step's stores.
    into = half_tiles.index(2 * here + (later ^ tile))
    _dequant_half(into, later ^ tile, state.codes, record, CODES)
    # Interleaved: QK reads K0's RoPE columns with K0l.
    if later == 0:
        if not PLANAR and tile == 0:
            _copy_rope(smem.k_rope.index(here), records, kv_valid, record.ROPE_OFFSET)
            async_copy.mbarrier_arrive(bars.k_full[K0L], increment_count=False)
        _signal_full(bars.k_full[2 * tile + SOON], PLANAR and SOON == 1)
        # K1's RoPE columns are where P0 was, and full with K1l.
        if not PLANAR and tile == 1:
            mbarrier.wait(bars.k_empty[K0R], phase)  # P0 was read there
            _copy_rope(smem.k_rope.index(here), records, kv_valid, record.ROPE_OFFSET)
            async_copy.mbarrier_arrive(bars.k_full[K1L], increment_count=False)
    else:
        # The tile is done: go on to the producer's next one, two tiles on.
        _signal_full(bars.k_full[2 * tile + LATER], PLANAR and LATER == 1)
        at += 2
        phase = phase ^ 1
        kv_valid, records, scales = _locate(source, next_slot, at, record)
    # Codes of the next half are on their way while its place is awaited.
    codes = _load_half(records, scales, kv_valid, later ^ LATER, record, CODES, STATIC_HALF)
    # Behind the stores, so that indices are awaited with the codes: see dequantise.
    if later == 1:
        next_slot = _slots(source, at + 2)
    return ProducerState(kv_valid, records, scales, next_slot, at, phase, codes)


@gluon.jit
def _at_row(kv, begin):
    """A cache as words, and a row's indices into it."""
    words = kv.cache.to(gl.pointer_type(gl.int32), bitcast=True)
    return KvCache(words, kv.indices + begin, kv.num_slots, kv.block_size, kv.stride_block)


@gluon.jit
def dequantise(
    rows, smem, bars, kv, extra_kv, record, tile: gl.constexpr, HAS_EXTRA_CACHE: gl.constexpr, SPLIT: gl.constexpr
):
    """A producer: K0 (``tile`` 0) or K1 of every pair. wg0 takes K0's left half first, wg1 K1's right one. ptxas has a
    thread await all its loads together, so records are located and indices are read where codes have just been
    stored."""
    wait()
    own = own_tiles(rows, HAS_EXTRA_CACHE, SPLIT)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    # Threads that hold a record's codes hold its pointer, too.
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    STATIC_HALF: gl.constexpr = SPLIT is not None and not SPLIT
    half_tiles = reinterpret(smem.k, gl.int32, [4, BLOCK_N, D_V // 2 // 2], WORD_TILES)
    source = KeySource(
        own.tiles, own.end, _at_row(kv, own.begin), own.count, _at_row(extra_kv, own.extra_begin), own.extra_count,
        gl.arange(0, BLOCK_N, layout=ROWS), HAS_EXTRA_CACHE,
    )  # fmt: skip
    # As many pairs as the consumers: a CTA without tiles has one.
    pairs = gl.maximum((own.end - own.start + 1) // 2, 1)
    at = own.start + tile
    # A wait for phase 1 passes at first: half-tiles start empty.
    phase = 1
    slot = _slots(source, at)
    next_slot = _slots(source, at + 2)
    kv_valid, records, scales = _locate(source, slot, at, record)
    codes = _load_half(records, scales, kv_valid, tile, record, CODES, STATIC_HALF)
    state = ProducerState(kv_valid, records, scales, next_slot, at, phase, codes)
    # Whole rows: a piece of code for each half.
    if STATIC_HALF:
        for i in range(pairs):
            for later in gl.static_range(2):
                state = _half_step(state, later, i >> 20, smem, half_tiles, bars, source, tile, record, CODES, True)
    else:
        # Split rows: one piece, which walks half-tiles.
        for step in range(2 * pairs):
            zero = step >> 20
            state = _half_step(state, step & 1, zero, smem, half_tiles, bars, source, tile, record, CODES, False)
