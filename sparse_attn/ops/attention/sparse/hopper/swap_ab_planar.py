"""The producers of swap_ab over planar fp8 records, of one cache or two: a loader and two dequant warpgroups, as
swap_ab_load has them. Codes are seven groups of 64, of which four are the left half; scales are ue8m0 bytes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import signal, wait
from sparse_attn.device.triton_private import aggregate, reinterpret
from sparse_attn.ops.attention.sparse.hopper.common import BLOCK_N, D_ROPE, D_V, LOAD_BYTES, WORD_BYTES
from sparse_attn.ops.attention.sparse.hopper.dequant import dequant_codes
from sparse_attn.ops.attention.sparse.hopper.swap_ab_load import (
    CODE_WORDS,
    PRODUCER_KEYS,
    STAGES,
    TileSource,
    copy_codes,
    copy_words,
    in_cache,
    load_codes,
    load_rope,
    own_caches,
    own_tiles,
    tile_slots,
    wait_empty,
)


@aggregate
class PlanarCodes:
    """A tile of planar records on its way to the dequant warpgroups: int32 [groups, BLOCK_N, CODE_WORDS]."""

    left: gl.shared_memory_descriptor  # groups 0 to 3
    right: gl.shared_memory_descriptor  # groups 4 and 5
    last: gl.shared_memory_descriptor  # group 6
    scales: gl.shared_memory_descriptor  # int32 [BLOCK_N, SCALES / 4]: seven bytes and one of padding


@aggregate
class PlanarTile:
    """Where a tile's records lie: words of its cache, and int64 offsets of its keys in words."""

    words: gl.tensor
    offsets: gl.tensor
    scale_offsets: gl.tensor
    kv_valid: gl.tensor


