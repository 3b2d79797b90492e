"""The seesaw: what two consumer warpgroups do with a pair of 64-key tiles, K0 and K1. FlashMLA's schedule.

wg0 scores K0 and owns output columns [0, 256); wg1 scores K1 and owns [256, 512). V is K's first D_V columns. Each
multiplies its own P out of registers and the other's out of shared memory; per pair they agree on one lagged maximum.

    wg0:  Q K0 | max -> wg1 | P0 | acc += P0 V0l | max <- wg1 | P0 -> wg1, rescaled | P1 <- wg1 | acc += P1 V1l, Q K0
    wg1:  Q K1 | max <- wg0 | max -> wg0 | P1 | acc += P1 V1r, P1 -> wg0 | P0 <- wg0 | acc += P0 V0r

Producers fill half-tiles (256 columns) in the order in which the consumers free them: K0 left, K1 right, K0 right, K1
left. RoPE columns arrive with a tile's left half; those of K1 make room for P0 once they were scored.

Floor: wg0's chain of scores, maximum and exponentials, between its two PV. README.md has the barriers, the
shared-memory map and the schedule of each kernel that runs the seesaw: prefill_bf16 (PERSISTENT: row after row) and
decode_fp8 (one row).

Shared memory is indexed by an opaque zero made in the loop, because otherwise every matrix descriptor is hoisted out of
it and spilled; by ``here`` those of a product are computed behind the one before. ``mbarrier.arrive`` is one thread and
waits for nobody: a barrier of the warpgroup stands before each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparse_attn.device.hopper import here, signal
from sparse_attn.device.triton_private import aggregate
from sparse_attn.ops.attention.sparse.hopper.common import BLOCK_M, BLOCK_N, D_ROPE, D_V, Scalar, normalise
from sparse_attn.ops.attention.sparse.hopper.lazy_rescale import (
    denominator,
    lagged_max,
    origin,
    rescale_acc,
    rescale_factor,
    rescale_p,
)

# Half-tiles, 2 * tile + half: columns [0, 256) and [256, 512) of K0 and K1.
K0L, K0R, K1L, K1R = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)

# [BLOCK_M, D_V // 2] as an accumulator's threads hold it, 8 bytes of a row each: only a row's four threads exchange
# columns.
OUT_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)

# The same in the order in which a thread holds them, 16 bytes of a row each: nothing is exchanged.
PARTIAL_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)


@aggregate
class Shared:
    """Shared memory of a CTA: bf16 tiles, then fp32 and int32 vectors."""

    q: gl.shared_memory_descriptor  # [1, BLOCK_M, D_V]
    q_rope: gl.shared_memory_descriptor | gl.constexpr  # [1, BLOCK_M, D_ROPE]; None without HAS_ROPE
    k: gl.shared_memory_descriptor  # [2, BLOCK_N, D_V]: K0 and K1
    k_rope: gl.shared_memory_descriptor | gl.constexpr  # [2, BLOCK_N, D_ROPE]; None without HAS_ROPE
    p1: gl.shared_memory_descriptor  # [1, BLOCK_M, BLOCK_N]
    p0: gl.shared_memory_descriptor  # at [HAS_ROPE]: with RoPE columns those of K1, which were scored by then
    row_max: gl.shared_memory_descriptor  # fp32 [BLOCK_M]
    row_sum: gl.shared_memory_descriptor  # fp32 [2, BLOCK_M]: of wg0 and wg1
    kv_valid: gl.shared_memory_descriptor | gl.constexpr  # int32 [2, BLOCK_N], of K0 and K1; None if PERSISTENT
    work_tile: gl.shared_memory_descriptor | gl.constexpr  # int32 [4, 1]; None unless PERSISTENT
    row_largest: gl.shared_memory_descriptor | gl.constexpr  # fp32 [BLOCK_M], of wg1; None without HAS_MAX
    HAS_ROPE: gl.constexpr
    HAS_MAX: gl.constexpr  # rows' largest products are wanted


@aggregate
class Barriers:
    """mbarriers, each an allocation of its own: between uses of one piece of shared memory the compiler would put a
    barrier of the warpgroup."""

    k_full: gl.tuple  # of half-tile 2 * tile + half, by a producer
    k_empty: gl.tuple  # of the same, by the consumer that reads it last
    max0_full: gl.shared_memory_descriptor  # wg0's maximum lies in row_max
    max1_full: gl.shared_memory_descriptor  # the maximum of both tiles lies in row_max
    p0_full: gl.shared_memory_descriptor
    p1_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor  # PERSISTENT


@aggregate
class OutputTile:
    """Where a CTA's rows go: pointers to its first head."""

    out: gl.tensor
    lse: Scalar  # None for wg1 of a persistent kernel
    scale: Scalar  # of fp16 partials; else anything
    sink: gl.tensor
    stride_head: Scalar
    INF_LSE: gl.constexpr  # as normalise takes it


