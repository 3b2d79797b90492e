"""The GPU implementation: a kernel chosen by dispatch.py, its scratch, and its launcher."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.dispatch import Choice
from sparse_attn.ops.attention import dispatch, shapes
from sparse_attn.ops.attention.dispatch import Plan
from sparse_attn.ops.attention.portable.launch import merge
from sparse_attn.ops.attention.problem import (
    INVARIANT_DECODE_ROWS,
    INVARIANT_PREFILL_ROWS,
    Call,
    KvCache,
    kv_caches,
    kv_rows,
    problem_of,
)
from sparse_attn.target import target_of


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
    batch_invariant: bool = False,
    kernel: str | Choice[Plan] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kernel: see dispatch.choose."""
    rows = kv_rows(kv, d_v, indices, indptr)
    invariant_rows = INVARIANT_PREFILL_ROWS if batch_invariant else None
    return _attend("sparse_attn_prefill", q, rows, None, scale, sink, invariant_rows, kernel)


def sparse_attn_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    layout: str,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    extra_layout: str,
    sink: torch.Tensor | None,
    batch_invariant: bool = False,
    kernel: str | Choice[Plan] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kernel: see dispatch.choose."""
    caches = cache, indices, indptr, layout, extra_cache, extra_indices, extra_indptr, extra_layout
    invariant_rows = INVARIANT_DECODE_ROWS if batch_invariant else None
    return _attend("sparse_attn_decode", q, *kv_caches(*caches), scale, sink, invariant_rows, kernel)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, d_v = outs.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, outs)
    merge(outs, lses, sink, out, lse)
    return out, lse


def _attend(
    op: str,
    q: torch.Tensor,
    keys: KvCache,
    extra: KvCache | None,
    scale: float,
    sink: torch.Tensor | None,
    invariant_rows: int | None,
    kernel: str | Choice[Plan] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q.shape
    out, lse = shapes.allocate_output(tokens, heads, keys.layout.value_dim, q)
    if tokens == 0:
        return out, lse
    choice = dispatch.choose(problem_of(q, keys, extra, scale, invariant_rows), target_of(q.device), kernel)
    scratch, views, counters = choice.plan.scratch, [], None
    if scratch.buffers or scratch.counters:
        views, counters = workspace.take(op, scratch, q.device)
    choice.kernel.launcher(Call(q, keys, extra, scale, sink, out, lse, views, counters), choice.plan)
    return out, lse
