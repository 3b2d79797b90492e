"""Global memory by PTX on NVIDIA, where the language would move data between threads."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED

SCATTER = tl.constexpr(
    """{ .reg .pred p; .reg .b64 at; setp.le.u32 p, $4, $5; mad.wide.s32 at, $2, 4, $1;
    @p st.global.b32 [at], $3;  mov.u32 $0, 0; }"""
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
