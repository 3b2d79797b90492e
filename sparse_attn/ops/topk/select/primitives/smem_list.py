"""What lies behind the histogram in a CTA's shared memory. At a time it is a list of keys or columns, a bitmask of a
bit a column, or marks.

Marks are two bits a column, in a byte for every four columns. Bits 0 to 3: the score lies above the cutoff. Bits 4 to
7: it equals the cutoff.
"""

import triton
import triton.language as tl

from sparse_attn.device.histogram import LENGTH, WORDS


def _append_in_range() -> str:
    """PTX that appends those of the keys $4 to $7 that lie in [$8, $8 + $12). One branch skips four keys, since mostly
    none of them does."""
    appends = "".join(
        f"""setp.lt.u32 p, {distance}, $12;  @p atom.shared.add.u32 at, [$16 + {4 * LENGTH.value}], 1;
    @p mad.lo.u32 at, at, 4, $16;  @p st.shared.b32 [at + {4 * WORDS.value}], {key};
    """
        for distance, key in zip("abcd", ("$4", "$5", "$6", "$7"))
    )
    return f"""{{ .reg .pred p; .reg .b32 a, b, c, d, m, at;
    sub.u32 a, $4, $8;  sub.u32 b, $5, $8;  sub.u32 c, $6, $8;  sub.u32 d, $7, $8;
    min.u32 m, a, b;  min.u32 m, m, c;  min.u32 m, m, d;  setp.ge.u32 p, m, $12;  @p bra DONE;
    {appends}DONE: mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }}"""


APPEND_IN_RANGE = tl.constexpr(_append_in_range())
SET_BIT = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit;
    setp.le.u32 p, $2, $3;  shr.u32 word, $1, 5;  mad.lo.u32 word, word, 4, $4;  and.b32 bit, $1, 31;
    shl.b32 bit, 1, bit;  @p red.shared.or.b32 [word], bit;  mov.u32 $0, 0; }"""
)
STORE_BYTE = tl.constexpr(
    "{ .reg .b16 b; .reg .b32 at; add.u32 at, $1, $2; cvt.u16.u32 b, $3; st.shared.u8 [at], b; mov.u32 $0, 0; }"
)
# How many of the $3 keys at $2, a multiple of 4, lie below $1; $3 where that is the last key.
COUNT_BELOW = tl.constexpr(
    """{ .reg .pred p; .reg .b32 a, b, c, d, at, end;
    mov.u32 $0, $3;  setp.eq.u32 p, $1, 0xffffffff;  @p bra DONE;
    mov.u32 $0, 0;  mov.b32 at, $2;  mad.lo.u32 end, $3, 4, at;
    NEXT: ld.shared.v4.b32 {a, b, c, d}, [at];  add.u32 at, at, 16;
    setp.lt.u32 p, a, $1;  @p add.u32 $0, $0, 1;  setp.lt.u32 p, b, $1;  @p add.u32 $0, $0, 1;
    setp.lt.u32 p, c, $1;  @p add.u32 $0, $0, 1;  setp.lt.u32 p, d, $1;  @p add.u32 $0, $0, 1;
    setp.lt.u32 p, at, end;  @p bra NEXT;
    DONE: }"""
)
SET_MARK = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, four;
    setp.ne.u32 p, $2, 0;  shr.u32 word, $1, 4;  mad.lo.u32 word, word, 4, $3;  bfe.u32 four, $1, 2, 2;
    and.b32 bit, $1, 3;  mad.lo.u32 bit, four, 8, bit;  shl.b32 bit, 1, bit;
    @p red.shared.or.b32 [word], bit;  mov.u32 $0, 0; }"""
)
LOAD_TWO = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")


@triton.jit
def append_in_range(smem, keys, base, span):
    """Append the keys in [base, base + span), unsigned, to the list, in any order. Four keys at least to a thread."""
    if smem.dtype.is_ptr():
        wanted = (keys - base).to(tl.uint32, bitcast=True) < span.to(tl.uint32, bitcast=True)
        at = tl.atomic_add(smem + LENGTH + tl.zeros_like(keys), 1, mask=wanted)
        tl.store(smem + WORDS + at, keys, mask=wanted)
    else:
        constraints: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r"
        operands = [keys, base, span, smem]
        tl.inline_asm_elementwise(APPEND_IN_RANGE, constraints, operands, dtype=tl.int32, is_pure=False, pack=4)


@triton.jit
def count_below(smem, keys, first, number):
    """How many of the ``number`` keys from word first[i] on, a multiple of 4, lie below keys[i], unsigned. Where
    keys[i] is -1, the last key, the result is ``number``."""
    if smem.dtype.is_ptr():
        below = tl.zeros_like(keys)
        for at in range(number):
            other = tl.load(smem + first + at).to(tl.uint32, bitcast=True)
            below += (other < keys.to(tl.uint32, bitcast=True)).to(tl.int32)
        return tl.where(keys == -1, number, below)
    else:
        operands = [keys, smem + first * 4, number]
        return tl.inline_asm_elementwise(COUNT_BELOW, "=&r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def set_bits(smem, columns, keys, most):
    """Set a bit in a bitmask for each column whose key is <= most, unsigned."""
    if smem.dtype.is_ptr():
        chosen = keys.to(tl.uint32, bitcast=True) <= most.to(tl.uint32, bitcast=True)
        tl.atomic_or(smem + WORDS + (columns >> 5), tl.full([], 1, tl.int32) << (columns & 31), mask=chosen)
    else:
        operands = [columns, keys, most, smem + WORDS * 4]
        tl.inline_asm_elementwise(SET_BIT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_marks(smem, position, marks):
    """Store the lowest byte of ``marks`` as byte ``position``."""
    if smem.dtype.is_ptr():
        tl.store((smem + WORDS).to(tl.pointer_type(tl.int8)) + position, marks.to(tl.int8))
    else:
        operands = [smem + WORDS * 4, position, marks]
        tl.inline_asm_elementwise(STORE_BYTE, "=r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def set_marks(smem, columns, wanted):
    """Mark the columns that are ``wanted`` (int32) as above the cutoff."""
    if smem.dtype.is_ptr():
        bit = ((columns >> 2) & 3) * 8 + (columns & 3)
        tl.atomic_or(smem + WORDS + (columns >> 4), tl.full([], 1, tl.int32) << bit, mask=wanted != 0)
    else:
        operands = [columns, wanted, smem + WORDS * 4]
        tl.inline_asm_elementwise(SET_MARK, "=r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_marks(smem, word):
    """The eight bytes of marks that belong to a word of the bitmask, as two words."""
    if smem.dtype.is_ptr():
        at = smem + WORDS + word * 2
        return tl.load(at), tl.load(at + 1)
    else:
        at = smem + WORDS * 4 + word * 8
        return tl.inline_asm_elementwise(LOAD_TWO, "=r,=r,r", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)
