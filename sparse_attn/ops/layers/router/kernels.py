"""A few rows per program, experts as [groups, experts of a group] in registers; every choice is one integer reduction.

Floors: bytes, tokens * (experts * itemsize + 8 * top_k); the choices are top_groups + top_k dependent reductions.
A candidate is an int64: its score as an ordered integer above, its index counted down below. So the largest candidate
is the best score with the lowest index, and no two are equal.
"""

import triton
import triton.language as tl

from sparse_attn.device import pdl
from sparse_attn.device.order import ordered_key

TAKEN = tl.constexpr(-(2**63))  # below every candidate


@triton.jit
def _candidates(values, index):
    return (ordered_key(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(candidate):
    return 0x7FFFFFFF - (candidate & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _score(logit, SOFTPLUS: tl.constexpr):
    if SOFTPLUS:
        small = tl.exp(-tl.abs(logit))
        one_more = 1.0 + small
        gone = one_more == 1.0
        # log(1 + small) without losing a small that vanishes beside 1
        tail = tl.where(gone, small, tl.log(one_more) * (small / tl.where(gone, 1.0, one_more - 1.0)))
        return tl.sqrt(tl.where(logit > 0.0, logit, 0.0) + tail)
    else:
        return tl.sigmoid(logit)


@triton.jit(do_not_specialize=["tokens"])
def biased_grouped_topk(
    logits,  # fp32, bf16 or fp16 [tokens, experts]
    bias,  # fp32 [experts]
    weights,  # fp32 [tokens, top_k]
    ids,  # int32 [tokens, top_k]
    tokens,
    routed_scale,
    stride_logits_token,
    stride_logits_expert,
    stride_bias_expert,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,  # experts of a group
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS_PADDED)
    member = tl.arange(0, SIZE_PADDED)
    expert = group[:, None] * SIZE + member[None, :]
    real = (group < NUM_GROUPS)[:, None] & (member < SIZE)[None, :]
    inside = (row < tokens)[:, None, None] & real[None, :, :]

    # Scores choose with their bias, and weigh without it.
    source = logits + row.to(tl.int64)[:, None, None] * stride_logits_token
    logit = tl.load(source + expert[None, :, :] * stride_logits_expert, mask=inside, other=0.0)
    expert_bias = tl.load(bias + expert * stride_bias_expert, mask=real, other=0.0)
    score = _score(logit.to(tl.float32), SOFTPLUS)
    biased = score + expert_bias[None, :, :]
    candidate = tl.where(real[None, :, :], _candidates(biased, expert[None, :, :]), TAKEN)

    # A group's score is the sum of its two best; NaN adds nothing.
    if TOP_GROUPS < NUM_GROUPS:
        first = tl.max(candidate, 2)
        is_first = candidate == first[:, :, None]
        second = tl.max(tl.where(is_first, TAKEN, candidate), 2)
        is_second = candidate == second[:, :, None]
        clean = tl.where(biased == biased, biased, float("-inf"))
        group_score = tl.sum(tl.where(is_first, clean, 0.0), 2) + tl.sum(tl.where(is_second, clean, 0.0), 2)
        # The best groups, one by one.
        rest = tl.where((group < NUM_GROUPS)[None, :], _candidates(group_score, group[None, :]), TAKEN)
        kept = tl.zeros([ROWS, GROUPS_PADDED], tl.int1)
        for _ in range(TOP_GROUPS):
            chosen = rest == tl.max(rest, 1)[:, None]
            kept = kept | chosen
            rest = tl.where(chosen, TAKEN, rest)
        # Experts of other groups have -inf: behind all that can be chosen by score, before padding.
        dropped = _candidates(tl.full([1, GROUPS_PADDED, SIZE_PADDED], float("-inf"), tl.float32), expert[None, :, :])
        candidate = tl.where(kept[:, :, None] | ~real[None, :, :], candidate, dropped)

    candidate = tl.reshape(candidate, [ROWS, GROUPS_PADDED * SIZE_PADDED])
    score = tl.reshape(score, [ROWS, GROUPS_PADDED * SIZE_PADDED])
    column = tl.arange(0, TOP_K_PADDED)[None, :]
    chosen_score = tl.zeros([ROWS, TOP_K_PADDED], tl.float32)
    chosen_id = tl.zeros([ROWS, TOP_K_PADDED], tl.int32)
    # The best experts, one by one.
    for k in range(TOP_K):
        best = tl.max(candidate, 1)
        chosen = candidate == best[:, None]
        selectable = (best >> 32) > -2147483648
        value = tl.sum(tl.where(chosen & selectable[:, None], score, 0.0), 1)
        chosen_score = tl.where(column == k, value[:, None], chosen_score)
        chosen_id = tl.where(column == k, _index_of(best)[:, None], chosen_id)
        candidate = tl.where(chosen, TAKEN, candidate)

    # Weights that add up to 1, then to routed_scale.
    if RENORMALISE:
        total = tl.sum(chosen_score, 1)
        chosen_score = chosen_score / tl.where(total == 0.0, 1.0, total)[:, None]
    target = row.to(tl.int64)[:, None] * TOP_K + column
    keep = (row < tokens)[:, None] & (column < TOP_K)
    tl.store(weights + target, chosen_score * routed_scale, mask=keep)
    tl.store(ids + target, chosen_id, mask=keep)
