"""The k-th key of a row that a cluster holds: all CTAs' histograms, added up; and where what CTAs tell each other lies
in shared memory."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import cluster, histogram
from sparse_attn.device.histogram import BINS, WORDS
from sparse_attn.device.hopper import barrier
from sparse_attn.ops.topk.select.primitives.radix_select import LEADING_SHIFT, UNSELECTABLE

# Words of a CTA's shared memory behind those of the histogram. Of the histogram's, HIGHEST has the CTA's least key.
MOST_CTAS = gl.constexpr(16)  # of a cluster
MOST_TIES = gl.constexpr(64)  # that are ranked

# mbarriers, two words each: what has come
ANCHORED = gl.constexpr(WORDS.value)
SCATTERED = gl.constexpr(WORDS.value + 2)
GATHERED = gl.constexpr(WORDS.value + 4)
TIED = gl.constexpr(WORDS.value + 6)
HEARD = gl.constexpr(WORDS.value + 8)
# what comes
ANCHORS = gl.constexpr(WORDS.value + 12)  # of each CTA: the key that its bins begin with
COUNTS = gl.constexpr(ANCHORS.value + MOST_CTAS.value)  # of each CTA: keys above the k-th's bin, keys in it
NEWS = gl.constexpr(COUNTS.value + 2 * MOST_CTAS.value)  # of each CTA: anything, once it knows where the row begins
TIES = gl.constexpr(NEWS.value + MOST_CTAS.value)  # [CTAS, MOST_TIES, 2]: key and column
PARTS = gl.constexpr(
    TIES.value + 2 * MOST_CTAS.value * MOST_TIES.value
)  # [CTAS, BINS / CTAS]: this CTA's part of each CTA's bins
SUMS = gl.constexpr(PARTS.value + BINS.value)  # [BINS]: of all CTAs
# of this CTA
OWN_COUNTS = gl.constexpr(SUMS.value + BINS.value)  # what it tells as COUNTS, in the halves of a word
EARLIER = gl.constexpr(OWN_COUNTS.value + 1)  # ties of the CTAs before it that win
LISTED = gl.constexpr(OWN_COUNTS.value + 2)  # ties listed as KEYS and COLUMNS
OWN_LISTED = gl.constexpr(OWN_COUNTS.value + 3)  # ties listed as OWN_TIES
OWN_TIES = gl.constexpr(OWN_COUNTS.value + 4)  # [MOST_TIES, 2]: what it tells as TIES
KEYS = gl.constexpr(OWN_TIES.value + 2 * MOST_TIES.value)  # of all CTAs' ties, in any order
COLUMNS = gl.constexpr(KEYS.value + MOST_TIES.value)
MARKS = gl.constexpr(COLUMNS.value + MOST_TIES.value)  # a byte for four columns: above in bits 0 to 3, tied in 4 to 7


@triton.constexpr_function
def words(slots):
    """Of all this, of a CTA of ``slots`` columns."""
    return MARKS.value - WORDS.value + slots // 16


MINUS_INF_KEY = gl.constexpr(-8388608)  # 0xff800000; keys below it, unsigned, can be selected
NOTE_LEAST = gl.constexpr(
    """{ .reg .pred p; .reg .b32 least, lane;
    min.u32 least, $4, $5; min.u32 lane, $6, $7; min.u32 least, least, lane;
    redux.sync.min.u32 least, least, 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
    @p red.shared.min.u32 [$8], least; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"""
)


@gluon.jit
def before(key, other):
    """Whether a key is less than another, unsigned."""
    return key.to(gl.uint32, bitcast=True) < other.to(gl.uint32, bitcast=True)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def _lower(a, b):
    return gl.minimum(a, b)


@gluon.jit
def clear(smem, THREADS: gl.constexpr, LINE: gl.constexpr):
    """Zero the bins."""
    thread = gl.arange(0, THREADS, LINE)
    zero = thread * 0
    for quad in gl.static_range(BINS // (4 * THREADS)):
        histogram.store_four(smem, (quad * THREADS + thread) * 4, zero, zero, zero, zero, zero + 1)


@gluon.jit
def _add_up(smem, rank, shift, first_of_row, phase, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """SUMS of all CTAs' bins, the first of which begins with key ``first_of_row``. ANCHORS: where this CTA's begin."""
    EACH: gl.constexpr = BINS // CTAS
    ROUNDS: gl.constexpr = BINS // (4 * THREADS)
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    thread = gl.arange(0, THREADS, LINE)
    zero, one = thread * 0, thread * 0 + 1
    # This CTA's bins begin ``skipped`` bins behind the row's: they move by as many, in whole fours.
    anchor = histogram.load_one(smem, ANCHORS + rank)
    skipped = ((anchor - first_of_row).to(gl.uint32, bitcast=True) >> shift.to(gl.uint32)).to(gl.int32)
    barrier()
    # Reduce-scatter: each CTA gets its part of these bins.
    for round in gl.static_range(ROUNDS):
        bin = (round * THREADS + thread) * 4
        there = bin >= skipped  # all four, or none
        a, b, c, d = histogram.load_four(smem, gl.where(there, bin - skipped, 0))
        a, b, c, d = gl.where(there, a, 0), gl.where(there, b, 0), gl.where(there, c, 0), gl.where(there, d, 0)
        cluster.send_four(smem, PARTS + rank * EACH + bin % EACH, SCATTERED, bin // EACH, one, a, b, c, d)
    cluster.await_bytes(smem, SCATTERED, phase)
    # This CTA's part of all bins, added up; all-gather: the sums go to all.
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
    # Keys in each thread's bins, and in those before them.
    thread = gl.arange(0, THREADS, LINE)
    first = thread * (4 * QUADS)
    mass = thread * 0
    for quad in gl.static_range(QUADS):
        a, b, c, d = histogram.load_four(smem, SUMS + first + 4 * quad)
        mass += (a + b) + (c + d)
    total = gl.associative_scan(mass, 0, add)
    below = total - mass
    last = thread == THREADS - 1
    here = (below < wanted) & (total >= wanted)
    # The bin itself, if it is one of the thread's.
    digit, earlier, in_bin = thread * 0, total, thread * 0  # of the last thread where all keys are too few
    for quad in gl.static_range(QUADS):
        four = histogram.load_four(smem, SUMS + first + 4 * quad)
        for one in gl.static_range(4):
            found = (below < wanted) & (below + four[one] >= wanted)
            digit = gl.where(found, first + (4 * quad + one), digit)
            earlier = gl.where(found, below, earlier)
            in_bin = gl.where(found, four[one], in_bin)
            below += four[one]
    # One thread tells the others.
    note = (here | (last & (total < wanted))).to(gl.int32)
    histogram.store_four(smem, histogram.NOTE + thread * 0, digit, earlier, in_bin, thread * 0, note)
    barrier()
    digit, earlier, in_bin, _ = histogram.load_four(smem, histogram.NOTE + wanted * 0)
    return digit, earlier, in_bin


@gluon.jit
def search(smem, keys, k, rank, WINDOW_SHIFT: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr):
    """(base, shift, below, in_bin): all bits of the k-th key but the last ``shift``, how many keys lie below those
    bits, and how many share them: at most MOST_TIES, or all of them are equal. Where there are fewer than k: base -1,
    all keys, none."""
    LINE: gl.constexpr = cluster.line(THREADS, CTAS)
    thread = gl.arange(0, THREADS, LINE)
    # The least key of this CTA, the one of its highest score.
    lowest = gl.reduce(keys.to(gl.uint32, bitcast=True), 0, _lower).to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(
        NOTE_LEAST, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [lowest, smem + histogram.HIGHEST * 4 + lowest * 0], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip
    barrier()
    own = histogram.load_one(smem, histogram.HIGHEST + rank * 0)
    # A multiple of four bins, since _add_up moves bins by fours.
    reach = MINUS_INF_KEY - (BINS << WINDOW_SHIFT)  # a window from there ends with the lowest finite score
    own = gl.where(before(own, reach), own, reach) & (-4 << WINDOW_SHIFT)
    # Tell all where this CTA's window begins, and count meanwhile.
    cluster.await_all()  # mbarriers of all CTAs are there
    to = thread * 0 + ANCHORS + rank
    cluster.send(smem, to, ANCHORED, thread, (thread < CTAS).to(gl.int32), own + thread * 0)
    shift = rank * 0 + WINDOW_SHIFT
    below, in_bin, base, phase = rank * 0, rank * 0, own, rank * 0
    going = k >= 0
    while going:
        histogram.count(smem, keys, own, shift)
        # The row's window begins with the first of all CTAs'.
        if phase == 0:
            cluster.await_bytes(smem, ANCHORED, phase)
            for four in gl.static_range(0, CTAS, 4):
                anchors = histogram.load_four(smem, ANCHORS + four + rank * 0)
                for one in gl.static_range(4):
                    base = gl.where(before(anchors[one], base), anchors[one], base)
        _add_up(smem, rank, shift, base, phase, CTAS, THREADS)
        digit, more, in_bin = _find_bin(smem, k - below, CTAS, THREADS)
        # No key in the bin: the k-th lies behind the window.
        missed = in_bin == 0
        few = (missed == 0) & (shift == LEADING_SHIFT) & (digit == UNSELECTABLE)
        again = base + (BINS << WINDOW_SHIFT)  # where a second window begins
        second = missed & (phase == 0) & before(again, reach)
        at = base + (digit << shift)
        below = gl.where(missed, gl.where(second, more, 0), below + more)
        base = gl.where(missed, gl.where(second, again, 0), gl.where(few, -1, at))
        in_bin = gl.where(few, 0, in_bin)
        # Found: a finer digit while too many keys share the bin.
        finer = (below + in_bin > k) & (in_bin > MOST_TIES) & (shift > 0)
        going = missed | finer
        # Ready for another count: bins are zero, barriers expect its bytes.
        if going:
            next = gl.maximum(shift - histogram.DIGIT_BITS, 0)
            shift = gl.where(missed, gl.where(second, WINDOW_SHIFT, LEADING_SHIFT), next)
            own, phase = base, phase + 1
            histogram.store_one(smem, ANCHORS + rank, own)
            clear(smem, THREADS, LINE)
            cluster.expect(smem, SCATTERED, 4 * BINS)
            cluster.expect(smem, GATHERED, 4 * BINS)
            cluster.arrive()
            cluster.await_all()  # nobody reads any more what is sent next
    return base, shift, below, in_bin
