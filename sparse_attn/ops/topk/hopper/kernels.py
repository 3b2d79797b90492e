"""Cluster: the CTAs of a cluster hold a long row in registers and search it together, in Gluon for Hopper.

1. Each CTA loads its share of the row, neighbouring columns. So CTAs are in order of columns.
2. Each finds its highest score and sends the key that its window begins with, a multiple of a bin, to all.
3. Each counts its keys in a histogram of its own. Meanwhile those keys arrive. They say where its bins lie among the
   row's: the first CTA's window is the row's, and others begin some bins further on.
4. All histograms are added up: each CTA gets a part of every other's, and sends the sums to all (reduce-scatter and
   all-gather). Then each CTA finds the k-th score's bin as if it were alone.
   Where the k-th score lies behind the window, a second window follows, then the leading digit. Where more than
   MOST_TIES scores share its bin, the next digit does.
5. Each sends the scores that share the bin to all, and how many lie above it. Each ranks them all, the first columns
   among equals. More than MOST_TIES are equal in all bits, and the first ones win.
6. Each stores its columns, or their slots, behind those of the CTAs before it.

A row is read once. The kernel is bound by latency: four trips to the other CTAs, the first of them beside the counting.
README.md has the trips, barriers, shared memory and registers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cluster, histogram
from sparse_attn.device.bits import popcount
from sparse_attn.device.hopper import barrier, launch_dependents, wait
from sparse_attn.ops.topk.hopper import packed
from sparse_attn.ops.topk.primitives import radix_select, set_bits

BINS = histogram.BINS
MINUS_INF_KEY = gl.constexpr(-8388608)  # 0xff800000; keys below it, unsigned, can be selected
MOST_TIES = gl.constexpr(64)
MOST_CTAS = gl.constexpr(16)
EAGER_SLOTS = gl.constexpr(4096)  # a CTA's columns up to which it reads those behind the row's end rather than wait
# Words behind the histogram's, whose word HIGHEST has the least key.
FIRST = gl.constexpr(histogram.WORDS.value)
ANCHORED = gl.constexpr(FIRST.value)  # mbarriers
SCATTERED = gl.constexpr(FIRST.value + 2)
GATHERED = gl.constexpr(FIRST.value + 4)
TIED = gl.constexpr(FIRST.value + 6)
TOLD = gl.constexpr(FIRST.value + 8)
ANCHORS = gl.constexpr(FIRST.value + 12)  # of each CTA: the key that its bins begin with
COUNTS = gl.constexpr(ANCHORS.value + 16)  # of each CTA: scores above the k-th's bin, and scores in it
HEARD = gl.constexpr(COUNTS.value + 32)  # of each CTA: anything, once it knows where the row begins
OWN_COUNTS = gl.constexpr(HEARD.value + 16)  # of this CTA, while it counts: both in one; ties before it that win
NUMBER = gl.constexpr(OWN_COUNTS.value + 2)  # of ties in the list of all
OWN_NUMBER = gl.constexpr(OWN_COUNTS.value + 3)
OWN_TIES = gl.constexpr(OWN_COUNTS.value + 4)  # [MOST_TIES, 2]: key and column
TIES = gl.constexpr(OWN_TIES.value + 128)  # [CTAS, MOST_TIES, 2], as they come
KEYS = gl.constexpr(TIES.value + 2048)  # of all ties, in any order
COLUMNS = gl.constexpr(KEYS.value + 64)
PARTS = gl.constexpr(COLUMNS.value + 64)  # [CTAS, BINS / CTAS]: each CTA's counts of this one's part of the bins
SUMS = gl.constexpr(PARTS.value + 2048)  # [BINS]: of all
MARKS = gl.constexpr(SUMS.value + 2048)  # a byte for four columns: above in bits 0 to 3, in the bin in 4 to 7

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
# Column $1 of this CTA is above: its bit in the marks from $2 on, where $3 is not 0.
WINS = gl.constexpr(
    """{ .reg .pred p; .reg .b32 word, bit, quad; setp.ne.s32 p, $3, 0;
    shr.u32 word, $1, 4; mad.lo.u32 word, word, 4, $2; shr.u32 quad, $1, 2; and.b32 quad, quad, 3; shl.b32 quad, quad, 3;
    and.b32 bit, $1, 3; add.u32 bit, bit, quad; shl.b32 bit, 1, bit;
    @p red.shared.or.b32 [word], bit; mov.u32 $0, 0; }"""
)
# Where $1 is not 0, append key $2 and column $3 to the lists from $5 on, whose length is at $4.
LIST = gl.constexpr(
    f"""{{ .reg .pred p; .reg .b32 at; setp.ne.s32 p, $1, 0; @p atom.shared.add.u32 at, [$4], 1;
    @p mad.lo.u32 at, at, 4, $5; @p st.shared.b32 [at], $2; @p st.shared.b32 [at+{4 * MOST_TIES.value}], $3;
    mov.u32 $0, 0; }}"""
)
ADD_ONE_UP = gl.constexpr(
    """{ .reg .pred p; .reg .b32 sum, lane; redux.sync.add.s32 sum, $1, 0xffffffff;
    mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p red.shared.add.u32 [$2], sum; mov.u32 $0, 0; }"""
)


@triton.constexpr_function
def smem_words(slots):
    """Behind the histogram."""
    return MARKS.value - FIRST.value + slots // 16


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
def _clear(smem, THREADS: gl.constexpr, LINE: gl.constexpr):
    """Zero the bins."""
    thread = gl.arange(0, THREADS, LINE)
    zero = thread * 0
    for quad in gl.static_range(BINS // (4 * THREADS)):
        histogram.store_four(smem, (quad * THREADS + thread) * 4, zero, zero, zero, zero, zero + 1)


@gluon.jit
def _add_up(smem, rank, shift, first_of_row, phase, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """SUMS of all CTAs' bins, those of the row counted from ``first_of_row``. ANCHORS has what this CTA's begin with."""
    EACH: gl.constexpr = BINS // CTAS
    ROUNDS: gl.constexpr = BINS // (4 * THREADS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    thread = gl.arange(0, THREADS, LINE)
    zero, one = thread * 0, thread * 0 + 1
    own = histogram.load_one(smem, ANCHORS + rank)
    skipped = ((own - first_of_row).to(gl.uint32, bitcast=True) >> shift.to(gl.uint32)).to(gl.int32)
    barrier()
    for round in gl.static_range(ROUNDS):
        bin = (round * THREADS + thread) * 4
        counts = ()
        for place in gl.static_range(4):
            there = bin + place >= skipped
            count = histogram.load_one(smem, gl.where(there, bin + place - skipped, 0))
            counts = counts + (gl.where(there, count, 0),)
        word = PARTS + rank * EACH + bin % EACH
        cluster.send_four(smem, word, SCATTERED, bin // EACH, one, counts[0], counts[1], counts[2], counts[3])
    cluster.await_bytes(smem, SCATTERED, phase)
    for round in gl.static_range(ROUNDS):
        place = round * THREADS + thread
        cta, quad = place % CTAS, place // CTAS
        a, b, c, d = zero, zero, zero, zero
        for source in gl.static_range(CTAS):
            e, f, g, h = histogram.load_four(smem, PARTS + source * EACH + 4 * quad)
            a, b, c, d = a + e, b + f, c + g, d + h
        cluster.send_four(smem, SUMS + rank * EACH + 4 * quad, GATHERED, cta, one, a, b, c, d)
    cluster.await_bytes(smem, GATHERED, phase)


@gluon.jit
def _find_bin(smem, wanted, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """Of SUMS: (the first bin with at least ``wanted`` keys in it and before it, keys before it, keys in it), or, where
    there are fewer, (0, all of them, 0)."""
    QUADS: gl.constexpr = BINS // (4 * THREADS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    thread = gl.arange(0, THREADS, LINE)
    first = thread * (4 * QUADS)
    mass = thread * 0
    for quad in gl.static_range(QUADS):
        a, b, c, d = histogram.load_four(smem, SUMS + first + 4 * quad)
        mass += (a + b) + (c + d)
    total = gl.associative_scan(mass, 0, _add)
    below = total - mass
    last = thread == THREADS - 1
    here = (below < wanted) & (total >= wanted)
    digit, before, in_bin = thread * 0, total, thread * 0  # of the last thread where all keys are too few
    for quad in gl.static_range(QUADS):
        four = histogram.load_four(smem, SUMS + first + 4 * quad)
        for one in gl.static_range(4):
            found = (below < wanted) & (below + four[one] >= wanted)
            digit = gl.where(found, first + (4 * quad + one), digit)
            before = gl.where(found, below, before)
            in_bin = gl.where(found, four[one], in_bin)
            below += four[one]
    note = (here | (last & (total < wanted))).to(gl.int32)
    histogram.store_four(smem, histogram.NOTE + thread * 0, digit, before, in_bin, thread * 0, note)
    barrier()
    digit, before, in_bin, _ = histogram.load_four(smem, histogram.NOTE + wanted * 0)
    return digit, before, in_bin


@gluon.jit
def _search(smem, keys, k, rank, WINDOW_SHIFT: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """(base, shift, below, in_bin): all bits of the k-th key but the last ``shift``, how many keys lie below those
    bits, and how many share them: at most MOST_TIES, or all of them are equal. Where there are fewer than k: base -1,
    all keys, none."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    thread = gl.arange(0, THREADS, LINE)
    lowest = gl.reduce(keys.to(gl.uint32, bitcast=True), 0, _least).to(gl.int32, bitcast=True)
    _asm(NOTE_LEAST, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [lowest, smem + histogram.HIGHEST * 4 + lowest * 0], 4)
    barrier()
    own = histogram.load_one(smem, histogram.HIGHEST + rank * 0)
    reach = MINUS_INF_KEY - (BINS << WINDOW_SHIFT)  # a window from there ends with the lowest finite score
    own = gl.where(_before(own, reach), own, reach) & (-1 << WINDOW_SHIFT)
    to = thread * 0 + ANCHORS + rank
    cluster.send(smem, to, ANCHORED, thread, (thread < CTAS).to(gl.int32), own + thread * 0)
    shift = rank * 0 + WINDOW_SHIFT
    below, in_bin, base, phase, windows = rank * 0, rank * 0, own, rank * 0, rank * 0
    going = k >= 0
    while going:
        histogram.count(smem, keys, own, shift)
        if phase == 0:
            cluster.await_bytes(smem, ANCHORED, phase)
            for four in gl.static_range(0, CTAS, 4):
                anchors = histogram.load_four(smem, ANCHORS + four + rank * 0)
                for one in gl.static_range(4):
                    base = gl.where(_before(anchors[one], base), anchors[one], base)
        _add_up(smem, rank, shift, base, phase, CTAS, THREADS)
        digit, more, in_bin = _find_bin(smem, k - below, CTAS, THREADS)
        missed = in_bin == 0
        few = (missed == 0) & (shift == radix_select.LEADING_SHIFT) & (digit == radix_select.UNSELECTABLE)
        again = base + (BINS << WINDOW_SHIFT)  # where a second window begins
        second = missed & (phase == 0) & _before(again, reach)
        at = base + (digit << shift)
        below = gl.where(missed, gl.where(second, more, 0), below + more)
        base = gl.where(missed, gl.where(second, again, 0), gl.where(few, -1, at))
        in_bin = gl.where(few, 0, in_bin)
        finer = (below + in_bin > k) & (in_bin > MOST_TIES) & (shift > 0)
        going = missed | finer
        if going:
            next = gl.maximum(shift - histogram.DIGIT_BITS, 0)
            shift = gl.where(missed, gl.where(second, WINDOW_SHIFT, radix_select.LEADING_SHIFT), next)
            own, phase = base, phase + 1
            histogram.store_one(smem, ANCHORS + rank, own)
            _clear(smem, THREADS, LINE)
            cluster.expect(smem, SCATTERED, 4 * BINS)
            cluster.expect(smem, GATHERED, 4 * BINS)
            cluster.meet()  # nobody reads what is sent next
    return base, shift, below, in_bin


