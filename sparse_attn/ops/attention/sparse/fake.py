"""Fake implementations, and the allocation of outputs that the real ones share."""

from __future__ import annotations

import torch

from sparse_attn.layout import parse_kv_layout


def sparse_attn_prefill(q, d_v):
    return allocate_output(q.shape[0], q.shape[1], d_v, q)


def sparse_attn_decode(q, layout):
    return allocate_output(q.shape[0], q.shape[1], parse_kv_layout(layout).value_dim, q)


def sparse_attn_into() -> None:
    """Writes out, lse and max_logits, and returns nothing."""


def merge_attn_states(outs):
    return allocate_output(outs.shape[1], outs.shape[2], outs.shape[3], outs)


def allocate_output(
    tokens: int | torch.SymInt, heads: int | torch.SymInt, d_v: int | torch.SymInt, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (out [tokens, heads, d_v] in the dtype of ``like``, lse fp32 [tokens, heads])."""
    return (
        torch.empty(tokens, heads, d_v, dtype=like.dtype, device=like.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=like.device),
    )
