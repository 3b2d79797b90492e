"""Global memory by PTX on NVIDIA, where Triton's own load or store would move data between threads first."""

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
def look_up(source, position, end):
    """source[position], int32, where position < end, else 0. The thread that holds a position loads it."""
    if INTERPRETED:
        return tl.load(source + position, mask=position < end, other=0)
    else:
        operands = [source, position, end]
        return tl.inline_asm_elementwise(LOOK_UP, "=&r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scatter(out, position, values, keys, most):
    """out[position] = values (int32) where keys <= most, unsigned. The thread that holds a value stores it."""
    if INTERPRETED:
        keys, most = keys.to(tl.uint32, bitcast=True), most.to(tl.uint32, bitcast=True)
        tl.store(out + position, values, mask=keys <= most)
    else:
        operands = [out, position, values, keys, most]
        tl.inline_asm_elementwise(SCATTER, "=r,l,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
