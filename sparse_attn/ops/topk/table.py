"""Counters in a program's shared memory, which the language cannot name: PTX on NVIDIA, memory in the interpreter.

A table is BINS counters, behind them one for what is not to be counted, the length of a list, and a note of four words;
what comes then, lists.py has. It is an address in shared memory, or a pointer where the launcher passed one. Triton may hold
a tensor of fewer elements than threads several times over: that matters where every copy is counted.
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
def behind(table, word):
    """What starts ``word`` words behind a table, as another one."""
    if table.dtype.is_ptr():
        return table + word
    else:
        return table + word * 4


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
