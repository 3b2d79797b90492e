"""Keys that share the k-th's bin, the ties: marked, sent to all CTAs and ranked."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cluster, histogram
from sparse_attn.device.bits import popcount
from sparse_attn.device.hopper import barrier
from sparse_attn.ops.topk.select.hopper.search import (
    COLUMNS,
    COUNTS,
    EARLIER,
    KEYS,
    LISTED,
    MARKS,
    MOST_TIES,
    OWN_COUNTS,
    OWN_LISTED,
    OWN_TIES,
    TIED,
    TIES,
    add,
    before,
)

# Of keys $4 to $7, of columns $8 to $11: marks, which go to byte $12 and to $0. Those below $16 are above, those less
# than $20 further are tied. These are listed from $28 on, their number at $24, unless $32 is 0.
MARK = gl.constexpr(
    "{ .reg .pred p, q; .reg .b32 m, d, at; .reg .b16 b; mov.b32 m, 0;\n"
    + "".join(
        f"setp.lt.u32 p, ${4 + i}, $16; @p or.b32 m, m, {1 << i}; sub.u32 d, ${4 + i}, $16;"
        f" setp.lt.u32 p, d, $20; @p or.b32 m, m, {16 << i};\n"
        for i in range(4)
    )
    + "cvt.u16.u32 b, m; st.shared.u8 [$12], b;\n"
    "setp.lt.u32 p, m, 16; setp.eq.or.u32 p, $32, 0, p; @p bra DONE;\n"
    + "".join(
        f"and.b32 d, m, {16 << i}; setp.ne.u32 q, d, 0; @q atom.shared.add.u32 at, [$24], 1;"
        f" @q mad.lo.u32 at, at, 8, $28; @q st.shared.v2.b32 [at], {{${4 + i}, ${8 + i}}};\n"
        for i in range(4)
    )
    + "DONE: mov.u32 $0, m; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)
ADD_UP = gl.constexpr(  # four values of each thread
    """{ .reg .pred p; .reg .b32 sum, lane; add.u32 sum, $4, $5; add.u32 sum, sum, $6; add.u32 sum, sum, $7;
    redux.sync.add.s32 sum, sum, 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
    @p red.shared.add.u32 [$8], sum; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"""
)
# Where $1 is not 0, append key $2 and column $3 to the lists from $5 on, whose length is at $4.
LIST = gl.constexpr(
    f"""{{ .reg .pred p; .reg .b32 at; setp.ne.s32 p, $1, 0; @p atom.shared.add.u32 at, [$4], 1;
    @p mad.lo.u32 at, at, 4, $5; @p st.shared.b32 [at], $2; @p st.shared.b32 [at+{4 * MOST_TIES.value}], $3;
    mov.u32 $0, 0; }}"""
)
# Column $1 of this CTA is above: its bit in the marks from $2 on, where $3 is not 0.
WINS = gl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, quad; setp.ne.s32 p, $3, 0;
    shr.u32 word, $1, 4; mad.lo.u32 word, word, 4, $2; shr.u32 quad, $1, 2; and.b32 quad, quad, 3;
    shl.b32 quad, quad, 3; and.b32 bit, $1, 3; add.u32 bit, bit, quad; shl.b32 bit, 1, bit;
    @p red.shared.or.b32 [word], bit; mov.u32 $0, 0; }"""
)
ADD_ONE_UP = gl.constexpr(
    """{ .reg .pred p; .reg .b32 sum, lane; redux.sync.add.s32 sum, $1, 0xffffffff;
    mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.shared.add.u32 [$2], sum; mov.u32 $0, 0; }"""
)
LOAD_BYTE = gl.constexpr("{ .reg .b16 b; ld.shared.u8 b, [$1]; cvt.u32.u16 $0, b; }")


@gluon.jit
def _asm(PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, operands, pack: gl.constexpr = 1):
    return gl.inline_asm_elementwise(PTX, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=pack)


@gluon.jit
def mark(smem, keys, columns, first, least, span, listed):
    """Mark keys below ``least`` as above, and those less than ``span`` further as tied, which are listed where
    ``listed``. Returns how many, above and tied, in the halves of a word. first: this CTA's first column."""
    zero = columns * 0
    marks = _asm(
        MARK, "=&r,=&r,=&r,=&r," + "r," * 31 + "r",
        [
            keys, columns, smem + MARKS * 4 + (columns - first) // 4, zero + least, zero + span,
            zero + (smem + OWN_LISTED * 4), zero + (smem + OWN_TIES * 4), zero + listed.to(gl.int32),
        ],
        4,
    )  # fmt: skip
    # Both counts in the halves of a word, added up in a thread, a warp and the CTA.
    numbers = gl.reduce(popcount(marks & 15) + (popcount(marks >> 4) << 16), 0, add)
    _asm(ADD_UP, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [numbers, smem + OWN_COUNTS * 4 + numbers * 0], 4)
    barrier()
    return histogram.load_one(smem, OWN_COUNTS + first * 0)


