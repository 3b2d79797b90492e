# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Attention over disjoint sets of keys, merged into attention over their union: a CTA has a head of a token.

Floor, bytes: all states' outputs once, and the merged ones. The outputs of STATES states are under way at once, before
it is known how much each counts: what a load waits for there would cost as much as the load. A thread has all states of
its columns, and every thread finds all weights, so nothing is exchanged between threads.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast
from sparse_attn.device.softmax import log2_sum, sink_factor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["states"])
def merge(
    outs,  # [states, tokens, heads, d_v]
    lses,  # fp32 [states, tokens, heads], natural log
    sink,  # fp32 [heads] or None
    out,  # [tokens, heads, d_v]
    lse,  # fp32 [tokens, heads], natural log
    states,
    d_v,
    stride_outs_state,
    stride_outs_token,
    stride_outs_head,
    stride_lses_state,
    stride_lses_token,
    stride_lses_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    STATES: tl.constexpr,  # looked at together
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < d_v
    outs += token * stride_outs_token + head * stride_outs_head
    lses += token * stride_lses_token + head * stride_lses_head
    m, l = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, states, STATES):
        # All loads of outputs are issued before the first lse is used.
        values, found, m_new = (), (), m
        for i in tl.static_range(STATES):
            state = tl.full([], first + i, tl.int64)
            values += (tl.load(outs + state * stride_outs_state + column, inside & (state < states), 0.0),)
        tl.debug_barrier()  # or the compiler lets these loads wait for weights, to save registers
        # The largest lse so far. One whose base-2 value overflows counts as -inf.
        for i in tl.static_range(STATES):
            state = tl.full([], first + i, tl.int64)
            each = tl.load(lses + state * stride_lses_state, state < states, float("-inf"))
            found += (tl.where(each * LOG2_E == float("-inf"), float("-inf"), each),)
            m_new = tl.maximum(m_new, found[i])
        # The difference first: behind a product that is not rounded (a fused operation) large ones of equal states
        # would not be 0.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        # Bring the sums to the new maximum, then add each state.
        rescale = tl.exp2((m - base) * LOG2_E)
        m, l, acc = m_new, l * rescale, acc * rescale
        for i in tl.static_range(STATES):
            weight = tl.exp2((found[i] - base) * LOG2_E)
            l += weight
            # A state that weighs nothing may hold anything, NaN too.
            acc += weight * tl.where(weight > 0.0, values[i].to(tl.float32), 0.0)
    # As one infinite lse: the result is NaN.
    top = m * LOG2_E
    l = tl.where(top == float("inf"), float("nan"), l)
    merged = log2_sum(top, l)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    if sink is not None:
        factor = factor * sink_factor(tl.load(sink + head), merged)
    # All blocks of columns have the same lse: the first stores it.
    if tl.program_id(2) == 0:
        tl.store(lse + token * stride_lse_token + head, merged * LN_2)
    total = cast(acc * factor, out.dtype.element_ty)
    tl.store(out + token * stride_out_token + head * stride_out_head + column, total, mask=inside)
