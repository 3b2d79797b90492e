"""The producers of swap_ab: warpgroups that fill tiles of keys in shared memory with bf16. Here over bf16 rows and over
interleaved fp8 records; swap_ab_planar has those over planar records.

bf16 rows: two producers copy PRODUCER_KEYS keys of every tile each. fp8 records: one loader and two dequant warpgroups.

    loader   copies half a tile's codes at a time, past the registers and the L1, into memory of their own, with the
             first half all scales; copies bf16 values to where they are scored; signals which keys are valid
    dequant  PRODUCER_KEYS keys of every tile each: reads codes and scales out of shared memory, multiplies in fp32 and
             rounds once to bf16 (NaN codes stay NaN), stores them into the tile

So memory is busy while they compute, and no load is awaited beside others, as ptxas has a thread await them all. Rows
that no index names are zeros. The fence between these stores and the matrix unit is the consumer's, after its wait.

A row's tiles are those of the first cache's indices, then those of the second (HAS_EXTRA_CACHE); a tile lies in one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparse_attn.device.hopper import async_load, signal, wait
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
from sparse_attn.ops.attention.sparse.hopper.dequant import dequant_codes

CODE_WORDS = gl.constexpr(16)  # of codes side by side, in memory of their own
PRODUCER_KEYS = gl.constexpr(32)  # keys of a tile that a producer stores
STAGES = gl.constexpr(2)


@aggregate
class Shared:
    """Shared memory of a CTA, but for codes: bf16 tiles, then vectors."""

    q: gl.shared_memory_descriptor  # [1, BLOCK_M, D_V]
    q_rope: gl.shared_memory_descriptor | gl.constexpr  # [1, BLOCK_M, D_ROPE]; None without HAS_ROPE
    k: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, D_V]
    k_rope: gl.shared_memory_descriptor | gl.constexpr  # [STAGES, BLOCK_N, D_ROPE]; None without HAS_ROPE
    kv_valid: gl.shared_memory_descriptor  # int32 [STAGES, BLOCK_N]
    p: gl.shared_memory_descriptor  # [1, BLOCK_N, BLOCK_M]: P^T
    warp_max: gl.shared_memory_descriptor  # fp32 [1, WARPS, BLOCK_M]: each warp's largest product of every head
    p_max: gl.shared_memory_descriptor  # fp32 [1, WARPS]: each warp's largest P
    HAS_ROPE: gl.constexpr


@aggregate
class Barriers:
    """mbarriers, two of each kind, a kind in memory of its own: between uses of one piece the compiler would put a
    barrier of the warpgroup."""

    k_full: gl.shared_memory_descriptor  # of a stage, by all producers
    k_empty: gl.shared_memory_descriptor  # of a stage, by the consumer
    codes_full: gl.shared_memory_descriptor | gl.constexpr  # of half a tile's codes, by the loader; fp8 caches
    codes_empty: gl.shared_memory_descriptor | gl.constexpr  # they are in the dequant warpgroups' registers


@aggregate
class LatentCodes:
    """A tile of interleaved records on its way to the dequant warpgroups."""

    halves: gl.shared_memory_descriptor  # int32 [2, 4, BLOCK_N, CODE_WORDS]
    scales: gl.shared_memory_descriptor  # int32 [BLOCK_N, D_V / GROUP], which are fp32


@aggregate
class Inputs:
    """What producers read in global memory, as the kernel's arguments of these names."""

    indices: gl.tensor
    cache: gl.tensor
    num_slots: Scalar
    block_size: Scalar
    stride_cache: Scalar
    extra_indices: gl.tensor
    extra_cache: gl.tensor
    extra_num_slots: Scalar
    extra_block_size: Scalar
    stride_extra: Scalar


@aggregate
class TileRange:
    """A CTA's share of its row: indices into both caches, tiles of the first cache's keys, and of all."""

    begin: Scalar
    count: Scalar
    extra_begin: Scalar
    extra_count: Scalar
    tiles: Scalar
    all_tiles: Scalar


@aggregate
class TileSource:
    """Where a producer reads a row's tiles from."""

    own: TileRange
    kv: KvCache
    extra_kv: KvCache
    key: gl.tensor  # of a tile
    HAS_EXTRA_CACHE: gl.constexpr


@gluon.jit
def _clip(begin, count, first, tiles):
    """What tiles [first, first + tiles) of a row, ``first`` possibly negative, leave of its (begin, count)."""
    # Keys, not tiles, are clipped: a row's last tile may be short.
    skipped = gl.minimum(gl.maximum(first, 0) * BLOCK_N, count)
    end = gl.minimum(gl.maximum(first + tiles, 0) * BLOCK_N, count)
    return begin + skipped, gl.maximum(end - skipped, 0)


