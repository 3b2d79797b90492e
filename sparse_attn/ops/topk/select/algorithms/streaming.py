"""Streaming: read a row from memory once for every digit. It needs no scratch, and no registers for the row.

1. Count the leading digits of the whole row and find the k-th's. Read the row again for the next digit; three reads at
   most. On other GPUs count scores at or above three keys at a time.
2. Read the row once more. Store the columns above the cutoff, and the first of those equal to it.

It reads the row up to four times. Every algorithm that cuts a row down to candidates first ends here where the
candidates do not suffice. A k too near to the number of candidates that a CTA holds begins here. The kernel is that of
sampled.py with SAMPLED off.
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk.select.primitives import compact, output, radix_select, threshold_select, tile


@triton.jit
def select_streamed(out, source, length, guess, smem, output_map, k, CHUNK: tl.constexpr, THREADS: tl.constexpr):
    """Select in the ``length`` scores from ``source`` on. guess: where a search by thresholds starts."""
    if THREADS > 0:
        cutoff, at_cutoff, at_next = radix_select.search_streamed(smem, source, length, k, CHUNK, THREADS)
        limit = radix_select.score_of(cutoff)
    else:
        key, at_cutoff, at_next = threshold_select.search_streamed(source, length, guess, k, CHUNK)
        limit = threshold_select.score_of(key)
    output.announce(output_map, tl.minimum(at_cutoff, k))
    # All that equal the cutoff, or the first of them.
    need = tl.where(at_cutoff <= k, k, k - at_next)
    begin = output.begin(output_map)
    above_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    # One more reading, in order: counts of the chunks before say where each chunk's go.
    for base in range(0, length, CHUNK):
        columns = base + tile.positions(CHUNK)
        scores = tl.load(source + columns, mask=columns < length, other=float("-inf"))
        above, equal = compact.store_above_and_equal(
            out + begin, scores > limit, scores == limit, output.tile_values(output_map, base, CHUNK), need,
            above_before, equal_before, THREADS,
        )  # fmt: skip
        above_before += above
        equal_before += equal
    output.finish(out, output_map, begin, tl.minimum(at_cutoff, k))
