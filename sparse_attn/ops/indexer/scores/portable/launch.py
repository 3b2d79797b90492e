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
    q, k, k_scale = call.q, call.k, call.k_scale
    rows, keys = call.out.shape
    q_strides, constants = _form(call, plan)
    tensors = q, k, k_scale, call.weights, call.kv_start, call.kv_end, call.out
    strides = *q_strides, k.stride(0), 0 if k_scale is None else k_scale.stride(0), *call.strides
    ctas = triton.cdiv(keys, plan.block_kv), triton.cdiv(rows, plan.block_q)
    if call.flavour == MXFP4:
        mxfp4.mqa_logits[ctas](*tensors, rows, keys, q.shape[1], *strides, **constants)
    else:
        kernels.mqa_logits[ctas](*tensors, rows, keys, q.shape[1], *strides, **constants)


def clear_outside(call: Prefill) -> None:
    """-inf outside the rows' ranges, for a kernel that leaves them as they are."""
    kv_start, kv_end, out = call.kv_start, call.kv_end, call.out
    rows, keys = out.shape
    parts = min(triton.cdiv(keys, OUTSIDE), triton.cdiv(1024, rows))
    kernels.clear_outside[(rows, parts)](
        kv_start, kv_end, out, keys, *call.strides[2:], BLOCK=OUTSIDE, **pdl.launched(target_of(out.device))
    )


def paged(call: Paged, plan: PagedPlan) -> None:
    """``early_dependents`` is not looked at: the next launch starts when this one ends."""
    q, cache, block_table = call.q, call.cache, call.block_table
    requests, next_n, heads, _ = q.shape
    q_strides, constants = _form(call, plan)
    tensors = q, cache, call.weights, call.context_lens, block_table, call.out, call.maxima
    sizes = call.max_context_len, *cache.shape[:2], block_table.shape[1], heads
    strides = *q_strides, cache.stride(0), *call.strides
    constants |= dict(NEXT_N=next_n, GROUP=call.group, ONE_ENTRY=plan.one_entry)
    ctas = requests * triton.cdiv(next_n, plan.block_q), plan.ctas_per_block
    if call.flavour == MXFP4:
        mxfp4.paged_mqa_logits[ctas](*tensors, *sizes, *strides, **constants)
    else:
        kernels.paged_mqa_logits[ctas](*tensors, *sizes, *strides, **constants)


def _form(call: Prefill | Paged, plan: PrefillPlan | PagedPlan) -> tuple[tuple[int, ...], dict[str, int | bool]]:
    """The strides of a call's queries, and what kernels for its codes take by name."""
    heads, width = call.q.shape[-2:]
    constants = dict(
        PAD_H=plan.padded_heads,
        WHOLE_H=plan.padded_heads == heads,
        CLEAR=call.clear,
        BLOCK_KV=plan.block_kv,
        BLOCK_Q=plan.block_q,
        STAGES=plan.num_stages,
        num_warps=plan.num_warps,
        **pdl.launched(target_of(call.q.device)),
    )
    if call.flavour == MXFP4:  # a row's heads lie side by side
        groups = width // (GROUP // 2 + 1)
        codes = dict(GROUPS=groups, PAD_GROUPS=triton.next_power_of_2(groups))
        return call.q.stride()[:-2], constants | codes
    codes = dict(
        D=width,
        PAD_D=max(32, triton.next_power_of_2(width)),
        FP8=call.flavour != "none",
        FP8_DOT=plan.fp8_dot,
        FNUZ=call.flavour == "e4m3fnuz",
    )
    return call.q.stride()[:-1], constants | codes