@gluon.jit
def own_tiles(rows, HAS_EXTRA_CACHE: gl.constexpr, SPLIT: gl.constexpr):
    """The TileRange of this CTA."""
    token = gl.program_id(0)
    begin, count = row_range(rows.indptr, rows.lengths, token, rows.capacity)
    extra_begin = 0
    extra_count = 0
    if HAS_EXTRA_CACHE:
        extra_begin, extra_count = row_range(rows.extra_indptr, rows.extra_lengths, token, rows.extra_capacity)
    if SPLIT:  # the tiles of both caches count as one range
        tiles = (count + BLOCK_N - 1) // BLOCK_N
        both = tiles + (extra_count + BLOCK_N - 1) // BLOCK_N
        tiles_per_split = (both + gl.num_programs(1) - 1) // gl.num_programs(1)
        first = gl.program_id(1) * tiles_per_split
        # Each cache loses what lies outside this CTA's share.
        begin, count = _clip(begin, count, first, tiles_per_split)
        if HAS_EXTRA_CACHE:
            extra_begin, extra_count = _clip(extra_begin, extra_count, first - tiles, tiles_per_split)
    tiles = (count + BLOCK_N - 1) // BLOCK_N
    extra_tiles = (extra_count + BLOCK_N - 1) // BLOCK_N
    # An empty row has one, of keys that do not exist.
    return TileRange(begin, count, extra_begin, extra_count, tiles, gl.maximum(tiles + extra_tiles, 1))


@gluon.jit
def own_caches(own, inputs, HAS_EXTRA_CACHE: gl.constexpr):
    """Both caches with the indices into them from ``own``'s first on; the first one twice without HAS_EXTRA_CACHE."""
    indices = inputs.indices + own.begin
    kv = KvCache(inputs.cache, indices, inputs.num_slots, inputs.block_size, inputs.stride_cache)
    if HAS_EXTRA_CACHE:
        indices = inputs.extra_indices + own.extra_begin
        return kv, KvCache(
            inputs.extra_cache, indices, inputs.extra_num_slots, inputs.extra_block_size, inputs.stride_extra
        )
    else:
        return kv, kv


@gluon.jit
def tile_slots(source, tile):
    """The indices of a tile's keys, -1 beyond the row."""
    indices = source.kv.indices
    count = source.own.count
    if source.HAS_EXTRA_CACHE:
        is_extra = tile >= source.own.tiles
        indices = gl.where(is_extra, source.extra_kv.indices, indices)
        count = gl.where(is_extra, source.own.extra_count, count)
        tile = gl.where(is_extra, tile - source.own.tiles, tile)
    at = tile * BLOCK_N + source.key
    return gl.load(indices + at, mask=at < count, other=-1)


@gluon.jit
def in_cache(source, slots, tile):
    """Which of a tile's slots exist."""
    num_slots = source.kv.num_slots
    if source.HAS_EXTRA_CACHE:
        num_slots = gl.where(tile >= source.own.tiles, source.extra_kv.num_slots, num_slots)
    return (slots >= 0) & (slots < num_slots)