@gluon.jit
def marks_of(smem, thread, ROUNDS: gl.constexpr):
    """(bits of a thread's columns that are above, that are tied); of four columns for each round."""
    above, tied = thread * 0, thread * 0
    for round in gl.static_range(ROUNDS):
        byte = _asm(LOAD_BYTE, "=r,r", [smem + MARKS * 4 + thread * ROUNDS + round])
        above |= (byte & 15) << (4 * round)
        tied |= (byte >> 4) << (4 * round)
    return above, tied


@gluon.jit
def send_counts(smem, rank, numbers, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """What ``mark`` has counted, to all."""
    thread = gl.arange(0, THREADS, cluster.line(THREADS, CTAS))
    # A thread sends to the CTA of its number.
    word, there = thread * 0 + COUNTS + 2 * rank, (thread < CTAS).to(gl.int32)
    above = thread * 0 + (numbers & 0xFFFF)
    cluster.send_two(smem, word, TIED, thread, there, above, thread * 0 + (numbers >> 16))


@gluon.jit
def counts_before(smem, rank, CTAS: gl.constexpr):
    """(keys above, ties) of the CTAs before this one."""
    above, tied = rank * 0, rank * 0
    for pair in gl.static_range(CTAS // 2):
        a, b, c, d = histogram.load_four(smem, COUNTS + 4 * pair + rank * 0)
        above += gl.where(2 * pair < rank, a, 0) + gl.where(2 * pair + 1 < rank, c, 0)
        tied += gl.where(2 * pair < rank, b, 0) + gl.where(2 * pair + 1 < rank, d, 0)
    return above, tied


@gluon.jit
def send_ties(smem, rank, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """This CTA's list to all."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    # A place for every tie of every CTA: a thread sends one tie to one CTA.
    for first in gl.static_range(0, CTAS * MOST_TIES, THREADS):
        place = first + gl.arange(0, THREADS, LINE)
        tie, cta = place % MOST_TIES, place // MOST_TIES
        key = histogram.load_one(smem, OWN_TIES + 2 * tie)
        column = histogram.load_one(smem, OWN_TIES + 2 * tie + 1)
        cluster.send_two(smem, TIES + 2 * (rank * MOST_TIES + tie), TIED, cta, place * 0 + 1, key, column)


@gluon.jit
def rank_ties(smem, in_bin, need, rank, SLOTS: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """Of all CTAs' ties mark this CTA's that are among the ``need`` least keys, the first columns among equals. Returns
    how many of the CTAs before it are."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    place = gl.arange(0, CTAS * MOST_TIES, LINE)
    cta, tie = place // MOST_TIES, place % MOST_TIES
    # A CTA's list has as many ties as it has counted.
    valid = tie < histogram.load_one(smem, COUNTS + 2 * cta + 1)
    key = histogram.load_one(smem, TIES + 2 * place)
    column = histogram.load_one(smem, TIES + 2 * place + 1)
    # All lists become one without gaps, in any order.
    _asm(
        LIST,
        "=r,r,r,r,r,r",
        [valid.to(gl.int32), key, column, smem + LISTED * 4 + place * 0, smem + KEYS * 4 + place * 0],
    )
    barrier()
    # A tie's rank is how many come before it, by key, then by column.
    less = place * 0
    for four in range(0, in_bin, 4):
        keys = histogram.load_four(smem, KEYS + four)
        columns = histogram.load_four(smem, COLUMNS + four)
        for one in gl.static_range(4):
            earlier = before(keys[one], key) | ((keys[one] == key) & (columns[one] < column))
            less += (earlier & (four + one < in_bin)).to(gl.int32)
    # Own winners become marks; those of CTAs before count for this one's place.
    wins = valid & (less < need)
    _asm(WINS, "=r,r,r,r", [column - rank * SLOTS, smem + MARKS * 4 + place * 0, (wins & (cta == rank)).to(gl.int32)])
    others = (wins & (cta < rank)).to(gl.int32)
    _asm(ADD_ONE_UP, "=r,r,r", [others, smem + EARLIER * 4 + place * 0])
    barrier()
    return histogram.load_one(smem, EARLIER + rank * 0)


@gluon.jit
def first_bits(bits, most):
    """The lowest ``most`` bits that are set."""
    kept = bits * 0
    for _ in range(32):
        one = bits & -bits
        kept |= gl.where(most > 0, one, 0)
        most -= (one != 0).to(gl.int32)
        bits ^= one
    return kept
