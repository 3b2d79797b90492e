# pyright: reportAttributeAccessIssue=false
"""MXFP4 index keys decoded once a call, to what the matrix unit multiplies: see mxfp4.py, which does it in registers.

Floor: 200 bytes a key, 68 read and 132 written.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.ops.indexer.scores.hopper import constants

WINDOW = tl.constexpr(constants.WINDOW)
LEAST = tl.constexpr(0x6C)  # e5m2 of 0.5 times 2^TOP; two a step of the codes behind it, four a power of two


@triton.jit
def _operand(half, base):
    """Four e5m2 bytes of the four codes in the low half of words. base: a byte, of a code of 0.5."""
    # Spread four codes of a half word to a byte each.
    spread = half & 0xFFFF
    spread = (spread | (spread << 8)) & 0x00FF00FF
    spread = (spread | (spread << 4)) & 0x0F0F0F0F
    magnitude = spread & 0x07070707
    # e5m2 by arithmetic: 0.5 is ``base``, and code n from 1.0 on is ``base`` + 2 n.
    many = ((magnitude >> 1) | (magnitude >> 2)) & 0x01010101  # from 1 on
    some = (magnitude | many) & 0x01010101  # not zero
    return (some * base + 2 * (magnitude - (some ^ many))) | ((spread & 0x08080808) << 4)


@triton.jit(do_not_specialize=["keys"])
def decode_keys(
    k,  # int32 [keys, 16]: eight codes a word, four words a group
    k_scale,  # int32 [keys]: a scale a byte
    operands,  # int32 [keys, 32]: four e5m2 values a word, in the order of the product's steps
    factors,  # fp32 [keys]: the highest scale
    far,  # int32 [tiles]: whether the groups of some key of a tile are further apart than operands hold
    keys,
    stride_key,  # words
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait_last(PDL)
    tile = tl.program_id(0)
    key = tile.to(tl.int64) * BLOCK_KV + tl.arange(0, BLOCK_KV)
    seen = key < keys
    # The highest of a key's four scales goes to its factor, the others' distance to it into operands.
    scales = tl.load(k_scale + key, mask=seen, other=0)
    a, b, c, d = scales & 255, (scales >> 8) & 255, (scales >> 16) & 255, (scales >> 24) & 255
    highest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    lowest = tl.minimum(tl.minimum(a, b), tl.minimum(c, d))
    apart = seen & (highest - lowest > WINDOW) & (highest < 255)
    tl.store(far + tile, tl.max(apart.to(tl.int32), 0))
    odd = (highest == 0) | (highest == 255)  # 2^-127, which is subnormal, and NaN
    factor = ((highest << 23) | tl.where(odd, 0x400000, 0)).to(tl.float32, bitcast=True)
    tl.store(factors + key, factor, mask=seen)

    # In the order of the product's steps word j of every group lies side by side.
    word, group = tl.arange(0, 4)[None, :, None], tl.arange(0, 4)[None, None, :]
    there = tl.broadcast_to(seen[:, None, None], [BLOCK_KV, 4, 4])
    codes = tl.load(k + (key[:, None, None] * stride_key + (group * 4 + word)), mask=there, other=0)
    steps = highest[:, None, None] - ((scales[:, None, None] >> (8 * group)) & 255)
    near = steps <= WINDOW  # others are of tiles that are far, or of a NaN
    base = tl.where(near, LEAST - 4 * steps, 0)
    codes = tl.where(near, codes, 0)
    to = operands + (key[:, None, None] * 32 + (word * 8 + group))
    tl.store(to, _operand(codes, base), mask=there)
    tl.store(to + 4, _operand(codes >> 16, base), mask=there)