@gluon.jit
def _locate(source, slots, tile, record):
    """The PlanarTile of ``slots``."""
    kv_valid = in_cache(source, slots, tile)
    cache = source.kv.cache
    block_size = source.kv.block_size
    stride_block = source.kv.stride_block
    # A tile lies in one of the caches.
    if source.HAS_EXTRA_CACHE:
        is_extra = tile >= source.own.tiles
        cache = gl.where(is_extra, source.extra_kv.cache, cache)
        block_size = gl.where(is_extra, source.extra_kv.block_size, block_size)
        stride_block = gl.where(is_extra, source.extra_kv.stride_block, stride_block)
    TOKEN: gl.constexpr = record.TOKEN // WORD_BYTES
    # Invalid slots are located at 0, and their copies are masked.
    slots = gl.where(kv_valid, slots, 0)
    block = slots // block_size
    start = block.to(gl.int64) * stride_block * (LOAD_BYTES // WORD_BYTES)
    # Codes by token, then all scales of a block behind all its records.
    inside = slots - block * block_size
    scales = start + block_size.to(gl.int64) * TOKEN + inside * (record.SCALES // WORD_BYTES)
    return PlanarTile(cache.to(gl.pointer_type(gl.int32), bitcast=True), start + inside * TOKEN, scales, kv_valid)


@gluon.jit
def _power(exponents, first: gl.constexpr, GROUPS: gl.constexpr, CODES: gl.constexpr):
    """fp32 powers of two [PRODUCER_KEYS, GROUPS] of ue8m0 bytes, the first of them in the low byte of a word >> 8 *
    first."""
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    bits = (gl.expand_dims(exponents, 1) >> gl.expand_dims((group + first) * 8, 0) & 0xFF) << 23
    return gl.where(bits == 0, 1 << 22, bits).to(gl.float32, bitcast=True)  # 2^-127 is subnormal


@gluon.jit
def _copy_half(codes, bars, half: gl.constexpr, tile, CODES: gl.constexpr, PAIRS: gl.constexpr):
    """The codes of half a tile, with the left ones all scales, not awaited."""
    # Four groups and the eight bytes of scales.
    if half == 0:
        copy_codes(codes.left, tile.words, tile.offsets, tile.kv_valid, CODES)
        copy_words(codes.scales, tile.words, tile.scale_offsets, tile.kv_valid, PAIRS)
    else:
        # Groups 4 and 5, and 6 by itself: memory is allocated in powers of two.
        copy_codes(codes.right, tile.words + 4 * CODE_WORDS, tile.offsets, tile.kv_valid, CODES)
        copy_codes(codes.last, tile.words + 6 * CODE_WORDS, tile.offsets, tile.kv_valid, CODES)
    async_copy.mbarrier_arrive(bars.codes_full.index(half), increment_count=False)


@gluon.jit
def load_planar(
    rows, smem, codes, bars, inputs, record, HAS_EXTRA_CACHE: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    """The loader over planar records: D_V - D_ROPE codes in seven groups, their scales from behind a block's records,
    and D_ROPE bf16 values."""
    wait()
    own = own_tiles(rows, HAS_EXTRA_CACHE, SPLIT)
    kv, extra_kv = own_caches(own, inputs, HAS_EXTRA_CACHE)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    k = reinterpret(smem.k, gl.int32, [STAGES, BLOCK_N, D_V // 2], WORD_TILES)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    source = TileSource(own, kv, extra_kv, key, HAS_EXTRA_CACHE)
    # Indices are read a tile ahead of codes, and codes a tile ahead of bf16 values.
    slots = tile_slots(source, 0)
    ahead = tile_slots(source, 1)
    here = _locate(source, slots, 0, record)
    # Memory for codes is empty at first: fill both halves without a wait.
    _copy_half(codes, bars, 0, here, CODES, PAIRS)
    _copy_half(codes, bars, 1, here, CODES, PAIRS)
    for tile in range(own.all_tiles):
        stage = tile % STAGES
        # Records of the next tile, from indices read a turn before.
        following = _locate(source, ahead, tile + 1, record)
        ahead = tile_slots(source, tile + 2)
        # The dequant warpgroups have this tile's left codes in registers.
        if tile + 1 < own.all_tiles:
            mbarrier.wait(bars.codes_empty.index(0), tile & 1)
            _copy_half(codes, bars, 0, following, CODES, PAIRS)
        rope = here.words + (D_V - D_ROPE) // WORD_BYTES
        load_rope(smem, bars, k, (D_V - D_ROPE) // 2, rope, here.offsets, here.kv_valid, tile, stage, ROWS)
        # The same for the right codes.
        if tile + 1 < own.all_tiles:
            mbarrier.wait(bars.codes_empty.index(1), tile & 1)
            _copy_half(codes, bars, 1, following, CODES, PAIRS)
        here = following


@gluon.jit
def dequant_planar(
    rows, smem, codes, bars, which: gl.constexpr, record, HAS_EXTRA_CACHE: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    """Dequant warpgroup ``which``: its keys of every tile, by ue8m0 scales."""
    wait()
    own = own_tiles(rows, HAS_EXTRA_CACHE, SPLIT)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    GROUP: gl.constexpr = record.GROUP
    FIRST: gl.constexpr = which * PRODUCER_KEYS
    k = reinterpret(smem.k, gl.int32, [STAGES, BLOCK_N, D_V // 2], WORD_TILES)
    for tile in range(own.all_tiles):
        stage = tile % STAGES
        # Left codes, and all scales of the tile: groups 0 to 3 in one word, 4 to 6 in the other.
        mbarrier.wait(bars.codes_full.index(0), tile & 1)
        low, high = gl.split(codes.scales.slice(FIRST, PRODUCER_KEYS, dim=0).load(PAIRS))
        left = load_codes(codes.left, FIRST, 4, GROUP, CODES)
        signal(bars.codes_empty.index(0))
        low = gl.convert_layout(low, KEYS)
        high = gl.convert_layout(high, KEYS)
        # The consumer has read the stage's tile before.
        wait_empty(bars, tile, stage)
        keys = k.index(stage).slice(FIRST, PRODUCER_KEYS, dim=0)
        dequant_codes(keys.slice(0, 2 * GROUP, dim=1), left, _power(low, 0, 4, CODES))
        # Three groups of the right half. The loader has filled the last 64 columns.
        mbarrier.wait(bars.codes_full.index(1), tile & 1)
        right = load_codes(codes.right, FIRST, 2, GROUP, CODES)
        last = load_codes(codes.last, FIRST, 1, GROUP, CODES)
        signal(bars.codes_empty.index(1))
        dequant_codes(keys.slice(2 * GROUP, GROUP, dim=1), right, _power(high, 0, 2, CODES))
        dequant_codes(keys.slice(3 * GROUP, GROUP // 2, dim=1), last, _power(high, 2, 1, CODES))
        signal(bars.k_full.index(stage))
