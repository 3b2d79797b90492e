"""Single CTA, bf16 keys: one CTA holds a row as bf16, two scores to a register. Only scores that share the bf16 of the
k-th are read again.

1. Load the row and truncate it to bf16.
2. Find the row's highest score. Count 2048 digits from there on in a histogram in shared memory, and find the k-th's
   bin. Where the k-th lies behind all of them, count again, in two digits.
3. Mark the slots above that bf16, and those equal to it.
4. Where more slots are equal to it than are needed, read their scores again. Up to one a thread are listed and ranked
   against each other. More are searched by further digits.
5. Compact: marks to a bitmask, a scan of popcounts, then columns or cache slots to the output.

The row is read once. The kernel takes half the registers and a third of the instructions of single_cta. It is bound by
the barriers between steps and, for many rows, by the stores of step 5.
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk.select.primitives import bf16_select, compact, output


@triton.jit
def select_row(
    out, row_ptr, base, start, end, smem, output_map, k,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr, COALESCED: tl.constexpr,
    LATENCY_BOUND: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """single_cta.select_row for a row held as bf16, of which CHUNK columns are read at once."""
    first, length = start - base, end - base
    chunks = bf16_select.load(row_ptr + base, first, length, length, SLOTS, CHUNK, ALIGNED)
    least, last = bf16_select.first_window(chunks, k, LATENCY_BOUND, THREADS)
    bitmask, count = bf16_select.select(
        smem, (row_ptr + base,), chunks, first, length, least, last, k, output_map,
        SLOTS, LATENCY_BOUND, CHUNK, ALIGNED, THREADS,
    )  # fmt: skip
    word_base = output.values(output_map, base - start + tl.arange(0, SLOTS // 32) * 32)
    if COALESCED:
        compact.store_bitmask_coalesced(out, smem, bitmask, word_base, count, output_map, SLOTS, THREADS)
    else:
        compact.store_bitmask(out, bitmask, word_base, count, output_map)
