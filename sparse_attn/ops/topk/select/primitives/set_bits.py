"""Loops over the set bits of a bitmask, in PTX. A warp goes on only while one of its own words has bits left."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED
from sparse_attn.device.histogram import LENGTH


def _from_both_ends(registers: str, first: str, store: str, store_last: str) -> str:
    """PTX that takes the set bits of a word, $1, from both ends. ``store`` sees the lowest remaining bit as ``bit``,
    which is $2 + its number. ``store_last`` sees the highest as ``last``, where p says that it is another bit.
    ``first`` runs before, if any bit is set."""
    return f"""{{ .reg .pred p, q; .reg .b32 word, rest, one, other, bit, last; {registers}
    mov.b32 word, $1;  setp.eq.u32 p, word, 0;  @p bra DONE;  {first}
    NEXT: bfind.u32 last, word;  shl.b32 other, 1, last;  sub.u32 rest, word, 1;  and.b32 rest, word, rest;
    xor.b32 one, word, rest;  bfind.u32 bit, one;  setp.ne.u32 p, one, other;
    not.b32 other, other;  and.b32 word, rest, other;
    add.s32 bit, bit, $2;  add.s32 last, last, $2;
    {store}
    {store_last}
    setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }}"""


STORE = tl.constexpr(
    _from_both_ends(
        ".reg .b32 ones; .reg .b64 at, to;",
        "mad.wide.s32 at, $3, 4, $4;  popc.b32 ones, word;  mad.wide.u32 to, ones, 4, at;",
        "st.global.b32 [at], bit;  add.s64 at, at, 4;",
        "add.s64 to, to, -4;  @p st.global.b32 [to], last;",
    )
)  # fmt: skip
STAGE = tl.constexpr(
    _from_both_ends(
        ".reg .b32 place, to, at;",
        "mov.b32 place, $3;  popc.b32 to, word;  add.s32 to, to, place;",
        "mad.lo.u32 at, place, 4, $5;  setp.lt.u32 q, place, $4;  @q st.shared.b32 [at], bit;  "
        "add.s32 place, place, 1;",
        "sub.s32 to, to, 1;  mad.lo.u32 at, to, 4, $5;  setp.lt.and.u32 q, to, $4, p;  @q st.shared.b32 [at], last;",
    )
)  # fmt: skip
# One atomic a bit: ptxas turns an atomic addition of several into a scan across the warp.
APPEND = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, one, at;
    mov.b32 word, $1;  setp.eq.u32 p, word, 0;  @p bra DONE;
    NEXT: bfind.u32 bit, word;  shl.b32 one, 1, bit;  xor.b32 word, word, one;  add.s32 bit, bit, $2;
    atom.shared.add.u32 at, [$4], 1;  mad.lo.u32 at, at, 4, $3;  st.shared.b32 [at], bit;
    setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }"""
)


@triton.jit
def store(out, bitmask, position, word_base):
    """For every bit that is set in bitmask[i] (uint32) store word_base[i] + the bit's number, at out[position[i]] and
    on."""
    if INTERPRETED:
        for bit in range(32):
            valid = ((bitmask >> bit) & 1) != 0
            tl.store(out + position, word_base + bit, mask=valid)
            position += valid.to(tl.int32)
    else:
        operands = [bitmask, word_base, position, out]
        tl.inline_asm_elementwise(STORE, "=r,r,r,r,l", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stage(smem, bitmask, position, word_base, most):
    """store to shared memory, at words position[i] and on, below word ``most``."""
    if smem.dtype.is_ptr():
        for bit in range(32):
            valid = ((bitmask >> bit) & 1) != 0
            tl.store(smem + position, word_base + bit, mask=valid & (position >= 0) & (position < most))
            position += valid.to(tl.int32)
    else:
        operands = [bitmask, word_base, position, most, smem]
        tl.inline_asm_elementwise(STAGE, "=r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def append(smem, bitmask, word_base, FIRST: tl.constexpr):
    """For every bit that is set in bitmask[i] append word_base[i] + the bit's number to the list from word FIRST on, in
    any order. There are at least as many words as threads: every copy would be appended."""
    if smem.dtype.is_ptr():
        for bit in range(32):
            valid = ((bitmask >> bit) & 1) != 0
            at = tl.atomic_add(smem + LENGTH + tl.zeros_like(word_base), 1, mask=valid)
            tl.store(smem + FIRST + at, word_base + bit, mask=valid)
    else:
        operands = [bitmask, word_base, smem + FIRST * 4, smem + LENGTH * 4]
        tl.inline_asm_elementwise(APPEND, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
