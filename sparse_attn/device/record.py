"""Writing fp8 values and their group scales, wherever a layout keeps them."""

import triton
import triton.language as tl

from sparse_attn.device.fp8 import ceil_pow2, encode_fp8, finite_or_nan


@triton.jit
def store_quantised(
    value, place, real, base, within, block_size, GROUPS: tl.constexpr, RECORD: tl.constexpr, SCALE_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr, BEHIND: tl.constexpr, EXPONENT: tl.constexpr, FNUZ: tl.constexpr, POW2: tl.constexpr,
    FP8_MAX: tl.constexpr, AMAX_FLOOR: tl.constexpr,
):  # fmt: skip
    """Quantise fp32 ``value`` [PAD_GROUPS, PAD_GROUP], one scale per row of it, into record ``within`` the block at
    byte pointer ``base``.

    place: byte of each code in its record, where ``real``. RECORD: bytes from record to record. Scales stand at
    SCALE_AT of the record, or BEHIND all records of the block, SCALE_BYTES each; fp32, or with EXPONENT ue8m0 bytes
    padded with zeros to a multiple of 8.
    """
    PAD_GROUPS: tl.constexpr = value.shape[0]
    value = tl.where(real, value, 0.0)
    group = tl.arange(0, PAD_GROUPS)
    # What is not finite does not count for a group's scale.
    value, magnitude = finite_or_nan(value)
    amax = tl.maximum(tl.max(magnitude, 1), AMAX_FLOOR)
    scale = tl.div_rn(amax, tl.full([PAD_GROUPS], FP8_MAX, tl.float32))
    if POW2:
        scale = ceil_pow2(scale)
    code = encode_fp8(tl.div_rn(value, tl.broadcast_to(scale[:, None], [PAD_GROUPS, value.shape[1]])), FNUZ)
    record = base + within * RECORD
    tl.store(record + place, code, mask=real)
    # Planar: scales lie behind all records of the block.
    if BEHIND:
        scales = base + block_size.to(tl.int64) * RECORD + within * SCALE_BYTES
    else:
        scales = record + SCALE_AT
    if EXPONENT:
        exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales + group, exponent, mask=group < GROUPS)
        pad = GROUPS + tl.arange(0, 8)
        tl.store(scales + pad, tl.zeros([8], tl.uint8), mask=pad < SCALE_BYTES)
    else:
        tl.store(scales.to(tl.pointer_type(tl.float32)) + group, scale, mask=group < GROUPS)
