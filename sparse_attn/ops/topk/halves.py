"""The upper halves of scores: bf16 towards zero, two neighbours to a word.

A half's key: 16 bits that ascend as scores fall, with the falling key's upper half but for zeros: tiny negative scores share
theirs with zero.
"""

import triton
import triton.language as tl

from sparse_attn.device.cast import INTERPRETED
from sparse_attn.ops.topk import table as tables

NOTHING = tl.constexpr(0xFF80)  # -inf, and its key: what is not to be selected
NO_TWO = tl.constexpr(-8323200)  # two of them, 0xff80ff80

ROUND = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; cvt.rz.bf16x2.f32 $0, $2, $1; add.rn.bf16x2 $0, $0, zero; }")
GREATER = tl.constexpr("max.bf16x2 $0, $1, $2;")
MARK = tl.constexpr(
    """{ .reg .b32 above, equal; set.gt.u32.bf16x2 above, $1, $2; set.eq.u32.bf16x2 equal, $1, $2;
    and.b32 above, above, 0x00020001;  and.b32 equal, equal, 0x00200010;  or.b32 $0, above, equal; }"""
)


def _count(registers: str, both: str, each: str, table: str) -> str:
    """PTX that counts two halves, $1, whose keys lie so far behind the first one, minus $2: ``both`` is done with these distances
    in ``high``, ``each`` with one in ``low`` and one in ``high``."""
    return f"""{{ .reg .b32 high, low, sign; {registers}
    prmt.b32 sign, $1, 0, 0xBB99;  lop3.b32 high, $1, sign, 0x7fff7fff, 0xd2;  add.u16x2 high, high, $2;  {both}
    and.b32 low, high, 0xffff;  shr.u32 high, high, 16;  {each}
    mad.lo.u32 low, low, 4, {table};  mad.lo.u32 high, high, 4, {table};
    red.shared.add.u32 [low], 1;  red.shared.add.u32 [high], 1;  mov.u32 $0, 0; }}"""


COUNT = tl.constexpr(_count("", "min.u16x2 high, high, $3;", "", "$4"))
COUNT_FROM = tl.constexpr(
    _count(
        ".reg .pred p, q;", "",
        """setp.ge.u32 p, low, $5;  setp.ge.u32 q, high, $5;
    sub.u32 low, low, $3;  sub.u32 high, high, $3;  shr.u32 low, low, $4;  shr.u32 high, high, $4;
    min.u32 low, low, 2048;  min.u32 high, high, 2048;  selp.b32 low, 2048, low, p;  selp.b32 high, 2048, high, q;""",
        "$6",
    )
)  # fmt: skip


@triton.jit
def round_two(first, second):
    """fp32 -> words: both towards zero, -0.0 as 0.0, NaN as NaN."""
    if INTERPRETED:
        return _rounded(first) | (_rounded(second) << 16)
    else:
        return tl.inline_asm_elementwise(ROUND, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _rounded(score):
    half = (score.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.where(score != score, 0x7FFF, tl.where((half & 0x7FFF) == 0, 0, half))


@triton.jit
def lower(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def greater(words, others):
    """The greater one of either half, a number rather than NaN."""
    if INTERPRETED:
        low = tl.where(lower(words) > lower(others), words, others) & 0xFFFF
        return low | (tl.where(upper(words) > upper(others), words, others) & -65536)
    else:
        return tl.inline_asm_elementwise(GREATER, "=r,r,r", [words, others], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def key(half):
    """16 bits of a score -> its key, and back."""
    return half ^ tl.where(half < 0x8000, 0x7FFF, 0)


@triton.jit
def _behind(half, least):
    """How far a half's key lies behind ``least``."""
    return (key(half & 0xFFFF) - least) & 0xFFFF


@triton.jit
def _twice(half):
    return (half & 0xFFFF) | (half << 16)


@triton.jit
def count(table, words, least, last):
    """One more in the counter of how far the key of each half of a word lies behind ``least``, in the ``last`` one where that is
    further. As many words as keys for ``tables.count``."""
    if table.dtype.is_ptr():
        tl.atomic_add(table + tl.minimum(_behind(words, least), last), 1)
        tl.atomic_add(table + tl.minimum(_behind(words >> 16, least), last), 1)
    else:
        operands = [words, _twice(-least), _twice(last), table]
        tl.inline_asm_elementwise(COUNT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_from(table, words, least, end, base, shift):
    """One more in the counter (distance - base) >> shift of every half that lies less than ``end`` behind, where there is one."""
    if table.dtype.is_ptr():
        for half in tl.static_range(2):
            behind = _behind(words >> (16 * half), least)
            tables.count(table, tl.where(behind < end, behind, -1), base, shift)
    else:
        operands = [words, _twice(-least), base, shift, end, table]
        tl.inline_asm_elementwise(COUNT_FROM, "=r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def marks(words, half):
    """Whether each half of a word is greater than ``half``, and whether it is equal: bits 0 and 4, of the second 17 and 21."""
    both = half | (half << 16)
    if INTERPRETED:
        score = upper(both)
        above = (lower(words) > score).to(tl.int32) | ((upper(words) > score).to(tl.int32) << 17)
        equal = (lower(words) == score).to(tl.int32) | ((upper(words) == score).to(tl.int32) << 17)
        return above | (equal << 4)
    else:
        return tl.inline_asm_elementwise(MARK, "=r,r,r", [words, both], dtype=tl.int32, is_pure=True, pack=1)
