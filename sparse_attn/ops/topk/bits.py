"""What the bits of words stand for, stored by loops in PTX: a warp goes on only as long as one of its own words has bits."""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED
from sparse_attn.ops.topk.table import LENGTH


def _each_bit(registers: str, first: str, store: str) -> str:
    """PTX that goes through the bits of a word, $1, the last one first: ``store`` is done with ``bit``, $2 + its number.
    ``first``: before that, if there are any. They may use ``one`` and the predicate p."""
    return f"""{{ .reg .pred p; .reg .b32 word, bit, one; {registers}
    mov.b32 word, $1;  setp.eq.u32 p, word, 0;  @p bra DONE;  {first}
    NEXT: bfind.u32 bit, word;  shl.b32 one, 1, bit;  xor.b32 word, word, one;  add.s32 bit, bit, $2;
    {store}
    setp.ne.u32 p, word, 0;  @p bra NEXT;
    DONE: mov.u32 $0, 0; }}"""


BEHIND_THE_LAST = "popc.b32 place, word;  add.s32 place, place, $3;"
SCATTER = tl.constexpr(
    _each_bit(
        ".reg .b32 place; .reg .b64 at;", BEHIND_THE_LAST,
        "sub.s32 place, place, 1;  mad.wide.s32 at, place, 4, $4;  st.global.b32 [at], bit;",
    )
)  # fmt: skip
LINE_UP = tl.constexpr(
    _each_bit(
        ".reg .b32 place;", BEHIND_THE_LAST,
        "sub.s32 place, place, 1;  mad.lo.u32 one, place, 4, $5;  setp.lt.u32 p, place, $4;  @p st.shared.b32 [one], bit;",
    )
)  # fmt: skip
APPEND = tl.constexpr(
    _each_bit(
        ".reg .b32 at;", "popc.b32 one, word;  atom.shared.add.u32 at, [$4], one;  mad.lo.u32 at, at, 4, $3;",
        "st.shared.b32 [at], bit;  add.u32 at, at, 4;",
    )
)  # fmt: skip


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
