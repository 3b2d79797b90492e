"""The gradients of sparse_attn_prefill, by q, kv and sink, and of merge_attn_states.

For row t and head h, with the forward's scores z, softmax s over the row's valid indices, lse L, a = sigmoid(L - sink)
(1 without a sink) and delta = dout . out:
dz_i = s_i (a (dout . v_i - delta) + dlse), dq = scale sum_i dz_i k_i,
dk_i = scale sum_th dz_i q_th + (on the first d_v values) sum_th a s_i dout, dsink_h = -sum_t (1 - a) delta.

A key's parts are added up in fp32, row after row, in the order of a row's indices. A row whose lse is -inf gives and
takes nothing. Where lse is NaN, so are the gradients of that query head and of every key that the row names.
"""

from __future__ import annotations

from typing import Any

import torch


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the gradient of sparse_attn_prefill needs of its forward."""
    q, kv, indices, indptr, ctx.scale, ctx.d_v, sink, _, ctx.impl = inputs
    ctx.save_for_backward(q, kv, indices, indptr, *output, sink)
    ctx.set_materialize_grads(False)


def gradient(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all arguments of sparse_attn_prefill."""
    q, kv, indices, indptr, out, lse, sink = ctx.saved_tensors
    wants = [ctx.needs_input_grad[place] for place in (0, 1, 6)]
    found: list[torch.Tensor | None] = [None] * 3
    if dout is not None or dlse is not None:
        impl = ctx.impl if ctx.impl in ("auto", "reference") else "triton"  # a forward's kernel is none of a backward
        given = q, kv, indices, indptr, out, lse, dout, dlse, sink, ctx.scale, ctx.d_v, *wants, impl
        found = [
            one if want else None
            for one, want in zip(torch.ops.sparse_attn.sparse_attn_prefill_backward(*given), wants)
        ]
    dq, dkv, dsink = found
    return dq, dkv, None, None, None, None, dsink, None, None


def keep_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What the gradient of merge_attn_states needs of its forward."""
    outs, lses, sink, _ = inputs
    ctx.save_for_backward(outs, lses, sink, *output)
    ctx.set_materialize_grads(False)


def gradient_of_states(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all arguments of merge_attn_states: a state is a key whose score is its lse."""
    outs, lses, sink, out, lse = ctx.saved_tensors
    live = ~lse.isneginf()
    weights = torch.where(lses.isneginf(), 0.0, torch.exp(lses - torch.where(live, lse, 0.0)))
    douts, dlses, dsink = None, torch.zeros_like(lses), None
    if dlse is not None:
        dlses = weights * dlse
    if dout is not None:
        wide, heads = dout.float(), lse.shape[1]
        kept = torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink[:heads])
        delta = torch.where(live, (wide * out.float()).sum(-1), 0.0)
        counted = weights * kept
        douts = (counted.unsqueeze(-1) * wide).to(outs.dtype)
        by_state = torch.where(weights == 0, 0.0, (wide * outs.float()).sum(-1) - delta)
        dlses = dlses + counted * by_state
        if sink is not None:
            of_heads = -torch.where(live, (1 - kept) * delta, 0.0).sum(0)
            dsink = torch.cat([of_heads, sink.new_zeros(sink.shape[0] - heads)])
    return douts, dlses, dsink, None
