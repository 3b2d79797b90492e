"""Launchers of the portable kernels."""

from __future__ import annotations

import triton

from sparse_attn.device import grid, pdl
from sparse_attn.framework.target import target_of
from sparse_attn.mxfp4 import GROUP, MXFP4
from sparse_attn.ops.indexer.scores.plan import Paged, PagedPlan, Prefill, PrefillPlan
from sparse_attn.ops.indexer.scores.portable import kernels, mxfp4

OUTSIDE = 1024  # columns that clear_outside clears at a time


def prefill(call: Prefill, plan: PrefillPlan) -> None:
    rows = call.q.shape[0]
    if rows <= grid.MOST * plan.block_q:
        return _prefill(call, plan)
    for some in grid.spans(rows, plan.block_q):
        here = {name: getattr(call, name)[some] for name in ("q", "weights", "kv_start", "kv_end", "out")}
        _prefill(call._replace(**here), plan)


def _prefill(call: Prefill, plan: PrefillPlan) -> None:
    q, k, k_scale, weights, kv_start, kv_end, flavour, out, clear, _ = call
    rows, heads, dim = q.shape
    keys = k.shape[0]
    if flavour == MXFP4:
        assert k_scale is not None, "MXFP4 keys have scales"
        mxfp4.mqa_logits[(triton.cdiv(keys, plan.block_kv), triton.cdiv(rows, plan.block_q))](
            q, k, k_scale, weights, kv_start, kv_end, out, rows, keys, heads, q.stride(0), k.stride(0),
            k_scale.stride(0), *weights.stride(), kv_start.stride(0), kv_end.stride(0), out.stride(0),
            GROUPS=k_scale.shape[1], PAD_GROUPS=triton.next_power_of_2(k_scale.shape[1]), PAD_H=plan.padded_heads,
            WHOLE_H=plan.padded_heads == heads, CLEAR=clear, BLOCK_KV=plan.block_kv, BLOCK_Q=plan.block_q,
            STAGES=plan.num_stages, num_warps=plan.num_warps, **pdl.launched(target_of(q.device)),
        )  # fmt: skip
        return
    kernels.mqa_logits[(triton.cdiv(keys, plan.block_kv), triton.cdiv(rows, plan.block_q))](
        q, k, k_scale, weights, kv_start, kv_end, out, rows, keys, heads, *q.stride()[:2], k.stride(0),
        0 if k_scale is None else k_scale.stride(0), *weights.stride(), kv_start.stride(0), kv_end.stride(0),
        out.stride(0),
        D=dim, PAD_D=_padded(dim), PAD_H=plan.padded_heads, WHOLE_H=plan.padded_heads == heads, FP8=k_scale is not None,
        FP8_DOT=plan.fp8_dot, FNUZ=flavour == "e4m3fnuz", CLEAR=clear, BLOCK_KV=plan.block_kv, BLOCK_Q=plan.block_q,
        STAGES=plan.num_stages, num_warps=plan.num_warps, **pdl.launched(target_of(q.device)),
    )  # fmt: skip


def clear_outside(call: Prefill) -> None:
    """-inf outside the rows' ranges, for a kernel that leaves them as they are."""
    kv_start, kv_end, out = call.kv_start, call.kv_end, call.out
    rows, keys = out.shape
    parts = min(triton.cdiv(keys, OUTSIDE), triton.cdiv(1024, rows))
    kernels.clear_outside[(rows, parts)](
        kv_start, kv_end, out, keys, kv_start.stride(0), kv_end.stride(0), out.stride(0), BLOCK=OUTSIDE,
        **pdl.launched(target_of(out.device)),
    )  # fmt: skip


def paged(call: Paged, plan: PagedPlan) -> None:
    """``early_dependents`` is not looked at: the next launch starts when this one ends."""
    q, cache, weights, context_lens, block_table, out, maxima = (
        call.q, call.cache, call.weights, call.context_lens, call.block_table, call.out, call.maxima
    )  # fmt: skip
    requests, next_n, heads, dim = q.shape
    if call.flavour == MXFP4:
        groups = cache.shape[2] // (GROUP // 2 + 1)
        mxfp4.paged_mqa_logits[(requests * triton.cdiv(next_n, plan.block_q), plan.ctas_per_block)](
            q, cache, weights, context_lens, block_table, out, maxima, call.max_context_len, *cache.shape[:2],
            block_table.shape[1], heads, *q.stride()[:2], cache.stride(0), *weights.stride(), *context_lens.stride(),
            block_table.stride(0), out.stride(0), 0 if maxima is None else maxima.stride(0),
            GROUPS=groups, PAD_GROUPS=triton.next_power_of_2(groups), PAD_H=plan.padded_heads,
            WHOLE_H=plan.padded_heads == heads, NEXT_N=next_n, BLOCK_Q=plan.block_q, CLEAR=call.clear, GROUP=call.group,
            BLOCK_KV=plan.block_kv, ONE_ENTRY=plan.one_entry, STAGES=plan.num_stages, num_warps=plan.num_warps,
            **pdl.launched(target_of(q.device)),
        )  # fmt: skip
        return
    kernels.paged_mqa_logits[(requests * triton.cdiv(next_n, plan.block_q), plan.ctas_per_block)](
        q, cache, weights, context_lens, block_table, out, maxima, call.max_context_len, *cache.shape[:2],
        block_table.shape[1], heads, *q.stride()[:3], cache.stride(0), *weights.stride(), *context_lens.stride(),
        block_table.stride(0), out.stride(0), 0 if maxima is None else maxima.stride(0),
        D=dim, PAD_D=_padded(dim), PAD_H=plan.padded_heads, WHOLE_H=plan.padded_heads == heads, NEXT_N=next_n,
        BLOCK_Q=plan.block_q, FP8=call.flavour != "none", FP8_DOT=plan.fp8_dot, FNUZ=call.flavour == "e4m3fnuz",
        CLEAR=call.clear, GROUP=call.group, BLOCK_KV=plan.block_kv, ONE_ENTRY=plan.one_entry, STAGES=plan.num_stages,
        num_warps=plan.num_warps, **pdl.launched(target_of(q.device)),
    )  # fmt: skip


def _padded(dim: int) -> int:
    """Columns of a tile of keys."""
    return max(32, triton.next_power_of_2(dim))