@gluon.jit
def wait_empty(bars, tile, stage):
    """Wait until the ``stage`` that ``tile`` takes was read for the last time."""
    mbarrier.wait(bars.k_empty.index(stage), tile // STAGES & 1 ^ 1)


@gluon.jit
def _latent_offsets(source, slots, kv_valid, record):
    """int64 offsets of records, in words."""
    TOKEN: gl.constexpr = record.TOKEN // WORD_BYTES
    # Invalid slots are located at record 0, and their copies are masked.
    slots = gl.where(kv_valid, slots, 0)
    # A block may have padding behind it; stride_block is in LOAD_BYTES.
    if record.PADDED_BLOCKS:
        block_size = source.kv.block_size
        block = slots // block_size
        stride = source.kv.stride_block
        return block.to(gl.int64) * stride * (LOAD_BYTES // WORD_BYTES) + (slots - block * block_size) * TOKEN
    else:
        return slots.to(gl.int64) * TOKEN


@gluon.jit
def copy_codes(into, words, offsets, kv_valid, CODES: gl.constexpr):
    """Codes of records, from ``words`` on, into [blocks, BLOCK_N, CODE_WORDS]; not awaited."""
    # Blocks of 64 bytes: their rows lie side by side in shared memory.
    block = gl.arange(0, into.shape[0], layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    word = gl.arange(0, CODE_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CODES)))
    place = gl.expand_dims(offsets, 1) + gl.expand_dims(block * CODE_WORDS, 0)
    pointers = words + gl.expand_dims(place, 2) + gl.expand_dims(gl.expand_dims(word, 0), 0)
    mask = gl.expand_dims(gl.expand_dims(kv_valid, 1), 2)
    # Masked copies write zeros: a key that does not exist has codes 0.
    async_load(into.permute((1, 0, 2)), pointers, mask=mask)


@gluon.jit
def load_codes(codes, FIRST: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, CODES: gl.constexpr):
    """A dequant warpgroup's codes out of shared memory: int32 [PRODUCER_KEYS, GROUPS, GROUP / 4]."""
    # Threads hold a key's words as they lie in the blocks; then by group.
    own = codes.slice(FIRST, PRODUCER_KEYS, dim=1).permute((1, 0, 2)).load(CODES)
    return gl.convert_layout(gl.reshape(own, [PRODUCER_KEYS, GROUPS, GROUP // WORD_BYTES]), CODES)


@gluon.jit
def copy_words(into, words, offsets, kv_valid, ROWS: gl.constexpr):
    """Words of records, from ``words`` on, into [BLOCK_N, words of a key]; not awaited."""
    word = gl.arange(0, into.shape[1], layout=gl.SliceLayout(0, ROWS))
    # A record's threads change: offsets are found in the layout of codes.
    rows = gl.convert_layout(offsets, gl.SliceLayout(1, ROWS))
    valid = gl.convert_layout(kv_valid, gl.SliceLayout(1, ROWS))
    pointers = words + gl.expand_dims(rows, 1) + gl.expand_dims(word, 0)
    async_load(into, pointers, mask=gl.expand_dims(valid, 1))


@gluon.jit
def load_rope(
    smem, bars, into, first: gl.constexpr, words, offsets, kv_valid, tile, stage, ROWS: gl.constexpr
):  # fmt: skip
    """The bf16 values of a tile, from ``words`` on, into the words of ``into``'s stage from ``first`` on, and which of
    its keys are valid."""
    # The consumer has read the stage's tile before.
    wait_empty(bars, tile, stage)
    copy_words(into.index(stage).slice(first, D_ROPE // 2, dim=1), words, offsets, kv_valid, ROWS)
    # Each thread arrives once its copies have landed, and one signals kv_valid.
    async_copy.mbarrier_arrive(bars.k_full.index(stage), increment_count=False)
    smem.kv_valid.index(stage).store(kv_valid.to(gl.int32))
    signal(bars.k_full.index(stage))


@gluon.jit
def _copy_half(
    codes, bars, half: gl.constexpr, words, offsets, kv_valid, CODES: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """The codes of half a tile, with the left ones all scales, not awaited."""
    copy_codes(codes.halves.index(half), words + half * (D_V // 2 // WORD_BYTES), offsets, kv_valid, CODES)
    if half == 0:
        copy_words(codes.scales, words + D_V // WORD_BYTES, offsets, kv_valid, ROWS)
    async_copy.mbarrier_arrive(bars.codes_full.index(half), increment_count=False)


@gluon.jit
def load_latents(rows, smem, codes, bars, inputs, record, SPLIT: gl.constexpr):
    """The loader over interleaved records: D_V codes and their fp32 scales, and D_ROPE bf16 values."""
    wait()
    own = own_tiles(rows, False, SPLIT)
    kv, _ = own_caches(own, inputs, False)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    k_rope = reinterpret(smem.k_rope, gl.int32, [STAGES, BLOCK_N, D_ROPE // 2], WORD_TILES)
    words = kv.cache.to(gl.pointer_type(gl.int32), bitcast=True)
    key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    source = TileSource(own, kv, kv, key, False)
    # Indices are read a tile ahead of codes, and codes a tile ahead of RoPE columns.
    slots = tile_slots(source, 0)
    ahead = tile_slots(source, 1)
    kv_valid = in_cache(source, slots, 0)
    offsets = _latent_offsets(source, slots, kv_valid, record)
    # Memory for codes is empty at first: fill both halves without a wait.
    _copy_half(codes, bars, 0, words, offsets, kv_valid, CODES, ROWS)
    _copy_half(codes, bars, 1, words, offsets, kv_valid, CODES, ROWS)
    for tile in range(own.all_tiles):
        stage = tile % STAGES
        # Records of the next tile, from indices read a turn before.
        next_valid = in_cache(source, ahead, 0)
        next_offsets = _latent_offsets(source, ahead, next_valid, record)
        ahead = tile_slots(source, tile + 2)
        # The dequant warpgroups have this tile's left codes in registers.
        if tile + 1 < own.all_tiles:
            mbarrier.wait(bars.codes_empty.index(0), tile & 1)
            _copy_half(codes, bars, 0, words, next_offsets, next_valid, CODES, ROWS)
        # This tile's RoPE columns go straight to where they are scored.
        rope = words + record.ROPE_OFFSET // WORD_BYTES
        load_rope(smem, bars, k_rope, 0, rope, offsets, kv_valid, tile, stage, ROWS)
        # The same for the right codes.
        if tile + 1 < own.all_tiles:
            mbarrier.wait(bars.codes_empty.index(1), tile & 1)
            _copy_half(codes, bars, 1, words, next_offsets, next_valid, CODES, ROWS)
        kv_valid = next_valid
        offsets = next_offsets


@gluon.jit
def dequant_latents(rows, smem, codes, bars, which: gl.constexpr, record, SPLIT: gl.constexpr):
    """Dequant warpgroup ``which``: its keys of every tile, by fp32 scales."""
    wait()
    own = own_tiles(rows, False, SPLIT)
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0])
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    WORD_TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    GROUP: gl.constexpr = record.GROUP
    GROUPS: gl.constexpr = D_V // GROUP // 2  # of a half
    FIRST: gl.constexpr = which * PRODUCER_KEYS
    k = reinterpret(smem.k, gl.int32, [STAGES, BLOCK_N, D_V // 2], WORD_TILES)
    for tile in range(own.all_tiles):
        stage = tile % STAGES
        # Left codes, and all scales of the tile.
        mbarrier.wait(bars.codes_full.index(0), tile & 1)
        scales = codes.scales.slice(FIRST, PRODUCER_KEYS, dim=0)
        left_scales = scales.slice(0, GROUPS, dim=1).load(SCALES).to(gl.float32, bitcast=True)
        right_scales = scales.slice(GROUPS, GROUPS, dim=1).load(SCALES).to(gl.float32, bitcast=True)
        # Everything into registers, so that the loader may refill at once.
        left = load_codes(codes.halves.index(0), FIRST, GROUPS, GROUP, CODES)
        signal(bars.codes_empty.index(0))
        # The consumer has read the stage's tile before.
        wait_empty(bars, tile, stage)
        keys = k.index(stage).slice(FIRST, PRODUCER_KEYS, dim=0)
        dequant_codes(keys.slice(0, D_V // 2 // 2, dim=1), left, left_scales)
        mbarrier.wait(bars.codes_full.index(1), tile & 1)
        right = load_codes(codes.halves.index(1), FIRST, GROUPS, GROUP, CODES)
        signal(bars.codes_empty.index(1))
        dequant_codes(keys.slice(D_V // 2 // 2, D_V // 2 // 2, dim=1), right, right_scales)
        # Both halves of these keys are in the tile.
        signal(bars.k_full.index(stage))


@gluon.jit
def load_rows(rows, smem, bars, which: gl.constexpr, inputs, SPLIT: gl.constexpr):
    """Producer ``which`` over bf16 rows: copies its keys of every tile."""
    wait()
    own = own_tiles(rows, False, SPLIT)
    kv, _ = own_caches(own, inputs, False)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = which * PRODUCER_KEYS
    key = gl.arange(0, PRODUCER_KEYS, layout=gl.SliceLayout(1, ROWS)) + FIRST
    source = TileSource(own, kv, kv, key, False)
    slots = tile_slots(source, 0)
    for tile in range(own.all_tiles):
        stage = tile % STAGES
        # Pointers of this tile, and indices of the next one, before the wait.
        kv_valid = in_cache(source, slots, 0)
        pointers = kv.cache + slots.to(gl.int64) * kv.stride_block * (LOAD_BYTES // 2)
        slots = tile_slots(source, tile + 1)
        # The consumer has read the stage's tile before.
        wait_empty(bars, tile, stage)
        gather(smem.k.index(stage).slice(FIRST, PRODUCER_KEYS, dim=0), pointers, kv_valid, 0, D_V, ROWS)
        if smem.HAS_ROPE:
            gather(smem.k_rope.index(stage).slice(FIRST, PRODUCER_KEYS, dim=0), pointers, kv_valid, D_V, D_ROPE, ROWS)
        # Each thread arrives once its copies have landed, and one signals kv_valid.
        async_copy.mbarrier_arrive(bars.k_full.index(stage), increment_count=False)
        smem.kv_valid.index(stage).slice(FIRST, PRODUCER_KEYS, dim=0).store(kv_valid.to(gl.int32))
        signal(bars.k_full.index(stage))
