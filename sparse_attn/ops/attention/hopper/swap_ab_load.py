"""Producers of swap_ab: warpgroups that bring tiles of keys into shared memory as bf16. Here of bf16 rows and
of interleaved fp8 records; swap_ab_planar has those of the other form.

bf16 rows are copied by two, each SHARE keys of every tile. fp8 records take three. One asks: it keeps copies on their
way, past the registers and the L1, half a tile's codes at a time, and says which keys exist. What is bf16 goes to where
it is scored; codes and scales go to a place of their own, from where the other two, each SHARE keys of every tile,
dequantise them: code times scale in fp32, rounded once to bf16, and NaN codes stay NaN. So memory is busy while they
compute, and no load is awaited beside others, as ptxas has a thread await them all. Rows that an index does not name
are zeros.

The fence between these stores and the matrix unit is the consumer's, after its wait.

A list of tiles is the first cache's indices, then the second one's (TWO); a tile lies in one of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import async_load, signal, wait
from sparse_attn.device.triton_private import reinterpret
from sparse_attn.ops.attention.hopper.common import gather, row_range
from sparse_attn.ops.attention.hopper.dequant import put_codes
from sparse_attn.ops.attention.hopper.seesaw import HALF, REST, TILE, UNIT, VALUE, WORD

BLOCK = gl.constexpr(16)  # words: what keys' codes have side by side before they are dequantised
SHARE = gl.constexpr(32)  # keys of a tile that a producer brings
BUFFERS = gl.constexpr(2)
# mbarriers, two of each kind, in memory of its own: the compiler puts a barrier of the warpgroup between uses of one
# piece.
FULL = gl.constexpr(0)  # buffer filled, by all producers
SPENT = gl.constexpr(1)  # buffer read for the last time, by the consumer
READY = gl.constexpr(2)  # the codes of a tile's left or right half are there
EMPTY = gl.constexpr(3)  # they are in registers of those who dequantise them
KINDS = gl.constexpr(4)


@gluon.jit
def _part(begin, count, first, share):
    """What tiles [first, first + share) of a row, ``first`` possibly negative, leave of its (begin, count)."""
    skipped = gl.minimum(gl.maximum(first, 0) * TILE, count)
    end = gl.minimum(gl.maximum(first + share, 0) * TILE, count)
    return begin + skipped, gl.maximum(end - skipped, 0)


@gluon.jit
def own_keys(row, TWO: gl.constexpr, SPLIT: gl.constexpr):
    """Of this program's share of its row: (begin and count of the indices, and of those into the second cache; tiles of
    the first cache's keys, and of all)."""
    indptr, extra_indptr, capacity, extra_capacity = row
    token = gl.program_id(0)
    begin, count = row_range(indptr, token, capacity)
    extra_begin = 0
    extra_count = 0
    if TWO:
        extra_begin, extra_count = row_range(extra_indptr, token, extra_capacity)
    if SPLIT:  # the tiles of both rows count as one range
        tiles = (count + TILE - 1) // TILE
        both = tiles + (extra_count + TILE - 1) // TILE
        share = (both + gl.num_programs(1) - 1) // gl.num_programs(1)
        first = gl.program_id(1) * share
        begin, count = _part(begin, count, first, share)
        if TWO:
            extra_begin, extra_count = _part(extra_begin, extra_count, first - tiles, share)
    tiles = (count + TILE - 1) // TILE
    extra_tiles = (extra_count + TILE - 1) // TILE
    # An empty row has one, of keys that do not exist.
    return begin, count, extra_begin, extra_count, tiles, gl.maximum(tiles + extra_tiles, 1)


@gluon.jit
def tile_slots(tile, tiles, indices, count, extra_indices, extra_count, place, TWO: gl.constexpr):
    """What the lists say of a tile's keys, -1 behind their ends."""
    if TWO:
        later = tile >= tiles
        indices = gl.where(later, extra_indices, indices)
        count = gl.where(later, extra_count, count)
        tile = gl.where(later, tile - tiles, tile)
    at = tile * TILE + place
    return gl.load(indices + at, mask=at < count, other=-1)


@gluon.jit
def in_cache(slots, tile, tiles, num_slots, extra_num_slots, TWO: gl.constexpr):
    """Which of a tile's slots exist."""
    if TWO:
        num_slots = gl.where(tile >= tiles, extra_num_slots, num_slots)
    return (slots >= 0) & (slots < num_slots)


