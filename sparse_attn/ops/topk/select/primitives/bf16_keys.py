"""Scores as bf16, rounded towards zero, two neighbours in a word. They take half the registers of fp32.

A key is 16 bits that ascend as scores fall: the upper half of radix_select's descending key. Zeros differ: they and
tiny negative scores share one key.
"""

import triton
import triton.language as tl

from sparse_attn.device import histogram
from sparse_attn.device.cast import INTERPRETED

MINUS_INF = tl.constexpr(0xFF80)  # and its key: what is not to be selected
TWO_MINUS_INF = tl.constexpr(-8323200)  # 0xff80ff80

ROUND = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; cvt.rz.bf16x2.f32 $0, $2, $1; add.rn.bf16x2 $0, $0, zero; }")
MAXIMUM = tl.constexpr("max.bf16x2 $0, $1, $2;")
MARK = tl.constexpr(
    """{ .reg .b32 above, equal; set.gt.u32.bf16x2 above, $1, $2; set.eq.u32.bf16x2 equal, $1, $2;
    and.b32 above, above, 0x00020001;  and.b32 equal, equal, 0x00200010;  or.b32 $0, above, equal; }"""
)


def _count(registers: str, both: str, each: str, smem: str) -> str:
    """PTX that counts the two scores of a word, $1, by the distance of their keys from the first key, minus $2.
    ``both`` sees both distances in ``high``. ``each`` sees one in ``low`` and one in ``high``."""
    return f"""{{ .reg .b32 high, low, sign; {registers}
    prmt.b32 sign, $1, 0, 0xBB99;  lop3.b32 high, $1, sign, 0x7fff7fff, 0xd2;  add.u16x2 high, high, $2;  {both}
    and.b32 low, high, 0xffff;  shr.u32 high, high, 16;  {each}
    mad.lo.u32 low, low, 4, {smem};  mad.lo.u32 high, high, 4, {smem};
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
    """Round two fp32 towards zero, into one word. -0.0 becomes 0.0, NaN stays NaN."""
    if INTERPRETED:
        return _rounded(first) | (_rounded(second) << 16)
    else:
        return tl.inline_asm_elementwise(ROUND, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _rounded(score):
    bf16 = (score.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.where(score != score, 0x7FFF, tl.where((bf16 & 0x7FFF) == 0, 0, bf16))


@triton.jit
def lower(words):
    """The first score of every word, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper(words):
    """The second score of every word, as fp32."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def maximum(words, others):
    """The greater of two words' first scores, and of their second scores. A number wins over NaN."""
    if INTERPRETED:
        low = tl.where(lower(words) > lower(others), words, others) & 0xFFFF
        return low | (tl.where(upper(words) > upper(others), words, others) & -65536)
    else:
        return tl.inline_asm_elementwise(MAXIMUM, "=r,r,r", [words, others], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def key_of(bf16):
    """16 bits of a score -> its key, and back."""
    return bf16 ^ tl.where(bf16 < 0x8000, 0x7FFF, 0)


@triton.jit
def _distance(bf16, least):
    """How far a score's key lies behind ``least``."""
    return (key_of(bf16 & 0xFFFF) - least) & 0xFFFF


@triton.jit
def _twice(bf16):
    """A word of the same 16 bits twice."""
    return (bf16 & 0xFFFF) | (bf16 << 16)


@triton.jit
def count(smem, words, least, last):
    """For every score, add one to the bin of its key's distance from ``least``. Greater distances count in the bin
    ``last``. There are at least as many words as histogram.count needs keys."""
    if smem.dtype.is_ptr():
        tl.atomic_add(smem + tl.minimum(_distance(words, least), last), 1)
        tl.atomic_add(smem + tl.minimum(_distance(words >> 16, least), last), 1)
    else:
        operands = [words, _twice(-least), _twice(last), smem]
        tl.inline_asm_elementwise(COUNT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_from(smem, words, least, end, base, shift):
    """For every score whose key lies less than ``end`` behind the least key, add one to bin (distance - base) >> shift,
    if there is such a bin."""
    if smem.dtype.is_ptr():
        for bf16 in tl.static_range(2):
            distance = _distance(words >> (16 * bf16), least)
            histogram.count(smem, tl.where(distance < end, distance, -1), base, shift)
    else:
        operands = [words, _twice(-least), base, shift, end, smem]
        tl.inline_asm_elementwise(COUNT_FROM, "=r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def marks(words, bf16):
    """Whether each score of a word is above ``bf16``, and whether it equals it: bits 0 and 4 for the first score, 17
    and 21 for the second."""
    both = bf16 | (bf16 << 16)
    if INTERPRETED:
        score = upper(both)
        above = (lower(words) > score).to(tl.int32) | ((upper(words) > score).to(tl.int32) << 17)
        equal = (lower(words) == score).to(tl.int32) | ((upper(words) == score).to(tl.int32) << 17)
        return above | (equal << 4)
    else:
        return tl.inline_asm_elementwise(MARK, "=r,r,r", [words, both], dtype=tl.int32, is_pure=True, pack=1)
