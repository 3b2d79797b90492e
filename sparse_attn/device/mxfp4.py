"""MXFP4 in Triton: e2m1 codes, two a byte, and a ue8m0 byte for every 32; compiled and interpreted, on every target.

The bits of sparse_attn.mxfp4.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED, round_to_bf16
from sparse_attn.device.fp8 import decode_exponent


@triton.jit
def quantise_mxfp4(values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """fp32 [ROWS, GROUPS * 32] -> (codes uint8 [ROWS, GROUPS * 16], scales ue8m0 bytes [ROWS, GROUPS])."""
    values = tl.reshape(values, [ROWS, GROUPS, 32])
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    broken = tl.max((~finite).to(tl.int32), 2)
    # The least power of two by which the largest is at most 6, which is 1.5 * 2^2.
    amax = tl.maximum(tl.max(tl.where(finite, magnitude, 0.0), 2), 7.052966104933725e-38)  # 6 * 2^-126
    exponent = ((amax.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude * inverse[:, :, None]
    # Count the midpoints passed; ties go to the even code.
    code = (scaled > 0.25).to(tl.int32) + (scaled >= 0.75).to(tl.int32) + (scaled > 1.25).to(tl.int32)
    code += (scaled >= 1.75).to(tl.int32) + (scaled > 2.5).to(tl.int32) + (scaled >= 3.5).to(tl.int32)
    code += (scaled > 5.0).to(tl.int32)
    code |= (values.to(tl.int32, bitcast=True) >> 28) & 8
    # An infinity or NaN makes its group NaN: codes 0, scale 255.
    code = tl.where(broken[:, :, None] != 0, 0, code)
    even, odd = tl.split(tl.reshape(code, [ROWS, GROUPS * 16, 2]))
    return (even | (odd << 4)).to(tl.uint8), tl.where(broken != 0, 255, exponent).to(tl.uint8)


@triton.jit
def decode_mxfp4(codes, scales):
    """(values of the low, of the high bits) of uint8 ``codes`` [ROWS, GROUPS, 16] under ue8m0 ``scales`` [ROWS,
    GROUPS], each [ROWS, GROUPS * 16]: bf16, which holds them exactly, or fp32 in the interpreter."""
    power = tl.where(scales == 255, float("nan"), decode_exponent(scales))[:, :, None]
    wide = codes.to(tl.int32)
    return _values(wide, power), _values(wide >> 4, power)


@triton.jit
def _values(code, power):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * power  # 2^126: exponent bias 127 against 1
    value = tl.reshape(value, [code.shape[0], code.shape[1] * code.shape[2]])
    if INTERPRETED:
        return value
    else:
        return round_to_bf16(value)
