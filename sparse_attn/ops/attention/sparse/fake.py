"""Fake implementations, and the allocation of outputs that the real ones share."""

from __future__ import annotations

import torch

from sparse_attn.layout import parse_kv_layout

WIDE = {torch.float64: torch.float64}  # what is reckoned in, by the dtype of queries; else fp32


def sparse_attn_prefill(q, d_v):
    return allocate_output(q.shape[0], q.shape[1], d_v, q)


def sparse_attn_prefill_backward(q, kv, sink, wants_q, wants_kv, wants_sink):
    return allocate_gradients(q, kv, sink, wants_q, wants_kv, wants_sink)


def sparse_attn_decode(q, layout):
    return allocate_output(q.shape[0], q.shape[1], parse_kv_layout(layout).value_dim, q)


def sparse_attn_into() -> None:
    """Writes out, lse and max_logits, and returns nothing."""


def merge_attn_states(outs):
    return allocate_output(outs.shape[1], outs.shape[2], outs.shape[3], outs)


def allocate_output(
    tokens: int | torch.SymInt, heads: int | torch.SymInt, d_v: int | torch.SymInt, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out [tokens, heads, d_v] in the dtype of ``like``, lse [tokens, heads] in fp32, or in float64)."""
    return (
        torch.empty(tokens, heads, d_v, dtype=like.dtype, device=like.device),
        torch.empty(tokens, heads, dtype=WIDE.get(like.dtype, torch.float32), device=like.device),
    )


def allocate_gradients(
    q: torch.Tensor, kv: torch.Tensor, sink: torch.Tensor | None, wants_q: bool, wants_kv: bool, wants_sink: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised and contiguous (dq, dkv, dsink), each like its input; of no element where it is not wanted."""
    like_sink = q.new_empty(0, dtype=WIDE.get(q.dtype, torch.float32)) if sink is None else sink
    return (
        q.new_empty(q.shape if wants_q else (0,)),
        kv.new_empty(kv.shape if wants_kv else (0,)),
        like_sink.new_empty(like_sink.shape if wants_sink else (0,)),
    )
