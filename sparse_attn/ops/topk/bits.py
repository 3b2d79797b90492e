"""What the bits of words stand for, stored by loops in PTX: a warp goes on only as long as one of its own words has bits."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED
from sparse_attn.ops.topk.table import LENGTH


def _from_both_ends(registers: str, first: str, store: str, store_last: str) -> str:
    """PTX that goes through the bits of a word, $1: ``store`` is done with ``bit``, $2 + the number of the first that is left, then
    ``store_last`` with ``last``, that of the last one, where p says that it is another. ``first``: before that, if there are any."""
    return f"""{{ .reg .pred p, q; .reg .b32 word, rest, one, other, bit, last; {registers}
    mov.b32 word, $1;  setp.eq.u32 p, word, 0;  @p bra DONE;  {first}
    NEXT: bfind.u32 last, word;  shl.b32 other, 1, last;  sub.u32 rest, word, 1;  and.b32 rest, word, rest;
    xor.b32 one, word, rest;  bfind.u32 bit, one;  setp.ne.u32 p, one, other;  not.b32 other, other;  and.b32 word, rest, other;
    add.s32 bit, bit, $2;  add.s32 last, last, $2;
    {store}
    {store_last}
    setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }}"""


SCATTER = tl.constexpr(
    _from_both_ends(
        ".reg .b32 ones; .reg .b64 at, to;",
        "mad.wide.s32 at, $3, 4, $4;  popc.b32 ones, word;  mad.wide.u32 to, ones, 4, at;",
        "st.global.b32 [at], bit;  add.s64 at, at, 4;",
        "add.s64 to, to, -4;  @p st.global.b32 [to], last;",
    )
)  # fmt: skip
LINE_UP = tl.constexpr(
    _from_both_ends(
        ".reg .b32 place, to, at;",
        "mov.b32 place, $3;  popc.b32 to, word;  add.s32 to, to, place;",
        "mad.lo.u32 at, place, 4, $5;  setp.lt.u32 q, place, $4;  @q st.shared.b32 [at], bit;  add.s32 place, place, 1;",
        "sub.s32 to, to, 1;  mad.lo.u32 at, to, 4, $5;  setp.lt.and.u32 q, to, $4, p;  @q st.shared.b32 [at], last;",
    )
)  # fmt: skip
# One more for every bit: ptxas makes a scan across the warp of an addition of several.
APPEND = tl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, one, at;
    mov.b32 word, $1;  setp.eq.u32 p, word, 0;  @p bra DONE;
    NEXT: bfind.u32 bit, word;  shl.b32 one, 1, bit;  xor.b32 word, word, one;  add.s32 bit, bit, $2;
    atom.shared.add.u32 at, [$4], 1;  mad.lo.u32 at, at, 4, $3;  st.shared.b32 [at], bit;
    setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }"""
)


@triton.jit
def scatter(out, words, place, left):
    """Store left[i] + the number of every bit that is set in words[i] (uint32), at out[place[i] ..]."""
    if INTERPRETED:
        for bit in range(32):
            there = ((words >> bit) & 1) != 0
            tl.store(out + place, left + bit, mask=there)
            place += there.to(tl.int32)
    else:
        operands = [words, left, place, out]
        tl.inline_asm_elementwise(SCATTER, "=r,r,r,r,l", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def line_up(table, words, place, left, most):
    """Store left[i] + the number of every bit that is set in words[i] (uint32), in words place[i] .. of the table, those below
    ``most``."""
    if table.dtype.is_ptr():
        for bit in range(32):
            there = ((words >> bit) & 1) != 0
            tl.store(table + place, left + bit, mask=there & (place >= 0) & (place < most))
            place += there.to(tl.int32)
    else:
        operands = [words, left, place, most, table]
        tl.inline_asm_elementwise(LINE_UP, "=r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def append(table, words, left, FIRST: tl.constexpr):
    """Append left[i] + the number of every bit that is set in words[i] to the list from word FIRST on, in any order. At least as
    many words as threads: every copy would be appended."""
    if table.dtype.is_ptr():
        for bit in range(32):
            there = ((words >> bit) & 1) != 0
            at = tl.atomic_add(table + LENGTH + tl.zeros_like(left), 1, mask=there)
            tl.store(table + FIRST + at, left + bit, mask=there)
    else:
        operands = [words, left, table + FIRST * 4, table + LENGTH * 4]
        tl.inline_asm_elementwise(APPEND, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
