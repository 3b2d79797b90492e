"""Counters in a program's shared memory, which the language cannot name: PTX on NVIDIA, memory in the interpreter.

A table is BINS counters, behind them one for what is not to be counted, the length of a list, and a note of four words;
then comes a list of keys, or a byte of marks for every four columns. It is an address in shared memory, or a pointer where
the launcher passed one. Triton may hold a tensor of fewer elements than threads several times over: that matters to the
counting alone, which counts every copy.
"""

import triton
import triton.language as tl

BITS = tl.constexpr(11)
BINS = tl.constexpr(2048)
LENGTH = tl.constexpr(2048 + 1)  # word of the list's length
ZERO = tl.constexpr(2048 + 2)  # word that is 0
NOTE = tl.constexpr(2048 + 4)  # word of the note
LIST = tl.constexpr(2048 + 8)  # first word of the list: how many come before it

LOAD = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }"
)
# Without a condition: ptxas would make that a branch for every key. Threads of a warp that meet in a counter cost nothing
# (ATOMS.POPC.INC), so what is not to be counted may all go to one.
COUNT = tl.constexpr(
    """{ .reg .b32 bin;
    sub.u32 bin, $1, $2;  shr.u32 bin, bin, $3;  min.u32 bin, bin, 2048;  mad.lo.u32 bin, bin, 4, $4;
    red.shared.add.u32 [bin], 1;  mov.u32 $0, 0; }"""
)
LOAD_ONE = tl.constexpr("ld.shared.b32 $0, [$1];")
STORE_ONE = tl.constexpr("st.shared.b32 [$1], $2; mov.u32 $0, 0;")
STORE_SOME = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, 0; }")


def _push() -> str:
    """PTX that appends those of the keys $4 to $7 that lie in [$8, $8 + $12): hardly any four hold one that is wanted."""
    appends = "".join(
        f"""setp.lt.u32 p, {distance}, $12;  @p atom.shared.add.u32 at, [$16 + {4 * LENGTH.value}], 1;
    @p mad.lo.u32 at, at, 4, $16;  @p st.shared.b32 [at + {4 * LIST.value}], {key};
    """
        for distance, key in zip("abcd", ("$4", "$5", "$6", "$7"))
    )
    return f"""{{ .reg .pred p; .reg .b32 a, b, c, d, m, at;
    sub.u32 a, $4, $8;  sub.u32 b, $5, $8;  sub.u32 c, $6, $8;  sub.u32 d, $7, $8;
    min.u32 m, a, b;  min.u32 m, m, c;  min.u32 m, m, d;  setp.ge.u32 p, m, $12;  @p bra DONE;
    {appends}DONE: mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }}"""


