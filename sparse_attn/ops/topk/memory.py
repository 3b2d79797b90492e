"""Global memory by PTX on NVIDIA, where the language would move data between threads."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED

SCATTER = tl.constexpr(
    """{ .reg .pred p; .reg .b64 at; setp.le.u32 p, $4, $5; mad.wide.s32 at, $2, 4, $1;
    @p st.global.b32 [at], $3;  mov.u32 $0, 0; }"""
)

# The last bit of a word comes first, from place $3 + the number of bits down; a warp goes on as long as one of its words has bits.
SCATTER_BITS = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, place, one; .reg .b64 at;
    mov.b32 word, $2;  popc.b32 place, word;  add.s32 place, place, $3;
    setp.eq.u32 p, word, 0;  @p bra DONE;
    NEXT: bfind.u32 bit, word;  shl.b32 one, 1, bit;  xor.b32 word, word, one;  add.s32 bit, bit, $4;  sub.s32 place, place, 1;
    mad.wide.s32 at, place, 4, $1;  st.global.b32 [at], bit;  setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }"""
)

LOOK_UP = tl.constexpr(
    """{ .reg .pred p; .reg .b64 at; setp.lt.s32 p, $2, $3; mad.wide.s32 at, $2, 4, $1;
    mov.b32 $0, 0; @p ld.global.b32 $0, [at]; }"""
)


@triton.jit
def look_up(source, place, end):
    """source[place], int32, below ``end``, else 0; by the threads that hold ``place``."""
    if INTERPRETED:
        return tl.load(source + place, mask=place < end, other=0)
    else:
        operands = [source, place, end]
        return tl.inline_asm_elementwise(LOOK_UP, "=&r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter(out, place, values, keys, most):
    """out[place] = values (int32) where keys <= most, unsigned.

    From whichever thread holds them: a store of the language's would move them between threads first.
    """
    if INTERPRETED:
        keys, most = keys.to(tl.uint32, bitcast=True), most.to(tl.uint32, bitcast=True)
        tl.store(out + place, values, mask=keys <= most)
    else:
        operands = [out, place, values, keys, most]
        tl.inline_asm_elementwise(SCATTER, "=r,l,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter_bits(out, words, place, left):
    """Store left[i] + the number of every bit that is set in words[i] (uint32), at out[place[i] ..]."""
    if INTERPRETED:
        for bit in range(32):
            there = ((words >> bit) & 1) != 0
            tl.store(out + place, left + bit, mask=there)
            place += there.to(tl.int32)
    else:
        operands = [out, words, place, left]
        tl.inline_asm_elementwise(SCATTER_BITS, "=r,l,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
