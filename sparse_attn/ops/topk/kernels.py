"""Exact selection without sorting: find a key with exactly k scores at or above it (or the k-th key, when ties straddle
it), then number the chosen scores in column order and store their columns.

Keys are the integers of device/order.py, in which floats sort; a search walks over keys but compares floats, so NaN
(false in every comparison) and -inf (below every key searched) drop out by themselves, and -0.0 equals +0.0.

A long row is cut down first: a sample gives a bound that about ``keep`` scores exceed, programs that share the row
collect the columns above it in order, and the last one to arrive searches those. If the bound was off, or ties fill the
row, that program searches the row itself: slower, equally exact.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095040)  # key of the lowest finite float; one less is the key of -inf
BEYOND = tl.constexpr(2139095041)  # one more than the key of +inf: a NaN, at or above which there is nothing
OCTAVE = tl.constexpr(1 << 23)  # keys between a float and its double
LANES = tl.constexpr(32)  # columns of a tile: a tile is read row by row
ACROSS = tl.constexpr(2048)


@triton.jit
def _score(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(score):
    """Key of a score that is not NaN, as int64."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _tile(SIZE: tl.constexpr):
    """0 .. SIZE - 1 as [SIZE / LANES, LANES]."""
    return tl.arange(0, SIZE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _range(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row):
    start = tl.full([], 0, tl.int32)
    end = start + width
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row * stride_starts_row), 0), width)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row * stride_ends_row), 0), width)
    return start, tl.maximum(end, start)