PUSH = tl.constexpr(_push())
SET_BIT = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit;
    setp.le.u32 p, $2, $3;  shr.u32 word, $1, 5;  mad.lo.u32 word, word, 4, $4;  and.b32 bit, $1, 31;
    shl.b32 bit, 1, bit;  @p red.shared.or.b32 [word], bit;  mov.u32 $0, 0; }"""
)
STORE_BYTE = tl.constexpr(
    "{ .reg .b16 b; .reg .b32 at; add.u32 at, $1, $2; cvt.u16.u32 b, $3; st.shared.u8 [at], b; mov.u32 $0, 0; }"
)
LOAD_TWO = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
COUNT_LEADING = tl.constexpr(
    "{ .reg .b32 bin; shr.u32 bin, $1, 21; mad.lo.u32 bin, bin, 4, $2; red.shared.add.u32 [bin], 1; mov.u32 $0, 0; }"
)


@triton.constexpr_function
def _claiming(longest):
    return f"{{ .shared .align 16 .b8 table[{4 * (LIST.value + longest)}]; mov.u32 $0, table; }}"


@triton.jit
def claim(memory, LONGEST: tl.constexpr):
    """The program's table, with a list of at most LONGEST keys. memory: int32 [programs, LIST + LONGEST], or None for
    shared memory, to be claimed once a kernel."""
    if memory is None:
        zero = tl.full([], 0, tl.int32)
        return tl.inline_asm_elementwise(_claiming(LONGEST), "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return memory + tl.program_id(0) * (LIST + LONGEST)


@triton.jit
def load(table, word):
    """Four counters from ``word``, a multiple of 4, on."""
    if table.dtype.is_ptr():
        at = table + word
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        return tl.inline_asm_elementwise(
            LOAD, "=r,=r,=r,=r,r", [table + word * 4], dtype=types, is_pure=False, pack=1
        )


@triton.jit
def store(table, word, a, b, c, d, mask):
    """Four words from ``word``, a multiple of 4, on, where ``mask`` (int32) is not 0."""
    if table.dtype.is_ptr():
        at = table + word
        tl.store(at, a, mask=mask != 0)
        tl.store(at + 1, b, mask=mask != 0)
        tl.store(at + 2, c, mask=mask != 0)
        tl.store(at + 3, d, mask=mask != 0)
    else:
        operands = [table + word * 4, a, b, c, d, mask]
        tl.inline_asm_elementwise(STORE, "=r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_one(table, word):
    if table.dtype.is_ptr():
        return tl.load(table + word)
    else:
        return tl.inline_asm_elementwise(LOAD_ONE, "=r,r", [table + word * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_one(table, word, value):
    if table.dtype.is_ptr():
        tl.store(table + word, value)
    else:
        operands = [table + word * 4, value]
        tl.inline_asm_elementwise(STORE_ONE, "=r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_some(table, word, value, wanted):
    """Where ``wanted`` (32 bits) is not 0."""
    if table.dtype.is_ptr():
        tl.store(table + word, value, mask=wanted != 0)
    else:
        operands = [table + word * 4, value, wanted]
        tl.inline_asm_elementwise(STORE_SOME, "=r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count(table, keys, base, shift):
    """One more in counter (key - base) >> shift, unsigned, of every key for which there is such a counter.

    keys: at least as many as the program has threads.
    """
    if table.dtype.is_ptr():
        bin = (keys - base).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
        tl.atomic_add(table + tl.minimum(bin, BINS).to(tl.int32), 1)
    else:
        operands = [keys, base, shift, table]
        tl.inline_asm_elementwise(COUNT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_leading(table, keys):
    """One more in the counter of every key's 11 leading bits; as many keys as for ``count``."""
    if table.dtype.is_ptr():
        tl.atomic_add(table + (keys.to(tl.uint32, bitcast=True) >> 21).to(tl.int32), 1)
    else:
        tl.inline_asm_elementwise(COUNT_LEADING, "=r,r,r", [keys, table], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def push(table, keys, base, span):
    """Append the keys in [base, base + span), unsigned, to the list, in any order. Four keys at least to a thread."""
    if table.dtype.is_ptr():
        wanted = (keys - base).to(tl.uint32, bitcast=True) < span.to(tl.uint32, bitcast=True)
        at = tl.atomic_add(table + LENGTH + tl.zeros_like(keys), 1, mask=wanted)
        tl.store(table + LIST + at, keys, mask=wanted)
    else:
        operands = [keys, base, span, table]
        tl.inline_asm_elementwise(
            PUSH, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=4
        )


@triton.jit
def set_bits(table, columns, keys, most):
    """Set bit ``column`` of the words behind the table where keys <= most, unsigned."""
    if table.dtype.is_ptr():
        chosen = keys.to(tl.uint32, bitcast=True) <= most.to(tl.uint32, bitcast=True)
        tl.atomic_or(table + LIST + (columns >> 5), tl.full([], 1, tl.int32) << (columns & 31), mask=chosen)
    else:
        operands = [columns, keys, most, table + LIST * 4]
        tl.inline_asm_elementwise(SET_BIT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_marks(table, place, marks):
    """Byte ``place`` behind the table; in the interpreter, a word."""
    if table.dtype.is_ptr():
        tl.store(table + LIST + place, marks)
    else:
        operands = [table + LIST * 4, place, marks]
        tl.inline_asm_elementwise(STORE_BYTE, "=r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_marks(table, line):
    """The eight bytes of a line, as two words."""
    if table.dtype.is_ptr():
        at = table + LIST + line * 8
        low = tl.load(at) | (tl.load(at + 1) << 8) | (tl.load(at + 2) << 16) | (tl.load(at + 3) << 24)
        high = tl.load(at + 4) | (tl.load(at + 5) << 8) | (tl.load(at + 6) << 16) | (tl.load(at + 7) << 24)
        return low, high
    else:
        types: tl.constexpr = (tl.int32, tl.int32)
        at = table + LIST * 4 + line * 8
        return tl.inline_asm_elementwise(LOAD_TWO, "=r,=r,r", [at], dtype=types, is_pure=False, pack=1)
