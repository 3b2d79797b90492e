"""Producers of swap_ab over planar fp8 records, of one cache or two, as swap_ab_load has them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import signal, wait
from sparse_attn.device.triton_private import reinterpret
from sparse_attn.ops.attention.hopper.dequant import put_codes
from sparse_attn.ops.attention.hopper.seesaw import REST, TILE, UNIT, VALUE, WORD
from sparse_attn.ops.attention.hopper.swap_ab_load import (
    BLOCK,
    BUFFERS,
    EMPTY,
    FULL,
    READY,
    SHARE,
    await_room,
    bring_rest,
    copied_codes,
    copy_codes,
    copy_words,
    in_cache,
    own_keys,
    tile_slots,
)


@gluon.jit
def _planar_record(
    slots, tile, tiles, cache, num_slots, block_size, stride_block, extra_cache, extra_num_slots, extra_block_size,
    stride_extra_block, TOKEN: gl.constexpr, SCALES: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """(words of the tile's cache, int64 offsets of its keys' records and of their scales in words, which keys
    exist)."""
    valid = in_cache(slots, tile, tiles, num_slots, extra_num_slots, TWO)
    if TWO:
        later = tile >= tiles
        cache = gl.where(later, extra_cache, cache)
        block_size = gl.where(later, extra_block_size, block_size)
        stride_block = gl.where(later, stride_extra_block, stride_block)
    slots = gl.where(valid, slots, 0)
    block = slots // block_size
    start = block.to(gl.int64) * stride_block * (UNIT // WORD)
    inside = slots - block * block_size
    scales = start + block_size.to(gl.int64) * (TOKEN // WORD) + inside * (SCALES // WORD)
    return cache.to(gl.pointer_type(gl.int32), bitcast=True), start + inside * (TOKEN // WORD), scales, valid


@gluon.jit
def _power(exponents, first: gl.constexpr, GROUPS: gl.constexpr, CODES: gl.constexpr):
    """fp32 powers of two [SHARE, GROUPS] of ue8m0 bytes, the first of them in the low byte of a word >> 8 * first."""
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    bits = (gl.expand_dims(exponents, 1) >> gl.expand_dims((group + first) * 8, 0) & 0xFF) << 23
    return gl.where(bits == 0, 1 << 22, bits).to(gl.float32, bitcast=True)  # 2^-127 is subnormal


@gluon.jit
def _ask_planar(
    four, two, one, scales, half: gl.constexpr, words, record, scales_at, valid, bars, CODES: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The codes of half a tile, with the left ones all scales, not awaited."""
    if half == 0:
        copy_codes(four, words, record, valid, CODES)
        copy_words(scales, words, scales_at, valid, PAIRS)
    else:
        copy_codes(two, words + 4 * BLOCK, record, valid, CODES)
        copy_codes(one, words + 6 * BLOCK, record, valid, CODES)
    async_copy.mbarrier_arrive(bars[READY].index(half), increment_count=False)


@gluon.jit
def ask_planar(
    row, keys, four, two, one, scales, known, bars, indices, cache, num_slots, block_size, stride_block, extra_indices,
    extra_cache, extra_num_slots, extra_block_size, stride_extra_block, TOKEN: gl.constexpr, SCALES: gl.constexpr,
    TWO: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Of planar records: VALUE - REST codes in seven groups, their scales from behind a block's records, and REST bf16
    values."""
    wait()
    begin, count, extra_begin, extra_count, tiles, all_tiles = own_keys(row, TWO, SPLIT)
    indices += begin
    extra_indices += extra_begin
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    into = reinterpret(keys, gl.int32, [BUFFERS, TILE, VALUE // 2], WORD_TILES)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    slots = tile_slots(0, tiles, indices, count, extra_indices, extra_count, place, TWO)
    ahead = tile_slots(1, tiles, indices, count, extra_indices, extra_count, place, TWO)
    words, record, scales_at, valid = _planar_record(
        slots, 0, tiles, cache, num_slots, block_size, stride_block, extra_cache, extra_num_slots, extra_block_size,
        stride_extra_block, TOKEN, SCALES, TWO,
    )  # fmt: skip
    _ask_planar(four, two, one, scales, 0, words, record, scales_at, valid, bars, CODES, PAIRS)
    _ask_planar(four, two, one, scales, 1, words, record, scales_at, valid, bars, CODES, PAIRS)
    for tile in range(all_tiles):
        buffer = tile % BUFFERS
        next_words, next_record, next_scales, next_valid = _planar_record(
            ahead, tile + 1, tiles, cache, num_slots, block_size, stride_block, extra_cache, extra_num_slots,
            extra_block_size, stride_extra_block, TOKEN, SCALES, TWO,
        )  # fmt: skip
        ahead = tile_slots(tile + 2, tiles, indices, count, extra_indices, extra_count, place, TWO)
        if tile + 1 < all_tiles:
            mbarrier.wait(bars[EMPTY].index(0), tile & 1)
            _ask_planar(four, two, one, scales, 0, next_words, next_record, next_scales, next_valid, bars, CODES, PAIRS)
        rest = words + (VALUE - REST) // WORD
        bring_rest(into, (VALUE - REST) // 2, known, rest, record, valid, bars, tile, buffer, LANES)
        if tile + 1 < all_tiles:
            mbarrier.wait(bars[EMPTY].index(1), tile & 1)
            _ask_planar(four, two, one, scales, 1, next_words, next_record, next_scales, next_valid, bars, CODES, PAIRS)
        words = next_words
        record = next_record
        valid = next_valid


@gluon.jit
def put_planar(
    row,
    keys,
    four,
    two,
    one,
    scales,
    bars,
    which: gl.constexpr,
    GROUP: gl.constexpr,
    TWO: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """A share of every tile's codes, dequantised by ue8m0 scales."""
    wait()
    _, _, _, _, _, all_tiles = own_keys(row, TWO, SPLIT)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FIRST: gl.constexpr = which * SHARE
    into = reinterpret(keys, gl.int32, [BUFFERS, TILE, VALUE // 2], WORD_TILES)
    for tile in range(all_tiles):
        buffer = tile % BUFFERS
        mbarrier.wait(bars[READY].index(0), tile & 1)
        low, high = gl.split(scales.slice(FIRST, SHARE, dim=0).load(PAIRS))
        four_codes = copied_codes(four, FIRST, 4, GROUP, CODES)
        signal(bars[EMPTY].index(0))
        low = gl.convert_layout(low, KEYS)
        high = gl.convert_layout(high, KEYS)
        await_room(bars, tile, buffer)
        share = into.index(buffer).slice(FIRST, SHARE, dim=0)
        put_codes(share.slice(0, 2 * GROUP, dim=1), four_codes, _power(low, 0, 4, CODES))
        mbarrier.wait(bars[READY].index(1), tile & 1)
        two_codes = copied_codes(two, FIRST, 2, GROUP, CODES)
        one_codes = copied_codes(one, FIRST, 1, GROUP, CODES)
        signal(bars[EMPTY].index(1))
        put_codes(share.slice(2 * GROUP, GROUP, dim=1), two_codes, _power(high, 0, 2, CODES))
        put_codes(share.slice(3 * GROUP, GROUP // 2, dim=1), one_codes, _power(high, 2, 1, CODES))
        signal(bars[FULL].index(buffer))