@triton.jit
def _load_line(line, columns, start, end, ALIGNED: tl.constexpr):
    """Scores at ``columns`` of a row, -inf outside [start, end).

    ALIGNED: the row starts at a multiple of 16 bytes and can be read up to the next multiple of 4 columns, so that four
    columns are one load.
    """
    inside = (columns >= start) & (columns < end)
    if ALIGNED:
        whole = (columns >= (start // 4) * 4) & (columns < ((end + 3) // 4) * 4)
        scores = tl.load(line + columns, mask=whole, other=float("-inf"))
        return tl.where(inside, scores, float("-inf"))
    else:
        return tl.load(line + columns, mask=inside, other=float("-inf"))


@triton.jit
def _count(scores, first, second, third):
    """How many scores lie at or above each of three keys; fewer than 65536 scores."""
    passed = tl.where(scores >= _score(second), 0x10001, (scores >= _score(first)).to(tl.int32)).to(tl.int64)
    passed = tl.sum(passed | ((scores >= _score(third)).to(tl.int64) << 32))
    return (passed & 0xFFFF).to(tl.int32), ((passed >> 16) & 0xFFFF).to(tl.int32), (passed >> 32).to(tl.int32)


@triton.jit
def _quarters(low, high):
    """Three keys that split [low, high), distinct from low while high - low > 1."""
    span = high - low
    return low + tl.maximum(span >> 2, 1), low + tl.maximum(span >> 1, 2), low + tl.maximum((3 * span) >> 2, 3)


@triton.jit
def _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k):
    """Tighten low (at least k scores at or above it) and high (fewer) by three ascending keys and their counts."""
    new_low = tl.where(at3 >= k, key3, tl.where(at2 >= k, key2, tl.where(at1 >= k, key1, low)))
    new_at_low = tl.where(at3 >= k, at3, tl.where(at2 >= k, at2, tl.where(at1 >= k, at1, at_low)))
    new_high = tl.where(at1 < k, key1, tl.where(at2 < k, key2, tl.where(at3 < k, key3, high)))
    new_at_high = tl.where(at1 < k, at1, tl.where(at2 < k, at2, tl.where(at3 < k, at3, at_high)))
    return new_low, new_high, new_at_low, new_at_high


@triton.jit
def _search(scores, key2, key3, k, enough):
    """Key with k .. enough scores at or above it, or the k-th largest key, or LOWEST when there are fewer than k.

    key2 <= key3: where to look first. Returns (key, scores at or above it, scores at or above the next key tried).
    """
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], BEYOND, tl.int64)
    at_low, at2, at3 = _count(scores, low, key2, key3)
    low, high, at_low, at_high = _narrow(low, high, at_low, 0, low, key2, key3, at_low, at2, at3, k)
    # The k-th score most likely lies within a few octaves of the largest.
    top = _key(tl.max(tl.max(scores, 1), 0))
    key1 = tl.minimum(tl.maximum(top - 8 * OCTAVE, low + 1), high)
    key2 = tl.minimum(tl.maximum(top - 2 * OCTAVE, key1), high)
    key3 = tl.minimum(tl.maximum(top - OCTAVE // 2, key2), high)
    while (at_low > enough) & (high - low > 1):
        at1, at2, at3 = _count(scores, key1, key2, key3)
        low, high, at_low, at_high = _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k)
        key1, key2, key3 = _quarters(low, high)
    return low, at_low, at_high


@triton.jit
def _store_chosen(out, scores, columns, key, need, above_before, equal_before):
    """Store the columns of all scores above ``key`` and of the first ``need`` equal to it; returns both counts."""
    above = scores > _score(key)
    equal = scores == _score(key)
    marks = (above.to(tl.int32) << 16) | equal.to(tl.int32)
    in_line = tl.sum(marks, 1)
    rank = tl.cumsum(marks, 1) + (tl.cumsum(in_line, 0) - in_line)[:, None]
    equal_rank = (rank & 0xFFFF) + equal_before
    place = (rank >> 16) + above_before + tl.minimum(equal_rank, need) - 1
    tl.store(out + place, columns, mask=above | (equal & (equal_rank <= need)))
    marks = tl.sum(in_line, 0)
    return marks >> 16, marks & 0xFFFF


@triton.jit
def _store_none(out, count, k):
    for first in range(count, k, 1024):
        at = first + tl.arange(0, 1024)
        tl.store(out + at, tl.full([1024], -1, tl.int32), mask=at < k)


@triton.jit
def _select_held(out, scores, columns, key2, key3, k):
    """Select among the scores one program holds."""
    key, at_key, at_next = _search(scores, key2, key3, k, k)
    need = tl.where(at_key <= k, k, k - at_next)
    _store_chosen(out, scores, columns, key, need, 0, 0)
    _store_none(out, tl.minimum(at_key, k), k)


@triton.jit(do_not_specialize=["width", "k", "stride_logits_row"])
def select_short_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    width,
    k,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,  # at least width
    ALIGNED: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    row = tl.program_id(0).to(tl.int64)
    start, end = _range(row_starts, row_ends, row, width, stride_starts_row, stride_ends_row)
    scores = _load_line(logits + row * stride_logits_row * UNIT, _tile(SLOTS), start, end, ALIGNED)
    zero = tl.full([], 0, tl.int64)
    _select_held(out + row * k, scores, _tile(SLOTS) - start, zero, zero + 1, k)


@triton.jit
def _count_in_row(source, length, first, second, third, CHUNK: tl.constexpr):
    """_count over a whole row."""
    WIDE: tl.constexpr = min(ACROSS, CHUNK)
    tile = tl.arange(0, CHUNK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    passed1 = tl.zeros([WIDE], tl.int32)
    passed2 = tl.zeros([WIDE], tl.int32)
    passed3 = tl.zeros([WIDE], tl.int32)
    for base in range(0, length, CHUNK):
        scores = tl.load(source + base + tile, mask=tile < length - base, other=float("-inf"))
        passed1 += tl.sum((scores >= _score(first)).to(tl.int32), 0)
        passed2 += tl.sum((scores >= _score(second)).to(tl.int32), 0)
        passed3 += tl.sum((scores >= _score(third)).to(tl.int32), 0)
    return tl.sum(passed1, 0), tl.sum(passed2, 0), tl.sum(passed3, 0)


@triton.jit
def _select_in_row(out, source, length, guess, k, CHUNK: tl.constexpr):
    """Select by reading the whole row again and again; ``guess``: a key that may well be the k-th."""
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], BEYOND, tl.int64)
    at_low, at2, at3 = _count_in_row(source, length, low, guess, guess + 1, CHUNK)
    low, high, at_low, at_high = _narrow(low, high, at_low, 0, low, guess, guess + 1, at_low, at2, at3, k)
    while (at_low > k) & (high - low > 1):
        key1, key2, key3 = _quarters(low, high)
        at1, at2, at3 = _count_in_row(source, length, key1, key2, key3, CHUNK)
        low, high, at_low, at_high = _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k)
    need = tl.where(at_low <= k, k, k - at_high)
    above_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for base in range(0, length, CHUNK):
        columns = base + _tile(CHUNK)
        scores = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        above, equal = _store_chosen(out, scores, columns, low, need, above_before, equal_before)
        above_before += above
        equal_before += equal
    _store_none(out, tl.minimum(at_low, k), k)