@gluon.jit
def await_room(bars, tile, buffer):
    """Until the ``buffer`` that ``tile`` takes was read for the last time."""
    mbarrier.wait(bars[SPENT].index(buffer), tile // BUFFERS & 1 ^ 1)


@gluon.jit
def _latent_offsets(slots, valid, block_size, stride_block, TOKEN: gl.constexpr, PAGED: gl.constexpr):
    """int64 offsets of records, in words."""
    slots = gl.where(valid, slots, 0)
    if PAGED:
        block = slots // block_size
        return block.to(gl.int64) * stride_block * (UNIT // WORD) + (slots - block * block_size) * (TOKEN // WORD)
    else:
        return slots.to(gl.int64) * (TOKEN // WORD)


@gluon.jit
def copy_codes(into, words, offsets, valid, CODES: gl.constexpr):
    """Codes of records, from ``words`` on, into [blocks, TILE, BLOCK]."""
    block = gl.arange(0, into.shape[0], layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    word = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    place = gl.expand_dims(offsets, 1) + gl.expand_dims(block * BLOCK, 0)
    pointers = words + gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    mask = gl.expand_dims(gl.expand_dims(valid, 1), 2)
    async_load(into.permute((1, 0, 2)), pointers, mask=mask)


@gluon.jit
def copied_codes(copied, FIRST: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr):
    """A share's, int32 [SHARE, GROUPS, GROUP / 4]."""
    codes = copied.slice(FIRST, SHARE, dim=1).permute((1, 0, 2)).load(CODES)
    return gl.convert_layout(gl.reshape(codes, [SHARE, GROUPS, GROUP // WORD]), CODES)


@gluon.jit
def copy_words(into, words, offsets, valid, LANES: gl.constexpr):
    """Words of records, from ``words`` on, into [TILE, words of a key]."""
    word = gl.arange(0, into.shape[1], layout=gl.SliceLayout(0, LANES))
    rows = gl.convert_layout(offsets, gl.SliceLayout(1, LANES))
    known = gl.convert_layout(valid, gl.SliceLayout(1, LANES))
    pointers = words + gl.expand_dims(rows, 1) + gl.expand_dims(word, 0)
    async_load(into, pointers, mask=gl.expand_dims(known, 1))


@gluon.jit
def bring_rest(into, first: gl.constexpr, known, words, record, valid, bars, tile, buffer, LANES: gl.constexpr):
    """The bf16 values of a tile, from ``words`` on, into the words of a buffer from ``first`` on, and which of its keys
    exist."""
    await_room(bars, tile, buffer)
    copy_words(into.index(buffer).slice(first, REST // 2, dim=1), words, record, valid, LANES)
    async_copy.mbarrier_arrive(bars[FULL].index(buffer), increment_count=False)
    known.index(buffer).store(valid.to(gl.int32))
    signal(bars[FULL].index(buffer))


@gluon.jit
def _ask_latents(
    halves, scales, half: gl.constexpr, words, record, valid, bars, CODES: gl.constexpr, LANES: gl.constexpr
):
    """The codes of half a tile, with the left ones all scales, not awaited."""
    copy_codes(halves.index(half), words + half * (HALF // WORD), record, valid, CODES)
    if half == 0:
        copy_words(scales, words + VALUE // WORD, record, valid, LANES)
    async_copy.mbarrier_arrive(bars[READY].index(half), increment_count=False)


@gluon.jit
def ask_latents(
    row, keys_rest, halves, scales, known, bars, indices, cache, num_slots, block_size, stride_block,
    TOKEN: gl.constexpr, REST_AT: gl.constexpr, PAGED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Of interleaved records: VALUE codes and their fp32 scales, and REST bf16 values."""
    wait()
    begin, count, _, _, _, tiles = own_keys(row, False, SPLIT)
    indices += begin
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    into_rest = reinterpret(keys_rest, gl.int32, [BUFFERS, TILE, REST // 2], WORD_TILES)
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    slots = tile_slots(0, tiles, indices, count, indices, count, place, False)
    ahead = tile_slots(1, tiles, indices, count, indices, count, place, False)
    valid = in_cache(slots, 0, tiles, num_slots, num_slots, False)
    record = _latent_offsets(slots, valid, block_size, stride_block, TOKEN, PAGED)
    _ask_latents(halves, scales, 0, words, record, valid, bars, CODES, LANES)
    _ask_latents(halves, scales, 1, words, record, valid, bars, CODES, LANES)
    for tile in range(tiles):
        buffer = tile % BUFFERS
        next_valid = in_cache(ahead, 0, tiles, num_slots, num_slots, False)
        next_record = _latent_offsets(ahead, next_valid, block_size, stride_block, TOKEN, PAGED)
        ahead = tile_slots(tile + 2, tiles, indices, count, indices, count, place, False)
        if tile + 1 < tiles:
            mbarrier.wait(bars[EMPTY].index(0), tile & 1)
            _ask_latents(halves, scales, 0, words, next_record, next_valid, bars, CODES, LANES)
        bring_rest(into_rest, 0, known, words + REST_AT // WORD, record, valid, bars, tile, buffer, LANES)
        if tile + 1 < tiles:
            mbarrier.wait(bars[EMPTY].index(1), tile & 1)
            _ask_latents(halves, scales, 1, words, next_record, next_valid, bars, CODES, LANES)
        valid = next_valid
        record = next_record


@gluon.jit
def put_latents(row, keys, halves, scales, bars, which: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr):
    """A share of every tile's codes, dequantised by fp32 scales."""
    wait()
    _, _, _, _, _, tiles = own_keys(row, False, SPLIT)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    GROUPS: gl.constexpr = VALUE // GROUP // 2  # of a half
    FIRST: gl.constexpr = which * SHARE
    into = reinterpret(keys, gl.int32, [BUFFERS, TILE, VALUE // 2], WORD_TILES)
    for tile in range(tiles):
        buffer = tile % BUFFERS
        mbarrier.wait(bars[READY].index(0), tile & 1)
        mine = scales.slice(FIRST, SHARE, dim=0)
        left_scales = mine.slice(0, GROUPS, dim=1).load(SCALES).to(gl.float32, bitcast=True)
        right_scales = mine.slice(GROUPS, GROUPS, dim=1).load(SCALES).to(gl.float32, bitcast=True)
        left = copied_codes(halves.index(0), FIRST, GROUPS, GROUP, CODES)
        signal(bars[EMPTY].index(0))
        await_room(bars, tile, buffer)
        share = into.index(buffer).slice(FIRST, SHARE, dim=0)
        put_codes(share.slice(0, HALF // 2, dim=1), left, left_scales)
        mbarrier.wait(bars[READY].index(1), tile & 1)
        right = copied_codes(halves.index(1), FIRST, GROUPS, GROUP, CODES)
        signal(bars[EMPTY].index(1))
        put_codes(share.slice(HALF // 2, HALF // 2, dim=1), right, right_scales)
        signal(bars[FULL].index(buffer))


@gluon.jit
def fill_rows(
    row, keys, keys_rest, known, bars, which: gl.constexpr, indices, kv, num_rows, stride_row, HAS_REST: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """bf16 rows, copied."""
    wait()
    begin, count, _, _, _, tiles = own_keys(row, False, SPLIT)
    indices += begin
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = which * SHARE
    place = gl.arange(0, SHARE, layout=gl.SliceLayout(1, LANES)) + FIRST
    slots = tile_slots(0, tiles, indices, count, indices, count, place, False)
    for tile in range(tiles):
        buffer = tile % BUFFERS
        valid = in_cache(slots, 0, tiles, num_rows, num_rows, False)
        rows = kv + slots.to(gl.int64) * stride_row * (UNIT // 2)
        slots = tile_slots(tile + 1, tiles, indices, count, indices, count, place, False)
        await_room(bars, tile, buffer)
        gather(keys.index(buffer).slice(FIRST, SHARE, dim=0), rows, valid, 0, VALUE, LANES)
        if HAS_REST:
            gather(keys_rest.index(buffer).slice(FIRST, SHARE, dim=0), rows, valid, VALUE, REST, LANES)
        async_copy.mbarrier_arrive(bars[FULL].index(buffer), increment_count=False)
        known.index(buffer).slice(FIRST, SHARE, dim=0).store(valid.to(gl.int32))
        signal(bars[FULL].index(buffer))
