"""The GPU implementation: a kernel chosen by dispatch.py, its scratch, and its launcher."""

from __future__ import annotations

import torch

from sparse_attn import workspace
from sparse_attn.framework.debug import warn_of_slow_path
from sparse_attn.framework.dispatch import Choice
from sparse_attn.framework.target import target_of
from sparse_attn.ops.attention.sparse import dispatch, fake
from sparse_attn.ops.attention.sparse.dispatch import Plan
from sparse_attn.ops.attention.sparse.portable.launch import merge
from sparse_attn.ops.attention.sparse.problem import (
    INVARIANT_DECODE_ROWS,
    INVARIANT_PREFILL_ROWS,
    Call,
    kv_caches,
    kv_rows,
    problem_of,
)


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
    if q.dtype == torch.float64:
        raise TypeError("q: got torch.float64, allowed: torch.bfloat16, torch.float16, torch.float32 for a kernel")
    rows = kv_rows(kv, d_v, indices, indptr)
    invariant_rows = INVARIANT_PREFILL_ROWS if batch_invariant else None
    result = fake.allocate_output(q.shape[0], q.shape[1], d_v, q)
    _attend("sparse_attn_prefill", Call(q, rows, None, scale, sink, *result), invariant_rows, kernel)
    return result


def sparse_attn_prefill_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    d_v: int,
    wants_q: bool,
    wants_kv: bool,
    wants_sink: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError(
        "sparse_attn::sparse_attn_prefill has no backward on a GPU: run it with impl='reference', under "
        "torch.no_grad(), or detach what it is given"
    )


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
    keys, extra = kv_caches(*caches)
    invariant_rows = INVARIANT_DECODE_ROWS if batch_invariant else None
    result = fake.allocate_output(q.shape[0], q.shape[1], keys.layout.value_dim, q)
    _attend("sparse_attn_decode", Call(q, keys, extra, scale, sink, *result), invariant_rows, kernel)
    return result


def sparse_attn_into(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float,
    layout: str,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    extra_lengths: torch.Tensor | None,
    extra_layout: str,
    sink: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_logits: torch.Tensor | None,
    inf_lse: bool,
    kernel: str | Choice[Plan] | None = None,
) -> None:
    """kernel: see dispatch.choose."""
    caches = cache, indices, indptr, layout, extra_cache, extra_indices, extra_indptr, extra_layout
    keys, extra = kv_caches(*caches, lengths, extra_lengths)
    invariant_rows = INVARIANT_DECODE_ROWS if batch_invariant else None
    call = Call(q, keys, extra, scale, sink, out, lse, max_logits=max_logits, inf_lse=inf_lse)
    _attend("sparse_attn_into", call, invariant_rows, kernel)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, d_v = outs.shape
    out, lse = fake.allocate_output(tokens, heads, d_v, outs)
    merge(outs, lses, sink, out, lse)
    return out, lse


def _attend(op: str, call: Call, invariant_rows: int | None, kernel: str | Choice[Plan] | None) -> None:
    """Write what ``call`` asks for; its scratch is taken here."""
    if call.q.shape[0] == 0:
        return
    wants_max = call.max_logits is not None
    problem = problem_of(call.q, call.keys, call.extra, call.scale, invariant_rows, wants_max)
    choice = dispatch.choose(problem, target_of(call.q.device), kernel)
    warn_of_slow_path(op, call.q.device, choice)
    scratch = choice.plan.scratch
    if scratch.buffers or scratch.counters:
        views, counters = workspace.take(op, scratch, call.q.device)
        call = call._replace(views=views, counters=counters)
    choice.kernel.launcher(call, choice.plan)
