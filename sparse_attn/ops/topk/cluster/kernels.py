"""Cluster: the CTAs of a cluster hold a long row in registers and search it together, in Gluon for Hopper.

1. Each CTA loads its share of the row: neighbouring columns, so that CTAs are in order of columns.
2. Each counts its keys in a histogram of its own, from its own highest score on. The CTAs meet. Each adds up some of
   the bins of all, which it finds in the others' memory where its own digits lie: a window begins at a multiple of a
   bin. It sums its bins up, tells all CTAs the last sum, and they meet again. So each knows whose bins have the k-th
   score, and finds its bin there. Where the k-th lies behind the window, or too many scores share its bin, they go on
   with the leading digit, or the next.
3. Each lists its scores that share the k-th's bin, and tells all how many it has, and how many above. They meet for the
   last time. Each loads all lists and ranks them, the first columns among equals. Where more are left than a list holds,
   they are equal in all bits, and the first ones win.
4. Each stores its columns, or their slots, behind those of the CTAs before it.

A row is read once. The kernel is bound by latency: three meetings, and a trip to other CTAs' memory after each.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cluster, histogram
from sparse_attn.device.hopper import barrier, launch_dependents, wait
from sparse_attn.ops.topk.primitives import radix_select, set_bits

BINS = histogram.BINS
LEADING_SHIFT = gl.constexpr(21)
MINUS_INF_KEY = gl.constexpr(-8388608)  # 0xff800000; keys below it, unsigned, can be selected
# Words behind the histogram's.
LEAST = gl.constexpr(histogram.HIGHEST.value)
ANCHORS = gl.constexpr(histogram.WORDS.value)  # of each CTA: where its digits begin
TOTALS = gl.constexpr(ANCHORS.value + 16)  # of each CTA: the sum of its bins
ABOVE = gl.constexpr(TOTALS.value + 16)  # of each CTA: scores above the k-th's bin, and those that share it
TIED = gl.constexpr(ABOVE.value + 16)
COUNTS = gl.constexpr(TIED.value + 16)  # of this CTA, while it counts; and ties of CTAs before it that win
SUMS = gl.constexpr(COUNTS.value + 16)  # inclusive, of this CTA's bins of all CTAs, a word a thread
MOST_TIES = gl.constexpr(512)
OWN_KEYS = gl.constexpr(SUMS.value + 512)
OWN_COLUMNS = gl.constexpr(OWN_KEYS.value + MOST_TIES.value)
KEYS = gl.constexpr(OWN_COLUMNS.value + MOST_TIES.value)  # of all CTAs
COLUMNS = gl.constexpr(KEYS.value + MOST_TIES.value)
MARKS = gl.constexpr(COLUMNS.value + MOST_TIES.value)  # a byte for four columns: above in bits 0 to 3, tied in 4 to 7

NOTE_LEAST = gl.constexpr(
    """{ .reg .pred p; .reg .b32 least, lane;
    min.u32 least, $4, $5; min.u32 lane, $6, $7; min.u32 least, least, lane;
    redux.sync.min.u32 least, least, 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
    @p red.shared.min.u32 [$8], least; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"""
)
ADD_UP = gl.constexpr(  # four values of each thread
    """{ .reg .pred p; .reg .b32 sum, lane; add.u32 sum, $4, $5; add.u32 sum, sum, $6; add.u32 sum, sum, $7;
    redux.sync.add.s32 sum, sum, 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
    @p red.shared.add.u32 [$8], sum; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"""
)
LOAD_BYTE = gl.constexpr("{ .reg .b16 b; ld.shared.u8 b, [$1]; cvt.u32.u16 $0, b; }")
# Of keys $4 to $7, of columns $8 to $11: marks, which go to byte $12 and to $0. Those below $16 are above, those less
# than $20 further are tied. These are listed behind $28, whose length is at $24, unless $32 is 0.
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
        f" @q mad.lo.u32 at, at, 4, $28; @q st.shared.b32 [at], ${4 + i};"
        f" @q st.shared.b32 [at+{4 * MOST_TIES.value}], ${8 + i};\n"
        for i in range(4)
    )
    + "DONE: mov.u32 $0, m; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)
# Column $1 of this CTA is above: its bit in the marks from $2 on, where $3 is not 0.
WINS = gl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, quad; setp.ne.s32 p, $3, 0;
    shr.u32 word, $1, 4; mad.lo.u32 word, word, 4, $2; shr.u32 quad, $1, 2; and.b32 quad, quad, 3; shl.b32 quad, quad, 3;
    and.b32 bit, $1, 3; add.u32 bit, bit, quad; shl.b32 bit, 1, bit;
    @p red.shared.or.b32 [word], bit; mov.u32 $0, 0; }"""
)
ADD_ONE_UP = gl.constexpr(
    """{ .reg .pred p; .reg .b32 sum, lane; redux.sync.add.s32 sum, $1, 0xffffffff;
    mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.shared.add.u32 [$2], sum; mov.u32 $0, 0; }"""
)


@triton.constexpr_function
def _telling(ctas):
    """As cluster.tell_all, of value $2 of the thread for which $3 is not 0."""
    ptx = "{ .reg .pred p; .reg .b32 at; setp.eq.s32 p, $3, 0; @p bra DONE; "
    for cta in range(ctas):
        ptx += f"mapa.shared::cluster.u32 at, $1, {cta}; st.shared::cluster.b32 [at], $2; "
    return ptx + "DONE: mov.u32 $0, 0; }"


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _least(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _before(key, other):
    """Whether a key is less than another, unsigned."""
    return key.to(gl.uint32, bitcast=True) < other.to(gl.uint32, bitcast=True)


@gluon.jit
def _asm(PTX: gl.constexpr, CONSTRAINTS: gl.constexpr, operands, pack: gl.constexpr = 1):
    return gl.inline_asm_elementwise(PTX, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=pack)


@gluon.jit
def _of_all(smem, first, CTAS: gl.constexpr):
    """Words ``first`` on, one of each CTA."""
    values = ()
    for four in gl.static_range(CTAS // 4):
        a, b, c, d = histogram.load_four(smem, first + 4 * four)
        values = values + (a, b, c, d)
    return values


@gluon.jit
def _clear(smem, THREADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Zero the bins."""
    thread = gl.arange(0, THREADS, LAYOUT)
    zero = thread * 0
    for quad in gl.static_range(BINS // (4 * THREADS)):
        histogram.store_four(smem, (quad * THREADS + thread) * 4, zero, zero, zero, zero, zero + 1)


@gluon.jit
def _find_bin(smem, shift, wanted, rank, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """(the bin of all CTAs' keys that has the ``wanted``-th, keys in bins before it, keys in it, the key that bin 0
    begins with); where there are fewer keys, how many there are, and 0 for keys in it. ANCHORS says where each CTA's
    bins begin."""
    EACH: gl.constexpr = BINS // CTAS  # bins that a CTA adds up
    PARTS: gl.constexpr = THREADS // EACH  # neighbouring threads for a bin, each for some CTAs
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    cluster.meet()
    anchors = _of_all(smem, ANCHORS, CTAS)
    anchor = anchors[0]
    for cta in gl.static_range(1, CTAS):
        anchor = gl.where(_before(anchors[cta], anchor), anchors[cta], anchor)
    thread = gl.arange(0, THREADS, LINE)
    bin = rank * EACH + thread // PARTS
    counts = thread * 0
    for turn in gl.static_range(CTAS // PARTS):
        cta = thread % PARTS * (CTAS // PARTS) + turn
        skipped = (histogram.load_one(smem, ANCHORS + cta) - anchor).to(gl.uint32, bitcast=True) >> shift.to(gl.uint32)
        there = skipped <= bin.to(gl.uint32)
        word = gl.where(there, bin - skipped.to(gl.int32), 0)
        counts += cluster.load_of(smem, word, cta, there.to(gl.int32))
    sums = gl.associative_scan(counts, 0, _add)  # of a bin's last thread those up to this bin
    histogram.store_one(smem, SUMS + thread, sums)
    _asm(_telling(CTAS), "=r,r,r,r", [smem + (TOTALS + rank) * 4 + thread * 0, sums, (thread == THREADS - 1).to(gl.int32)])
    cluster.meet()
    totals = _of_all(smem, TOTALS, CTAS)
    sum = rank * 0
    holder, before = rank * 0, rank * 0
    for cta in gl.static_range(CTAS):
        further = sum + totals[cta]
        here = (sum < wanted) & (further >= wanted)
        holder = gl.where(here, cta, holder)
        before = gl.where(here, sum, before)
        sum = further
    place = gl.arange(0, EACH, LINE)
    last, cta = SUMS + place * PARTS + PARTS - 1, holder + place * 0
    at_most = cluster.load_of(smem, last, cta, place * 0 + 1)
    below = cluster.load_of(smem, last - PARTS, cta, (place > 0).to(gl.int32))
    here = (before + below < wanted) & (before + at_most >= wanted)
    histogram.store_four(
        smem, histogram.NOTE + place * 0, holder * EACH + place, before + below, at_most - below, place * 0,
        (here & (sum >= wanted)).to(gl.int32),
    )  # fmt: skip
    barrier()
    digit, below, in_bin, _ = histogram.load_four(smem, histogram.NOTE + rank * 0)
    enough = sum >= wanted
    return gl.where(enough, digit, 0), gl.where(enough, below, sum), gl.where(enough, in_bin, 0), anchor


@gluon.jit
def _search(smem, keys, k, rank, WINDOW_SHIFT: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """(base, shift, below, in_bin): all bits of the k-th key but the last ``shift``, how many keys lie below those
    bits, and how many share them: at most MOST_TIES, or all of them are equal. Where there are fewer than k: base -1,
    all keys, none."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    lowest = gl.reduce(keys.to(gl.uint32, bitcast=True), 0, _least).to(gl.int32, bitcast=True)
    _asm(NOTE_LEAST, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [lowest, smem + LEAST * 4 + lowest * 0], 4)
    barrier()
    base = histogram.load_one(smem, LEAST + rank * 0)
    reach = MINUS_INF_KEY - (BINS << WINDOW_SHIFT)  # a window from there ends with the lowest finite score
    base = gl.where(_before(base, reach), base, reach) & (-1 << WINDOW_SHIFT)
    cluster.tell_all(smem, ANCHORS + rank, base, CTAS)
    shift = rank * 0 + WINDOW_SHIFT
    below, in_bin = rank * 0, rank * 0
    going = k >= 0
    while going:
        histogram.count(smem, keys, base, shift)
        digit, more, in_bin, anchor = _find_bin(smem, shift, k - below, rank, CTAS, THREADS)
        missed = in_bin == 0
        few = (missed == 0) & (shift == LEADING_SHIFT) & (digit == BINS - 1)
        base = gl.where(missed, 0, gl.where(few, -1, anchor + (digit << shift)))
        below = gl.where(missed, 0, below + more)
        in_bin = gl.where(few, 0, in_bin)
        finer = (below + in_bin > k) & (in_bin > MOST_TIES) & (shift > 0)
        going = missed | finer
        if going:
            shift = gl.where(missed, LEADING_SHIFT, gl.maximum(shift - histogram.DIGIT_BITS, 0))
            _clear(smem, THREADS, LINE)
            cta = gl.arange(0, CTAS, LINE)
            histogram.store_one(smem, ANCHORS + cta, base + cta * 0)
            barrier()
    return base, shift, below, in_bin


@gluon.jit
def _rank_ties(smem, in_bin, need, rank, SLOTS: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """Of all CTAs' listed keys mark this CTA's that are among the ``need`` least, the first columns among equals.
    Returns how many of the CTAs before it are."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    tied = _of_all(smem, TIED, CTAS)
    place = gl.arange(0, MOST_TIES, LINE)
    start, cta, first = rank * 0, place * 0, place * 0
    for one in gl.static_range(CTAS - 1):
        start += tied[one]
        behind = place >= start
        cta = gl.where(behind, one + 1, cta)
        first = gl.where(behind, start, first)
    valid = (place < in_bin).to(gl.int32)
    key = cluster.load_of(smem, OWN_KEYS + place - first, cta, valid)
    column = cluster.load_of(smem, OWN_COLUMNS + place - first, cta, valid)
    histogram.store_one(smem, KEYS + place, gl.where(valid != 0, key, -1))
    histogram.store_one(smem, COLUMNS + place, column)
    barrier()
    less = place * 0
    for four in range(0, in_bin, 4):
        others = histogram.load_four(smem, KEYS + four)
        columns = histogram.load_four(smem, COLUMNS + four)
        for one in gl.static_range(4):
            less += (_before(others[one], key) | ((others[one] == key) & (columns[one] < column))).to(gl.int32)
    wins = (less < need) & (valid != 0)
    _asm(WINS, "=r,r,r,r", [column - rank * SLOTS, smem + MARKS * 4 + place * 0, (wins & (cta == rank)).to(gl.int32)])
    _asm(ADD_ONE_UP, "=r,r,r", [(wins & (cta < rank)).to(gl.int32), smem + (COUNTS + 1) * 4 + place * 0])
    barrier()
    return histogram.load_one(smem, COUNTS + 1 + rank * 0)


@gluon.jit
def _first_bits(bits, most):
    """The lowest ``most`` bits that are set."""
    kept = bits * 0
    for _ in range(32):
        one = bits & -bits
        kept |= gl.where(most > 0, one, 0)
        most -= (one != 0).to(gl.int32)
        bits ^= one
    return kept


@gluon.jit
def _popcount(bits):
    bits = bits.to(gl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(gl.int32)


@gluon.jit(do_not_specialize=["width", "k", "stride_logits_row"])
def select_cluster(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    width,
    k,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: gl.constexpr,  # columns of a CTA
    ALIGNED: gl.constexpr,
    WINDOW_SHIFT: gl.constexpr,
    CTAS: gl.constexpr,
    THREADS: gl.constexpr,
):
    UNIT: gl.constexpr = 4 if ALIGNED else 1
    ROUNDS: gl.constexpr = SLOTS // (4 * THREADS)
    WORDS: gl.constexpr = MARKS - histogram.WORDS + SLOTS // 16
    FOURS: gl.constexpr = cluster.plane([1, 4], [1, 32], [1, THREADS // 32], CTAS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    row = gl.program_id(0).to(gl.int64)
    rank = cluster.rank()
    thread = gl.arange(0, THREADS, LINE)
    smem = histogram.claim(None, WORDS)
    _clear(smem, THREADS, LINE)
    histogram.store_one(smem, BINS + thread, gl.where(thread == LEAST - BINS, -1, 0))
    barrier()
    wait()
    launch_dependents()

    start = rank * 0
    end = start + width
    if row_starts is not None:
        start = gl.minimum(gl.maximum(gl.load(row_starts + row * stride_starts_row), 0), width)
    if row_ends is not None:
        end = gl.minimum(gl.maximum(gl.load(row_ends + row * stride_ends_row), 0), width)
    base = start // UNIT * UNIT
    first = gl.arange(0, ROUNDS, gl.SliceLayout(1, FOURS))[:, None] * (4 * THREADS)
    column = rank * SLOTS + first + gl.arange(0, 4 * THREADS, gl.SliceLayout(0, FOURS))[None, :]
    source = logits + row * stride_logits_row * UNIT + base
    length = end - base
    if ALIGNED:
        scores = gl.load(source + column, mask=column < (length + 3) // 4 * 4)
    else:
        scores = gl.load(source + column, mask=column < length)
    keys = radix_select.descending_keys(scores, (column >= start - base) & (column < length))

    at, shift, below, in_bin = _search(smem, keys, k, rank, WINDOW_SHIFT, CTAS, THREADS)
    count = gl.minimum(below + in_bin, k)
    all = below + in_bin <= k
    least = gl.where(at == -1, MINUS_INF_KEY, at + gl.where(all, 1 << shift, 0))
    span = gl.where(all, 0, 1 << shift)
    listed = (all == 0) & (in_bin <= MOST_TIES)
    need = k - below
    byte = smem + MARKS * 4 + (column - rank * SLOTS) // 4
    zero = column * 0
    marks = _asm(
        MARK, "=&r,=&r,=&r,=&r," + "r," * 31 + "r",
        [
            keys, column, byte, zero + least, zero + span, zero + (smem + histogram.LENGTH * 4),
            zero + (smem + OWN_KEYS * 4), zero + listed.to(gl.int32),
        ],
        4,
    )  # fmt: skip
    numbers = gl.reduce(_popcount(marks & 15) + (_popcount(marks >> 4) << 16), 0, _add)
    _asm(ADD_UP, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [numbers, smem + COUNTS * 4 + numbers * 0], 4)
    barrier()
    number = histogram.load_one(smem, COUNTS + rank * 0)
    cluster.tell_all(smem, ABOVE + rank, number & 0xFFFF, CTAS)
    cluster.tell_all(smem, TIED + rank, number >> 16, CTAS)
    cluster.meet()
    above, tied = _of_all(smem, ABOVE, CTAS), _of_all(smem, TIED, CTAS)
    position, ties = rank * 0, rank * 0
    for one in gl.static_range(CTAS):
        position += gl.where(one < rank, above[one], 0)
        ties += gl.where(one < rank, tied[one], 0)
    if listed:
        position += _rank_ties(smem, in_bin, need, rank, SLOTS, CTAS, THREADS)
    cluster.arrive()

    bits, equal = thread * 0, thread * 0
    for round in gl.static_range(ROUNDS):
        byte = _asm(LOAD_BYTE, "=r,r", [smem + MARKS * 4 + thread * ROUNDS + round])
        bits |= (byte & 15) << (4 * round)
        equal |= (byte >> 4) << (4 * round)
    if (all | listed) == 0:
        each = _popcount(equal)
        before = gl.associative_scan(each, 0, _add) - each
        bits |= _first_bits(equal, need - ties - before)
        position += gl.minimum(ties, need)
    each = _popcount(bits)
    position += gl.associative_scan(each, 0, _add) - each
    value = base - start + rank * SLOTS + thread * (4 * ROUNDS)
    set_bits.store(out + row * k, bits, position, value)
    for behind in range(count, k, THREADS):  # of which the compiler stores CTA 0's
        gl.store(out + row * k + behind + thread, thread * 0 - 1, mask=behind + thread < k)
    cluster.await_all()
