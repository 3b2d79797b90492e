"""Online softmax in base 2: running maximum m, running sum l, with -inf for "nothing yet"."""

import triton
import triton.language as tl


@triton.jit
def softmax_step(scores, m, l):
    """Take a tile of base-2 scores [rows, keys] into (m, l) [rows]: (probabilities, rescale of the old sum, m, l)."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    # Where all scores so far are -inf, -inf - -inf would be NaN.
    origin = tl.where(m_new == float("-inf"), 0.0, m_new)
    rescale = tl.exp2(m - origin)
    p = tl.exp2(scores - origin[:, None])
    return p, rescale, m_new, l * rescale + tl.sum(p, 1)


@triton.jit
def log2_sum(m, l):
    """Base-2 log of the softmax denominator; -inf for an empty row."""
    return tl.where(l == 0.0, float("-inf"), m + tl.log2(tl.where(l == 0.0, 1.0, l)))


@triton.jit
def sink_factor(sink, lse2):
    """What a row's output is multiplied by because of a sink (natural log units): 1 / (1 + exp(sink - lse)) for a
    base-2 lse; 0 for an empty row."""
    empty = lse2 == float("-inf")
    exponent = sink * 1.4426950408889634 - tl.where(empty, 0.0, lse2)
    return tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp2(exponent)))
