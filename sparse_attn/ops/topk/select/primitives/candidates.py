"""A CTA's list of candidates in global memory: the scores above a bound, with their columns, in any order.

A candidate is an int64: its column in the lower half, its score's bits in the upper half. The list's length is the word
LENGTH of the CTA's shared memory. It counts candidates that found no room, too.
"""

import triton
import triton.language as tl

from sparse_attn.device.histogram import LENGTH
from sparse_attn.ops.topk.select.primitives import radix_select

PACK = tl.constexpr(16)  # scores of a thread that are appended at once


def _append() -> str:
    """PTX for a thread's 16 scores. The threads of a warp count theirs, add the counts up, and one of them claims
    places for all."""
    pack = PACK.value
    out, scores, columns, limit, smem, capacity = (pack * operand for operand in range(1, 7))
    compare = " ".join(
        f"setp.gt.f32 p{i}, ${scores + i}, ${limit};  @p{i} add.s32 n{i % 4}, n{i % 4}, 1;" for i in range(pack)
    )
    scan = " ".join(f"shfl.sync.up.b32 up|q, at, {step}, 0, -1;  @q add.s32 at, at, up;" for step in (1, 2, 4, 8, 16))
    store = " ".join(
        f"""mad.wide.u32 to, at, 8, ${out};  @p{i} st.global.v2.b32 [to], {{${columns + i}, ${scores + i}}};
        @p{i} add.s32 at, at, 1;"""
        for i in range(pack)
    )
    predicates = ", ".join(f"p{i}" for i in range(pack))
    results = " ".join(f"mov.u32 ${i}, 0;" for i in range(pack))
    return f"""{{ .reg .pred {predicates}, q; .reg .b32 n0, n1, n2, n3, at, up, total, begin; .reg .b64 to;
    mov.b32 n0, 0; mov.b32 n1, 0; mov.b32 n2, 0; mov.b32 n3, 0;  {compare}
    add.s32 n0, n0, n1;  add.s32 n2, n2, n3;  add.s32 n0, n0, n2;
    mov.b32 at, n0;  {scan}
    shfl.sync.idx.b32 total, at, 31, 31, -1;  setp.eq.s32 q, total, 0;  @q bra DONE;
    mov.u32 begin, %laneid;  setp.eq.u32 q, begin, 0;
    @q atom.shared.add.u32 begin, [${smem} + {4 * LENGTH.value}], total;
    shfl.sync.idx.b32 begin, begin, 0, 31, -1;
    add.s32 total, total, begin;  setp.gt.u32 q, total, ${capacity};  @q bra DONE;
    sub.s32 at, at, n0;  add.s32 at, at, begin;
    {store}
    DONE: {results} }}"""


APPEND = tl.constexpr(_append())
CONSTRAINTS = tl.constexpr(",".join(["=r"] * PACK.value + ["l"] * PACK.value + ["r"] * (5 * PACK.value)))


@triton.jit
def append(smem, out, scores, columns, limit, capacity):
    """Append the scores above ``limit`` to the list at ``out``, which has room for ``capacity``. NaN and -inf never lie
    above. Each thread holds a multiple of PACK scores, none of them twice."""
    bits = scores.to(tl.int32, bitcast=True)
    if smem.dtype.is_ptr():
        wanted = scores > limit
        at = tl.atomic_add(smem + LENGTH + tl.zeros_like(columns), 1, mask=wanted)
        candidate = (bits.to(tl.int64) << 32) | columns.to(tl.int64)
        tl.store(out + at, candidate, mask=wanted & (at < capacity))
    else:
        operands = [out, bits, columns, limit.to(tl.int32, bitcast=True), smem, capacity]
        tl.inline_asm_elementwise(APPEND, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=PACK)


@triton.jit
def locate(counts, capacity, CTAS: tl.constexpr, SLOTS: tl.constexpr):
    """Where the candidates of a row's CTAS lists lie. The lists are ``capacity`` apart and hold ``counts`` candidates
    each. Returns (the position of each slot's candidate, number of candidates, whether all of them are stored)."""
    slot = tl.arange(0, SLOTS)
    position = slot
    total = tl.full([], 0, tl.int32)
    fits = total == 0
    for cta in tl.static_range(CTAS):
        number = tl.load(counts + cta, cache_modifier=".cg")
        fits = fits & (number <= capacity)
        total += number
        if cta + 1 < CTAS:
            position = tl.where(slot >= total, slot - total + (cta + 1) * capacity, position)
    return position, total, fits


@triton.jit
def load(lists, position, number):
    """(keys, columns) of the first ``number`` candidates. Slots beyond have the last key."""
    inside = tl.arange(0, position.shape[0]) < number
    candidate = tl.load(lists + position, mask=inside, other=0, cache_modifier=".cg")
    scores = (candidate >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return radix_select.descending_keys(scores, inside), candidate.to(tl.int32)
