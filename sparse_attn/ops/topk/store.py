"""Number the chosen scores in column order and store their columns."""

import triton
import triton.language as tl

from sparse_attn.ops.topk import memory

LANES_OF_FOUR = tl.constexpr(8)


@triton.jit
def above_and_equal(out, above, equal, columns, need, above_before, equal_before, THREADS: tl.constexpr):
    """Store the columns of all scores ``above`` and of the first ``need`` of ``equal``; returns both counts.

    At most 32768 scores, and fewer of them above. THREADS: of the program where it may store from any of them, else 0.
    """
    marks = (above.to(tl.int32) << 16) | equal.to(tl.int32)
    in_line = tl.sum(marks, 1)
    rank = tl.cumsum(marks, 1) + (tl.cumsum(in_line, 0) - in_line)[:, None]
    equal_rank = (rank & 0xFFFF) + equal_before
    place = (rank >> 16) + above_before + tl.minimum(equal_rank, need) - 1
    chosen = above | (equal & (equal_rank <= need))
    if THREADS > 0:
        memory.scatter(out, place, columns, 1 - chosen.to(tl.int32), tl.full([], 0, tl.int32))
    else:
        tl.store(out + place, columns, mask=chosen)
    marks = tl.sum(in_line, 0)
    return marks >> 16, marks & 0xFFFF


@triton.jit
def ones_of(words):
    """How many bits are set."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def up_to(out, keys, edge, columns):
    """Store the columns of all keys (unsigned) at or below ``edge``."""
    lines: tl.constexpr = keys.shape[0]
    # A line as eights of four, which a thread holds: three numbers come from its word of bits, four from a scan.
    chosen = keys.to(tl.uint32, bitcast=True) <= edge.to(tl.uint32, bitcast=True)
    marks = tl.reshape(chosen.to(tl.int32), [lines, LANES_OF_FOUR, 4])
    first = tl.arange(0, LANES_OF_FOUR) * 4
    fours = tl.sum(marks << tl.arange(0, 4)[None, None, :], 2)
    words = tl.sum(fours << first[None, :], 1)
    ones = ones_of(words)
    before = tl.cumsum(ones, 0) - ones
    below = ones_of(words[:, None] & ((1 << first) - 1)[None, :]) + before[:, None]
    place = below[:, :, None] + tl.cumsum(marks, 2) - 1
    memory.scatter(out, tl.reshape(place, [lines, LANES_OF_FOUR * 4]), columns, keys, edge)


@triton.jit
def none(out, count, k):
    for first in range(count, k, 1024):
        at = first + tl.arange(0, 1024)
        tl.store(out + at, tl.full([1024], -1, tl.int32), mask=at < k)
