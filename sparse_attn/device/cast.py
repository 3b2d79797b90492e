"""Casts and matrix products with a branch for Triton's interpreter, which has no bf16 arithmetic and truncates to
bf16."""

import triton
import triton.language as tl

from sparse_attn.framework.target import interpreting

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def round_to_bf16(values):
    """fp32 -> bf16, round to nearest even; NaN stays NaN."""
    if INTERPRETED:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(values == values, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.bfloat16)


@triton.jit
def cast(values, DTYPE: tl.constexpr):
    """fp32 -> DTYPE (fp32, fp16 or bf16), round to nearest even."""
    if DTYPE == tl.bfloat16:
        return round_to_bf16(values)
    else:
        return values.to(DTYPE)


@triton.jit
def convert(values, DTYPE: tl.constexpr):
    """A float tile of any type -> DTYPE, through fp32 where the types differ."""
    if values.dtype == DTYPE:
        return values
    else:
        return cast(values.to(tl.float32), DTYPE)


@triton.jit
def stored(values, DTYPE: tl.constexpr):
    """convert for a cache, whose bytes depend on no machine: any NaN becomes the one of all bits but the sign."""
    values = convert(values, DTYPE)
    if DTYPE == tl.float32:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
    else:
        bits = values.to(tl.int16, bitcast=True)
        bits = tl.where((bits & 0x7FFF) > (0x7F80 if DTYPE == tl.bfloat16 else 0x7C00), 0x7FFF, bits).to(tl.int16)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands are multiplied exactly as fp32 (no tf32)."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
