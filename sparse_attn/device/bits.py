"""Bits of words."""

import triton
import triton.language as tl


@triton.jit
def popcount(bitmask):
    """How many bits are set in each word."""
    bitmask = bitmask.to(tl.uint32, bitcast=True)
    bitmask = bitmask - ((bitmask >> 1) & 0x55555555)
    bitmask = (bitmask & 0x33333333) + ((bitmask >> 2) & 0x33333333)
    bitmask = (bitmask + (bitmask >> 4)) & 0x0F0F0F0F
    return ((bitmask * 0x01010101) >> 24).to(tl.int32)