@triton.jit
def _sampled_bound(source, length, keep, SAMPLES: tl.constexpr, RUN: tl.constexpr):
    """Key that about ``keep`` scores of the row exceed, as far as a sample tells; LOWEST - 1 to take all there are."""
    sample = _tile(SAMPLES)
    run = sample // RUN
    stride = length // (SAMPLES // RUN)
    jitter = (((run * 1103515245 + 12345) >> 16) & 0x7FFF) % (stride - RUN + 1)
    scores = tl.load(source + run * stride + jitter + sample % RUN)
    share = (SAMPLES * keep.to(tl.int64) // length).to(tl.int32)
    share = tl.maximum(share, 4)
    zero = tl.full([], 0, tl.int64)
    key, at_key, at_next = _search(scores, zero, zero + 1, share, share + share // 4)
    key = tl.where(key == -1, 0, key)  # -1 is the key of -0.0, which compares as 0.0
    return tl.where(at_key <= share, tl.where(key == LOWEST, LOWEST - 1, key), key)


@triton.jit
def _ones(words):
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _sum_and_last(sum_left, last_left, sum_right, last_right):
    return sum_left + sum_right, last_right


@triton.jit
def _collect(candidates, line, start, end, first, last, bound, capacity, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the columns (relative to start) of scores above ``bound`` in [first, last), in order; returns their number,
    stored or not. first is a multiple of 32."""
    word = tl.arange(0, CHUNK // LANES)
    lane = tl.arange(0, LANES)
    zero = tl.full([1, LANES], 0, tl.uint32)
    bit_of_lane = (zero + 1) << lane[None, :].to(tl.uint32)
    limit = _score(bound)
    found = tl.full([], 0, tl.int32)
    for base in range(first, last, CHUNK):
        base = tl.multiple_of(base, LANES)
        column = base + word[:, None] * LANES + lane[None, :]
        if (base >= start) & (base + CHUNK <= end):
            scores = tl.load(line + column)
        else:
            scores = _load_line(line, column, start, end, ALIGNED)
        words = tl.sum(tl.where(scores > limit, bit_of_lane, zero), 1)  # a bit per column
        ones = _ones(words)
        rounds = tl.max(ones, 0)
        total = tl.sum(ones, 0)
        # The words pass through the scan unchanged, which leaves them one to a thread: the loop then moves no data.
        ones, words = tl.associative_scan((ones, words), 0, _sum_and_last)
        place = found + ones - _ones(words)
        left = base - start + word * LANES
        for _ in range(rounds):
            rest = words & (words - 1)
            bit = ((words ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(candidates + place, left + bit, mask=(words != 0) & (place < capacity))
            place += 1
            words = rest
        found += total
    return found


@triton.jit
def _locate(slot, before, capacity, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr):
    """Where candidate number ``slot`` of a row lies, when program p holds candidates from before[p] on."""
    flat = tl.reshape(slot, [SLOTS])
    owner = tl.zeros([SLOTS], tl.int32)
    step: tl.constexpr = PROGRAMS // 2
    jump = tl.full([], step, tl.int32)
    while jump > 0:
        owner = tl.where(tl.gather(before, owner + jump, 0) <= flat, owner + jump, owner)
        jump = jump // 2
    place = owner * capacity + flat - tl.gather(before, owner, 0)
    return tl.reshape(place, [SLOTS // LANES, LANES])


@triton.jit(do_not_specialize=["rows", "width", "k", "keep", "capacity", "stride_logits_row"])
def select_long_rows(
    logits,  # fp32 [rows, width]
    row_starts,  # int32 [rows] or None
    row_ends,  # int32 [rows] or None
    out,  # int32 [rows, k]
    candidates,  # int32 [groups * PROGRAMS, capacity]
    counts,  # int32 [groups * PROGRAMS]
    arrivals,  # int64 [groups], zero before and after
    rows,
    width,
    k,
    keep,
    capacity,
    stride_logits_row,  # in fours when ALIGNED
    stride_starts_row,
    stride_ends_row,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SAMPLED: tl.constexpr,
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    UNIT: tl.constexpr = 4 if ALIGNED else 1
    program = tl.program_id(0)
    group = program // PROGRAMS
    part = program % PROGRAMS
    slot = _tile(SLOTS)
    for row in range(group, rows, tl.num_programs(0) // PROGRAMS):
        row64 = tl.full([], 0, tl.int64) + row
        start, end = _range(row_starts, row_ends, row64, width, stride_starts_row, stride_ends_row)
        length = end - start
        line = logits + row64 * stride_logits_row * UNIT
        held = length
        columns = slot
        key2 = tl.full([], 0, tl.int64)
        key3 = tl.full([], 1, tl.int64)
        hold = (length <= SLOTS) & (part == 0)
        again = (length > SLOTS) & (part == 0)
        if SAMPLED:
            again = again & False
            base = (start // LANES) * LANES
            chunks = tl.cdiv(end - base, CHUNK)
            each = tl.maximum(tl.cdiv(chunks, PROGRAMS), 1)
            if (length > SLOTS) & (part * each < chunks):
                bound = _sampled_bound(line + start, length, keep, SAMPLES, RUN)
                mine = candidates + program.to(tl.int64) * capacity
                first = base + part * each * CHUNK
                last = tl.minimum(first + each * CHUNK, end)
                held = _collect(mine, line, start, end, first, last, bound, capacity, CHUNK, ALIGNED)
                complete = True
                if PROGRAMS > 1:
                    tl.store(counts + program, held)
                    tl.debug_barrier()
                    complete = tl.atomic_add(arrivals + group, 1, sem="acq_rel") == tl.cdiv(chunks, each) - 1
                else:
                    tl.debug_barrier()
                if complete:
                    place = slot
                    if PROGRAMS > 1:
                        tl.store(arrivals + group, 0)
                        mate = tl.arange(0, PROGRAMS)
                        number = tl.load(
                            counts + group * PROGRAMS + mate, mask=mate * each < chunks, other=0, cache_modifier=".cg"
                        )
                        held = tl.sum(number, 0)
                        place = _locate(slot, tl.cumsum(number, 0) - number, capacity, PROGRAMS, SLOTS)
                        mine = candidates + (group * PROGRAMS).to(tl.int64) * capacity
                    hold = (held <= SLOTS) & ((held >= k) | (bound < LOWEST))
                    again = hold == 0
                    columns = tl.load(mine + place, mask=(slot < held) & hold, other=0, cache_modifier=".cg")
                    key2 = tl.where(bound < LOWEST, 0, bound)
                    key3 = tl.where(again, key2 + 1, tl.minimum(key2 + OCTAVE, BEYOND))
        if hold:
            scores = tl.load(line + start + columns, mask=slot < held, other=float("-inf"))
            _select_held(out + row64 * k, scores, columns, key2, key3, k)
        if again:
            _select_in_row(out + row64 * k, line + start, length, key2, k, CHUNK)


def launch_top_k(logits, row_starts, row_ends, out, launch, views, counters) -> None:
    """Select out.shape[1] columns of every row of ``logits`` into ``out``, in one launch.

    launch: a TopkConfig; views, counters: what its scratch asks for.
    """
    rows, width = logits.shape
    k = out.shape[1]
    stride = logits.stride(0)
    stride_starts = 0 if row_starts is None else row_starts.stride(0)
    stride_ends = 0 if row_ends is None else row_ends.stride(0)
    readable = logits.untyped_storage().nbytes() // 4 - logits.storage_offset() - (rows - 1) * stride
    aligned = stride % 4 == 0 and logits.data_ptr() % 16 == 0 and -(-width // 4) * 4 <= readable
    stride = stride // 4 if aligned else stride
    options = {"num_warps": launch.num_warps}
    if launch.max_registers is not None:
        options["maxnreg"] = launch.max_registers
    if launch.short:
        select_short_rows[(rows,)](
            logits, row_starts, row_ends, out, width, k, stride, stride_starts, stride_ends,
            SLOTS=launch.slots, ALIGNED=aligned, **options,
        )  # fmt: skip
        return
    candidates, counts = views if launch.sampled else (out, out)
    select_long_rows[(launch.groups * launch.programs,)](
        logits, row_starts, row_ends, out, candidates, counts, counters, rows, width, k, launch.keep,
        launch.capacity(width), stride, stride_starts, stride_ends,
        SLOTS=launch.slots, CHUNK=launch.chunk, PROGRAMS=launch.programs, SAMPLED=launch.sampled,
        SAMPLES=launch.samples, RUN=launch.run, ALIGNED=aligned, **options,
    )  # fmt: skip