@gluon.jit
def _send_ties(smem, rank, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """This CTA's list to all."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    for first in gl.static_range(0, CTAS * MOST_TIES, THREADS):
        place = first + gl.arange(0, THREADS, LINE)
        tie, cta = place % MOST_TIES, place // MOST_TIES
        key = histogram.load_one(smem, OWN_TIES + 2 * tie)
        column = histogram.load_one(smem, OWN_TIES + 2 * tie + 1)
        cluster.send_two(smem, TIES + 2 * (rank * MOST_TIES + tie), TIED, cta, place * 0 + 1, key, column)


@gluon.jit
def _rank_ties(smem, in_bin, need, rank, SLOTS: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """Of all CTAs' ties mark this CTA's that are among the ``need`` least keys, the first columns among equals. Returns
    how many of the CTAs before it are."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    place = gl.arange(0, CTAS * MOST_TIES, LINE)
    cta, tie = place // MOST_TIES, place % MOST_TIES
    valid = tie < histogram.load_one(smem, COUNTS + 2 * cta + 1)
    key = histogram.load_one(smem, TIES + 2 * place)
    column = histogram.load_one(smem, TIES + 2 * place + 1)
    _asm(LIST, "=r,r,r,r,r,r", [valid.to(gl.int32), key, column, smem + NUMBER * 4 + place * 0, smem + KEYS * 4 + place * 0])
    barrier()
    less = place * 0
    for four in range(0, in_bin, 4):
        keys = histogram.load_four(smem, KEYS + four)
        columns = histogram.load_four(smem, COLUMNS + four)
        for one in gl.static_range(4):
            before = _before(keys[one], key) | ((keys[one] == key) & (columns[one] < column))
            less += (before & (four + one < in_bin)).to(gl.int32)
    wins = valid & (less < need)
    _asm(WINS, "=r,r,r,r", [column - rank * SLOTS, smem + MARKS * 4 + place * 0, (wins & (cta == rank)).to(gl.int32)])
    earlier = (wins & (cta < rank)).to(gl.int32)
    _asm(ADD_ONE_UP, "=r,r,r", [earlier, smem + (OWN_COUNTS + 1) * 4 + place * 0])
    barrier()
    return histogram.load_one(smem, OWN_COUNTS + 1 + rank * 0)


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


@gluon.jit(do_not_specialize=["rows", "width", "k", "next_n", "max_blocks", "stride_logits_row"])
def select_cluster(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k], with a block table [rows * k]
    indptr,  # int32 [rows + 1] or None
    states,  # int64 [rows] or None, zero before and after
    block_table,  # int32 [requests, max_blocks] or None
    rows,
    width,
    k,
    next_n,
    max_blocks,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    stride_table_request,
    BLOCK_SIZE: gl.constexpr,
    SLOTS: gl.constexpr,  # columns of a CTA
    ALIGNED: gl.constexpr,
    WINDOW_SHIFT: gl.constexpr,  # bits behind a digit
    CTAS: gl.constexpr,
    THREADS: gl.constexpr,
):
    UNIT: gl.constexpr = 4 if ALIGNED else 1
    ROUNDS: gl.constexpr = SLOTS // (4 * THREADS)
    FOURS: gl.constexpr = cluster.plane([1, 4], [1, 32], [1, THREADS // 32], CTAS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    row, rank = gl.program_id(0).to(gl.int64), cluster.rank()
    thread = gl.arange(0, THREADS, LINE)
    smem = histogram.claim(None, smem_words(SLOTS))
    _clear(smem, THREADS, LINE)
    histogram.store_one(smem, thread * 0 + histogram.HIGHEST, thread * 0 - 1)
    histogram.store_one(smem, OWN_COUNTS + thread % 4, thread * 0)
    for number in gl.static_range(5):
        cluster.init(smem, ANCHORED + 2 * number)
    cluster.expect(smem, ANCHORED, 4 * CTAS)
    cluster.expect(smem, SCATTERED, 4 * BINS)
    cluster.expect(smem, GATHERED, 4 * BINS)
    cluster.expect(smem, TOLD, 4 * CTAS)
    cluster.meet()
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
    readable = length
    if SLOTS <= EAGER_SLOTS and row_starts is None:
        readable = width  # known before ``end``, which is on its way
    if ALIGNED:
        scores = gl.load(source + column, mask=column < (readable + 3) // 4 * 4)
    else:
        scores = gl.load(source + column, mask=column < readable)
    keys = radix_select.descending_keys(scores, (column >= start - base) & (column < length))
    value = base - start + rank * SLOTS + thread * (4 * ROUNDS)  # what is stored for a thread's first column
    if block_table is not None:
        value = packed.slots_of(block_table + row // next_n * stride_table_request, value, max_blocks, BLOCK_SIZE)

    at, shift, below, in_bin = _search(smem, keys, k, rank, WINDOW_SHIFT, CTAS, THREADS)
    count = gl.minimum(below + in_bin, k)
    if block_table is not None:
        packed.tell_later_rows(states, row.to(gl.int32), rows, count, LINE)
    all = below + in_bin <= k
    least = gl.where(at == -1, MINUS_INF_KEY, at + gl.where(all, 1 << shift, 0))
    span = gl.where(all, 0, 1 << shift)
    listed = (all == 0) & (in_bin <= MOST_TIES)
    need = k - below
    cluster.expect(smem, TIED, CTAS * (8 + gl.where(listed, 8 * MOST_TIES, 0)))
    byte = smem + MARKS * 4 + (column - rank * SLOTS) // 4
    zero = column * 0
    marks = _asm(
        MARK, "=&r,=&r,=&r,=&r," + "r," * 31 + "r",
        [
            keys, column, byte, zero + least, zero + span, zero + (smem + OWN_NUMBER * 4), zero + (smem + OWN_TIES * 4),
            zero + listed.to(gl.int32),
        ],
        4,
    )  # fmt: skip
    numbers = gl.reduce(popcount(marks & 15) + (popcount(marks >> 4) << 16), 0, _add)
    _asm(ADD_UP, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [numbers, smem + OWN_COUNTS * 4 + numbers * 0], 4)
    barrier()
    number = histogram.load_one(smem, OWN_COUNTS + thread * 0)
    there = (thread < CTAS).to(gl.int32)
    cluster.send_two(smem, COUNTS + 2 * rank + thread * 0, TIED, thread, there, number & 0xFFFF, number >> 16)
    if listed:
        _send_ties(smem, rank, CTAS, THREADS)
    cluster.await_bytes(smem, TIED, rank * 0)
    position, ties = rank * 0, rank * 0
    for pair in gl.static_range(CTAS // 2):
        above, tied, more_above, more_tied = histogram.load_four(smem, COUNTS + 4 * pair + rank * 0)
        position += gl.where(2 * pair < rank, above, 0) + gl.where(2 * pair + 1 < rank, more_above, 0)
        ties += gl.where(2 * pair < rank, tied, 0) + gl.where(2 * pair + 1 < rank, more_tied, 0)
    if listed:
        position += _rank_ties(smem, in_bin, need, rank, SLOTS, CTAS, THREADS)

    bits, equal = thread * 0, thread * 0
    for round in gl.static_range(ROUNDS):
        byte = _asm(LOAD_BYTE, "=r,r", [smem + MARKS * 4 + thread * ROUNDS + round])
        bits |= (byte & 15) << (4 * round)
        equal |= (byte >> 4) << (4 * round)
    if (all | listed) == 0:
        each = popcount(equal)
        before = gl.associative_scan(each, 0, _add) - each
        bits |= _first_bits(equal, need - ties - before)
        position += gl.minimum(ties, need)
    each = popcount(bits)
    position += gl.associative_scan(each, 0, _add) - each
    if block_table is None:
        begin = row * k
    else:
        begin = packed.told_by_rows_before(states, row)
        barrier()  # all warps know
        cluster.send(smem, HEARD + rank + thread * 0, TOLD, thread * 0, (thread == 0).to(gl.int32), thread)
    set_bits.store(out + begin, bits, position, value)
    if rank == 0:
        if block_table is None:
            packed.clear(out + begin, count, k, LINE)
        else:
            packed.store_bounds(indptr, row, rows, begin, count)
            packed.clear(out + packed.unused(row, rows, begin, count, k), 0, k - count, LINE)
            cluster.await_bytes(smem, TOLD, rank * 0)
            gl.store(states + row, rank.to(gl.int64) * 0)
