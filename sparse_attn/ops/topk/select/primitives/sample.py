"""A sample of a row's scores: where it is taken, and the bound that it gives.

A bound is a score that about ``wanted`` of the row's ``length`` scores exceed. As large a share of the sample exceeds
it.
"""

import triton
import triton.language as tl

from sparse_attn.ops.topk.select.primitives import radix_select

LEAST_SHARE = tl.constexpr(4)  # of fewer sampled scores a bound says little


@triton.jit
def jitter(number, places):
    """int32 in [0, places) for every ``number``, so that scores with a period are not sampled at the same phase. Of
    more than 32768 places the first are taken."""
    return (((number * 1103515245 + 12345) >> 16) & 0x7FFF) % places


@triton.jit
def share_of(samples, wanted, length):
    """(how many of ``samples`` scores of the row exceed the bound; the most that may, so that the search ends early)"""
    share = tl.maximum((samples * wanted.to(tl.int64) // length).to(tl.int32), LEAST_SHARE)
    return share, share + share // 4


@triton.jit
def bound(smem, keys, samples, wanted, length, THREADS: tl.constexpr):
    """The bound by ``samples`` scores of the row, given by their descending keys.

    Returns (the bound, whether the sample holds too few scores: then it is -inf)."""
    share, most = share_of(samples, wanted, length)
    cutoff, at_cutoff, _ = radix_select.search(smem, keys, share, most, THREADS)
    limit = radix_select.score_of(cutoff + (at_cutoff <= most).to(tl.int32))
    everything = cutoff == radix_select.LAST_KEY
    return tl.where(everything, float("-inf"), limit), everything
