"""Global memory by PTX on NVIDIA, where Triton's own load or store would move data between threads first."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED

SCATTER = tl.constexpr(
    """{ .reg .pred p; .reg .b64 at; setp.le.u32 p, $4, $5; mad.wide.s32 at, $2, 4, $1;
    @p st.global.b32 [at], $3;  mov.u32 $0, 0; }"""
)

# A round for each bit that is set; most threads have none.
SCATTER_BITS = tl.constexpr(
    """{ .reg .pred p, w; .reg .b32 any, q, tie, place, left, col; .reg .b64 at;
    mov.b32 place, $2;  mov.b32 left, $5;
    shr.u32 tie, $4, 4;  or.b32 any, tie, $4;  and.b32 any, any, 15;
    setp.eq.u32 p, any, 0;  @p bra done;
    again: bfind.u32 q, any;  bfe.u32 tie, $4, 4, 4;  shr.u32 tie, tie, q;  and.b32 tie, tie, 1;
    sub.s32 left, left, tie;  setp.lt.s32 p, left, 0;  setp.ne.and.u32 p, tie, 0, p;
    setp.lt.and.u32 w, place, $6, !p;
    mad.wide.s32 at, place, 4, $1;  sub.s32 col, $3, q;  @w st.global.b32 [at+0], col;
    @!p add.s32 place, place, 1;
    mov.b32 tie, 1;  shl.b32 tie, tie, q;  xor.b32 any, any, tie;
    setp.ne.u32 p, any, 0;  @p bra again;
    done: mov.b32 $0, 0; }"""
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


@triton.jit
def scatter_bits(out, place, first, bits, room, end, PTX: tl.constexpr):
    """Store columns ``first`` to ``first`` + 3 (int32), of those that win, at out[place] on, below out[end]. bits, from
    the lowest on: four that say which win, of the last column first, and four that say which are ties. Of ties the
    first ``room`` win."""
    if PTX and not INTERPRETED:
        operands = [out, place, first + 3, bits, room, end]
        tl.inline_asm_elementwise(SCATTER_BITS, "=r,l,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        for i in tl.static_range(4):
            tied = bits >> (7 - i) & 1
            wins = ((bits >> (3 - i) & 1) != 0) | ((tied != 0) & (room > 0))
            below = place.to(tl.uint32, bitcast=True) < end.to(tl.uint32, bitcast=True)
            tl.store(out + place, first + i, mask=wins & below)
            place += wins.to(tl.int32)
            room -= tied
