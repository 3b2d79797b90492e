"""fp8 codes in Triton: exact in compiled and interpreted form, on every target, without fp8 hardware.

Codes are uint8. Decoding places the bits of e4m3 into fp32 or bf16 and multiplies by a power of two; encoding rounds to
nearest even by hand, because the interpreter and old architectures round otherwise or not at all.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import round_to_bf16


@triton.jit
def decode_fp8(codes, FNUZ: tl.constexpr):
    """uint8 e4m3 codes -> fp32. e4m3fnuz has half the value of the same e4m3fn code, and NaN at 0x80 alone."""
    wide = codes.to(tl.int32)
    magnitude = wide & 0x7F
    bits = ((wide & 0x80) << 24) | (magnitude << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: exponent bias 127 against 7
    if FNUZ:
        return tl.where(wide == 0x80, float("nan"), value * 0.5)
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def encode_fp8(values, FNUZ: tl.constexpr):
    """fp32 values -> uint8 codes, clamped to +-448 (e4m3fn) or +-224 (e4m3fnuz), nearest even; NaN becomes
    fp8.FP8_NAN."""
    # Codes of e4m3fnuz have half the value: encode twice the value.
    if FNUZ:
        values = values * 2.0
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(values), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Adding just below half a unit, and the last bit kept, rounds to nearest even; then the biases' difference.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF  # 2^23 + x rounds x to an integer
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(values == values, code | sign, 0x7F)
    if FNUZ:
        code = tl.where(values == values, tl.where(code == 0x80, 0, code), 0x80)
    return code.to(tl.uint8)


@triton.jit
def pow2_exponent(largest):
    """Biased exponent of the least power of two, a normal one, that fp32 magnitudes up to ``largest`` are 448 times at
    most."""
    return tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 * 2^8


@triton.jit
def encode_scaled(values, exponent, FP8_CAST: tl.constexpr):
    """fp32 values -> uint8 e4m3 codes of values / 2^(exponent - 127). exponent: as pow2_exponent gives it. FP8_CAST:
    whether the GPU rounds to e4m3 as encode_fp8 does."""
    values *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if FP8_CAST:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_fp8(values, False)


@triton.jit
def finite_or_nan(values):
    """(values, NaN for infinities; their magnitudes, 0 for what is not finite)."""
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    return tl.where(finite, values, float("nan")), tl.where(finite, magnitude, 0.0)


@triton.jit
def decode_fp8_bf16(codes, FNUZ: tl.constexpr):
    """uint8 e4m3 codes -> bf16, exact (every e4m3 value is a bf16 value)."""
    return round_to_bf16(decode_fp8(codes, FNUZ))


@triton.jit
def ceil_pow2(values):
    """The smallest power of two not below each positive normal fp32 value."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def decode_exponent(codes):
    """ue8m0 bytes -> fp32 2^(byte - 127); 255 gives inf."""
    bits = codes.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