@gluon.jit
def _allocate_barriers(COUNT: gl.constexpr):
    bars = ()
    for _ in gl.static_range(COUNT):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    return bars


@gluon.jit
def allocate(HAS_ROPE: gl.constexpr, PERSISTENT: gl.constexpr, HAS_MAX: gl.constexpr):
    """(Shared, Barriers) of a CTA; barriers are not initialised."""
    # bf16 tiles are swizzled as the matrix unit reads them; vectors are flat.
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, D_V], TILES)
    k = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, D_V], TILES)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, BLOCK_N], TILES)
    row_max = gl.allocate_shared_memory(gl.float32, [BLOCK_M], FLAT)
    row_sum = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], FLAT)
    if PERSISTENT:
        kv_valid: gl.constexpr = None
        work_tile = gl.allocate_shared_memory(gl.int32, [4, 1], FLAT)
    else:
        kv_valid = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N], FLAT)
        work_tile: gl.constexpr = None
    if HAS_MAX:
        row_largest = gl.allocate_shared_memory(gl.float32, [BLOCK_M], FLAT)
    else:
        row_largest: gl.constexpr = None
    k_full = _allocate_barriers(4)
    k_empty = _allocate_barriers(4)
    max0_full, max1_full, p0_full, p1_full, q_full, q_empty = _allocate_barriers(6)
    # Once K1's RoPE columns are scored, P0 takes their place.
    if HAS_ROPE:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, D_ROPE], TILES)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, D_ROPE], TILES)
        p0 = k_rope
    else:
        q_rope: gl.constexpr = None
        k_rope: gl.constexpr = None
        p0 = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, BLOCK_N], TILES)
    smem = Shared(
        q, q_rope, k, k_rope, p1, p0, row_max, row_sum, kv_valid, work_tile, row_largest, HAS_ROPE, HAS_MAX
    )  # fmt: skip
    return smem, Barriers(k_full, k_empty, max0_full, max1_full, p0_full, p1_full, q_full, q_empty)


@gluon.jit
def release(bar, EACH: gl.constexpr):
    """This warpgroup has read what it was given. EACH: every thread arrives for itself, which takes no barrier; else
    one for all. (Nothing is handed over that a thread wrote: that needs ``signal``.)"""
    if EACH:
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        signal(bar)


@gluon.jit
def wait_k(bars, which: gl.constexpr, phase):
    """Wait for half-tile ``which``, 2 * tile + half, and make its stores seen by the matrix unit."""
    mbarrier.wait(bars.k_full[which], phase)
    fence_async_shared()


