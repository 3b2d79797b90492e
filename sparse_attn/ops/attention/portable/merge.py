# pyright: reportOperatorIssue=false
"""Attention over disjoint sets of keys, merged into attention over their union: a CTA has some heads of a token.

Floor, bytes: all states' outputs once, and the merged ones. The outputs of all states are under way at once, before it
is known which of them count: what a load waits for there would cost as much as the load. Where a warp's threads have
all states of their columns, sums cross no threads.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.cast import cast
from sparse_attn.device.softmax import log2_sum, sink_factor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["states", "heads"])
def merge(
    outs,  # [states, tokens, heads, d_v]
    lses,  # fp32 [states, tokens, heads], natural log
    sink,  # fp32 [heads] or None
    out,  # [tokens, heads, d_v]
    lse,  # fp32 [tokens, heads], natural log
    states,
    heads,
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
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    state = tl.arange(0, BLOCK_S)
    known, inside = head < heads, column < d_v
    valid = (state < states)[:, None] & known[None, :]
    state = state.to(tl.int64)
    at = outs + token * stride_outs_token + state[:, None] * stride_outs_state + head[None, :] * stride_outs_head
    values = tl.load(at[:, :, None] + column[None, None, :], mask=valid[:, :, None] & inside[None, None, :], other=0.0)
    lse_at = lses + token * stride_lses_token + state[:, None] * stride_lses_state + head[None, :] * stride_lses_head
    found = tl.load(lse_at, mask=valid, other=float("-inf"))
    found = tl.where(found * LOG2_E == float("-inf"), float("-inf"), found)
    m = tl.max(found, 0)
    # The difference first: behind a product that is not rounded (a fused operation) large ones of equal states would
    # not be 0.
    weight = tl.exp2((found - tl.where(m == float("-inf"), 0.0, m)[None, :]) * LOG2_E)
    top = m * LOG2_E
    l = tl.where(top == float("inf"), float("nan"), tl.sum(weight, 0))
    merged = log2_sum(top, l)
    factor = 1.0 / tl.where(l == 0.0, 1.0, l)
    if sink is not None:
        factor = factor * sink_factor(tl.load(sink + head, mask=known, other=0.0), merged)
    if tl.program_id(2) == 0:
        tl.store(lse + token * stride_lse_token + head, merged * LN_2, mask=known)
    counted = tl.where((weight > 0.0)[:, :, None], values.to(tl.float32), 0.0)
    total = cast(tl.sum(weight[:, :, None] * counted, 0) * factor[:, None], out.dtype.element_ty)
    out_at = out + token * stride_out_token + head[:, None] * stride_out_head + column[None, :]
    tl.store(out_at, total, mask=known[:, None] & inside[None, :])
