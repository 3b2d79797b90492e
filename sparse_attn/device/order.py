"""Order: float scores as integers that sort the same way; running maxima."""

import triton
import triton.language as tl


@triton.jit
def ordered_key(values):
    """fp32 -> int32 whose signed order is the float order; -0.0 equals +0.0; NaN and -inf become the smallest key."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    selectable = (values == values) & (values != float("-inf"))
    return tl.where(selectable, key, -2147483648)


@triton.jit
def greater(a, b):
    """Of tl.associative_scan, for a running maximum."""
    return tl.maximum(a, b)
