"""Fake implementation, and the outputs that the launcher allocates alike."""

import torch

from sparse_attn.layout import parse_layout, query_row


def allocate_query(q: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (query [tokens, heads, dim] of the layout's dtype, weights fp32 [tokens, heads]), contiguous.
    MXFP4: query [tokens, heads, layout.row]."""
    tokens, heads, _ = q.shape
    kind = parse_layout(layout)
    return (
        torch.empty(tokens, heads, query_row(kind), dtype=kind.dtype, device=q.device),
        torch.empty(tokens, heads, dtype=torch.float32, device=q.device),
    )


def indexer_q_rope_quant(q, layout):
    return allocate_query(q, layout)