@gluon.jit
def half_of(tile, half: gl.constexpr):
    """Columns [0, 256) or [256, 512) of a tile."""
    return tile.slice(half * (D_V // 2), D_V // 2, dim=1)


@gluon.jit
def _qk_half(q, k, scores, half: gl.constexpr, FIRST: gl.constexpr):
    """scores (+)= Q times half a tile, not awaited."""
    return warpgroup_mma(half_of(q, half), half_of(k, half).permute((1, 0)), scores, use_acc=not FIRST, is_async=True)


@gluon.jit
def _qk_rope(q_rope, k_rope, scores):
    return warpgroup_mma(q_rope, k_rope.permute((1, 0)), scores, is_async=True)


@gluon.jit
def qk0_left(smem, zero, scores):
    # The first product overwrites the accumulator: nobody has to clear it.
    """K0's scores by its left half and its RoPE columns, not awaited. scores: of this type, not read."""
    zero = here(zero)
    scores = _qk_half(smem.q.index(zero), smem.k.index(zero), scores, 0, True)
    if smem.HAS_ROPE:
        zero = here(zero)
        scores = _qk_rope(smem.q_rope.index(zero), smem.k_rope.index(zero), scores)
    return scores


@gluon.jit
def qk0_half(smem, bars, zero, phase, scores, half: gl.constexpr):
    """Wait for half of K0 and score it, the left one first; not awaited."""
    wait_k(bars, half, phase)
    if half == 0:
        return qk0_left(smem, zero, scores)
    else:
        zero = here(zero)
        return _qk_half(smem.q.index(zero), smem.k.index(zero), scores, 1, False)


@gluon.jit
def qk1(smem, bars, zero, phase):
    """Wait for K1 and score it, the right half first; not awaited."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    # The right half first: it is freed, and so filled, before the left one.
    scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    wait_k(bars, K1R, phase)
    zero = here(zero)
    scores = _qk_half(smem.q.index(zero), smem.k.index(zero + 1), scores, 1, True)
    wait_k(bars, K1L, phase)
    zero = here(zero)
    scores = _qk_half(smem.q.index(zero), smem.k.index(zero + 1), scores, 0, False)
    # K1's RoPE columns are full with its left half.
    if smem.HAS_ROPE:
        zero = here(zero)
        scores = _qk_rope(smem.q_rope.index(zero), smem.k_rope.index(zero + 1), scores)
    return scores


@gluon.jit
def largest_product(largest, scores, kv_valid):
    """``largest`` [BLOCK_M], and what a tile's valid keys have."""
    z = gl.where(gl.expand_dims(kv_valid, 0), scores, -float("inf"))
    return gl.maximum(largest, gl.max(z, 1))


@gluon.jit
def wg0_pair(
    scores, kv_valid, acc, m, l, smem, bars, scale_log2, zero, phase, last, PERSISTENT: gl.constexpr
):  # fmt: skip
    """wg0's part of a pair, from K0's scores on: (acc with P1 V1l not awaited, m, l). kv_valid: which keys of K0 a row
    attends. PERSISTENT: after the ``last`` pair of a row Q's memory is wanted for the next one's."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    # Masked scores are -inf, so that their P is 0. The maximum covers K0 alone so far.
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    z = gl.where(gl.expand_dims(kv_valid, 0), scores, -float("inf"))
    m_new = lagged_max(m, gl.max(z, 1), scale_log2)
    scale, base = origin(m_new, scale_log2)
    # P0 relative to that maximum; wg1 may raise it while this runs.
    rescale = rescale_factor(m, m_new, scale_log2)
    p0 = gl.exp2(z * gl.expand_dims(scale, 1) - gl.expand_dims(base, 1))
    l = l * rescale + gl.sum(p0, 1)
    m = m_new
    # Hand the maximum to wg1, which raises it by K1's.
    smem.row_max.store(m_new)
    signal(bars.max0_full)
    # All scores of the row are done: the producer may copy the next queries.
    if PERSISTENT:
        if last:
            release(bars.q_empty, True)
    # P0 V0l, with P0 out of registers.
    acc = rescale_acc(acc, rescale)
    p0_operand = gl.convert_layout(p0.to(gl.bfloat16), OPERAND)
    zero = here(zero)
    acc = warpgroup_mma(p0_operand, half_of(smem.k.index(zero), 0), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    # wg0 alone reads K0l, for the last time here.
    release(bars.k_empty[K0L], PERSISTENT)
    # wg1 has left the maximum of both tiles. Bring the sum and P0 to it.
    mbarrier.wait(bars.max1_full, phase)
    m_new = smem.row_max.load(ROW)
    rescale = rescale_factor(m, m_new, scale_log2)
    l = l * rescale
    smem.row_sum.index(0).store(l)  # p0_full hands it over, too: wg1 reads it after the last pair
    if not PERSISTENT and not smem.HAS_ROPE:  # elsewhere nothing is gained, or registers are spilled
        smem.p0.index(zero).store(rescale_p(p0_operand, rescale))
    else:
        smem.p0.index(zero + smem.HAS_ROPE).store((p0 * gl.expand_dims(rescale, 1)).to(gl.bfloat16))
    # P0 was stored by threads, and wg1's matrix unit reads it.
    fence_async_shared()
    signal(bars.p0_full)
    # Only now is acc relative to the maximum that P1 has.
    acc = rescale_acc(acc, rescale)
    mbarrier.wait(bars.p1_full, phase)
    zero = here(zero)
    pv1 = warpgroup_mma(smem.p1.index(zero), half_of(smem.k.index(zero + 1), 0), acc, is_async=True)
    return pv1, m_new, l


@gluon.jit
def wg1_pair(
    scores, kv_valid, acc, m, l, largest, smem, bars, scale_log2, zero, phase, last, PERSISTENT: gl.constexpr
):  # fmt: skip
    """wg1's part of a pair, from K1's scores on: (acc, m, l). kv_valid, last: as wg0_pair has them. HAS_MAX:
    ``largest`` [BLOCK_M] goes to wg0 beside the row sum. By then wg0 has read both of the row before."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    # As in wg0_pair, but the maximum continues from wg0's.
    z = gl.where(gl.expand_dims(kv_valid, 0), scores, -float("inf"))
    tile_max = gl.max(z, 1)
    mbarrier.wait(bars.max0_full, phase)
    m_new = lagged_max(smem.row_max.load(ROW), tile_max, scale_log2)
    # wg0 rescales its P0 to this maximum.
    smem.row_max.store(m_new)
    signal(bars.max1_full)
    # All scores of the row are done, as in wg0_pair.
    if PERSISTENT:
        if last:
            release(bars.q_empty, True)
    # No second step: P1 is relative to the maximum of both tiles from the start.
    scale, base = origin(m_new, scale_log2)
    rescale = rescale_factor(m, m_new, scale_log2)
    p1 = gl.exp2(z * gl.expand_dims(scale, 1) - gl.expand_dims(base, 1))
    l = l * rescale + gl.sum(p1, 1)
    acc = rescale_acc(acc, rescale)
    # P1 V1r out of registers, begun; P1 goes to wg0 meanwhile.
    rounded = p1.to(gl.bfloat16)
    p1_operand = gl.convert_layout(rounded, OPERAND)
    zero = here(zero)
    acc = warpgroup_mma(p1_operand, half_of(smem.k.index(zero + 1), 1), acc, is_async=True)
    smem.row_sum.index(1).store(l)
    if smem.HAS_MAX:
        smem.row_largest.store(largest)
    smem.p1.index(zero).store(rounded)
    # P1 was stored by threads, and wg0's matrix unit reads it.
    fence_async_shared()
    signal(bars.p1_full)
    # P0 V0r, with wg0's P0 out of shared memory.
    mbarrier.wait(bars.p0_full, phase)
    zero = here(zero)
    p0 = smem.p0.index(zero + smem.HAS_ROPE)
    acc = warpgroup_mma(p0, half_of(smem.k.index(zero), 1), acc, is_async=True)
    # P1 V1r is done, P0 V0r may still run: K1r is free before K0r.
    acc = warpgroup_mma_wait(1, deps=(acc,))
    release(bars.k_empty[K1R], PERSISTENT)
    # Frees P0's memory with K0r.
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(bars.k_empty[K0R], PERSISTENT)
    return acc, m_new, l


@gluon.jit
def _powers(acc):
    """(2^-n, 2^n) for each row of ``acc``, such that 2^-n times its largest value lies in [2^14, 2^15); (1, 1) for a
    row with an infinite one. (A maximum leaves NaN out.)"""
    # Biased exponents of the largest values. 15 at least, so that 2^n stays a normal number.
    exponent = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 127 + 14, gl.maximum(exponent, 15))
    # Powers of two by their exponent bits: multiplying by them rounds nothing.
    down = (127 + 14 + 127 - exponent) << 23
    up = (exponent - 14) << 23
    return down.to(gl.float32, bitcast=True), up.to(gl.float32, bitcast=True)


@gluon.jit
def _store(to, values, half: gl.constexpr, LAYOUT: gl.constexpr):
    head = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D_V // 2, layout=gl.SliceLayout(0, LAYOUT)) + half * (D_V // 2)
    pointers = to.out + gl.expand_dims(head * to.stride_head, 1) + gl.expand_dims(column, 0)
    gl.store(pointers, gl.convert_layout(values, LAYOUT))


@gluon.jit
def store_output(acc, l, m, scale_log2, to, half: gl.constexpr, HAS_SINK: gl.constexpr, split):
    """Divide by the denominator (a sink adds to it, not to lse) and store this warpgroup's half of the columns as bf16.

    If the row is ``split``: as fp16 partials, which ``to.scale`` [BLOCK_M, 2] multiplies, with lse in base 2. They are
    exact to 2^-11 of each value, an eighth of what rounding the output costs, or to 2^-39 of the row's largest in this
    half."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    head = gl.arange(0, BLOCK_M, layout=m.type.layout)
    sink = gl.load(to.sink + head) if HAS_SINK else 0.0
    # lse of wg0 and wg1 are the same: wg0 stores it.
    m_log2 = m * scale_log2
    factor, lse = normalise(m_log2, denominator(m_log2, l), sink, HAS_SINK, split, to.INF_LSE)
    if half == 0:
        gl.store(to.lse + head, lse)
    factor = gl.convert_layout(factor, ROW)
    # Partials: normalise by a power of two, and leave the rest to ``scale``.
    if split:
        down, up = _powers(acc)
        gl.store(to.scale + 2 * gl.arange(0, BLOCK_M, layout=ROW) + half, up * factor)
        values = (acc * gl.expand_dims(down, 1)).to(gl.float16).to(gl.bfloat16, bitcast=True)
        # Of every 32 columns transpose the pairs, 4 x 4: PARTIAL_LAYOUT then stores what a thread holds, unmoved.
        mixed = gl.permute(gl.reshape(values, [BLOCK_M, D_V // 2 // 32, 4, 4, 2]), (0, 1, 3, 2, 4))
        _store(to, gl.reshape(mixed, [BLOCK_M, D_V // 2]), half, PARTIAL_LAYOUT)
    else:
        _store(to, (acc * gl.expand_dims(factor, 1)).to(gl.bfloat16), half, OUT_LAYOUT)
