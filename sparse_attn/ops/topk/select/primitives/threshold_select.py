"""Search by thresholds: count the scores at or above three keys at a time. It runs on any GPU, without shared memory.

Keys are the integers of device/order.py, but the comparisons are of floats. So NaN drops out, which is false in every
comparison; -inf drops out, which is below every key searched; and -0.0 equals +0.0.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095040)  # key of the lowest finite float; one less is the key of -inf
BEYOND = tl.constexpr(2139095041)  # one more than the key of +inf: a NaN, at or above which there is nothing
OCTAVE = tl.constexpr(1 << 23)  # keys between a float and its double
ACROSS = tl.constexpr(2048)


@triton.jit
def score_of(key):
    """The score of a key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(score):
    """Key of a score that is not NaN, as int64."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _count(scores, first, second, third):
    """How many scores lie at or above each of three keys. There are fewer than 65536 scores."""
    # Three counts in one int64: 16 bits, 16 bits and the rest.
    passed = tl.where(scores >= score_of(second), 0x10001, (scores >= score_of(first)).to(tl.int32)).to(tl.int64)
    passed = tl.sum(passed | ((scores >= score_of(third)).to(tl.int64) << 32))
    return (passed & 0xFFFF).to(tl.int32), ((passed >> 16) & 0xFFFF).to(tl.int32), (passed >> 32).to(tl.int32)


@triton.jit
def _quarters(low, high):
    """Three keys that split [low, high) in four. They differ from low while high - low > 1."""
    span = high - low
    return low + tl.maximum(span >> 2, 1), low + tl.maximum(span >> 1, 2), low + tl.maximum((3 * span) >> 2, 3)


@triton.jit
def _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k):
    """Move low (at least k scores are at or above it) and high (fewer are) together, by three ascending keys and their
    counts."""
    new_low = tl.where(at3 >= k, key3, tl.where(at2 >= k, key2, tl.where(at1 >= k, key1, low)))
    new_at_low = tl.where(at3 >= k, at3, tl.where(at2 >= k, at2, tl.where(at1 >= k, at1, at_low)))
    new_high = tl.where(at1 < k, key1, tl.where(at2 < k, key2, tl.where(at3 < k, key3, high)))
    new_at_high = tl.where(at1 < k, at1, tl.where(at2 < k, at2, tl.where(at3 < k, at3, at_high)))
    return new_low, new_high, new_at_low, new_at_high


@triton.jit
def search(scores, key2, key3, k, enough):
    """A key with k to ``enough`` scores at or above it, or the k-th largest key, or LOWEST where there are fewer than
    k.

    key2 <= key3: where to look first. Returns (key, scores at or above it, scores at or above the next key tried).
    """
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], BEYOND, tl.int64)
    # First the keys that the caller knows.
    at_low, at2, at3 = _count(scores, low, key2, key3)
    low, high, at_low, at_high = _narrow(low, high, at_low, 0, low, key2, key3, at_low, at2, at3, k)
    # The k-th score most likely lies within a few octaves of the largest.
    top = key_of(tl.max(tl.max(scores, 1), 0))
    key1 = tl.minimum(tl.maximum(top - 8 * OCTAVE, low + 1), high)
    key2 = tl.minimum(tl.maximum(top - 2 * OCTAVE, key1), high)
    key3 = tl.minimum(tl.maximum(top - OCTAVE // 2, key2), high)
    # low keeps at least k scores at or above it, high keeps fewer.
    while (at_low > enough) & (high - low > 1):
        at1, at2, at3 = _count(scores, key1, key2, key3)
        low, high, at_low, at_high = _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k)
        key1, key2, key3 = _quarters(low, high)
    return low, at_low, at_high


@triton.jit
def _count_in_row(source, length, first, second, third, CHUNK: tl.constexpr):
    """_count over a whole row in memory."""
    WIDE: tl.constexpr = min(ACROSS, CHUNK)
    tile = tl.arange(0, CHUNK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    passed1 = tl.zeros([WIDE], tl.int32)
    passed2 = tl.zeros([WIDE], tl.int32)
    # Counts by column: one reduction over the row at the end.
    passed3 = tl.zeros([WIDE], tl.int32)
    for base in range(0, length, CHUNK):
        scores = tl.load(source + base + tile, mask=tile < length - base, other=float("-inf"))
        passed1 += tl.sum((scores >= score_of(first)).to(tl.int32), 0)
        passed2 += tl.sum((scores >= score_of(second)).to(tl.int32), 0)
        passed3 += tl.sum((scores >= score_of(third)).to(tl.int32), 0)
    return tl.sum(passed1, 0), tl.sum(passed2, 0), tl.sum(passed3, 0)


@triton.jit
def search_streamed(source, length, guess, k, CHUNK: tl.constexpr):
    """search over a whole row in memory, which is read again for every count. guess: a key that may be the k-th."""
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], BEYOND, tl.int64)
    at_low, at2, at3 = _count_in_row(source, length, low, guess, guess + 1, CHUNK)
    low, high, at_low, at_high = _narrow(low, high, at_low, 0, low, guess, guess + 1, at_low, at2, at3, k)
    while (at_low > k) & (high - low > 1):
        key1, key2, key3 = _quarters(low, high)
        at1, at2, at3 = _count_in_row(source, length, key1, key2, key3, CHUNK)
        low, high, at_low, at_high = _narrow(low, high, at_low, at_high, key1, key2, key3, at1, at2, at3, k)
    return low, at_low, at_high
