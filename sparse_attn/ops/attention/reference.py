"""The oracle: gather the named rows, softmax in fp32, sum.

Rows are handled a few at a time so that the gathered keys stay small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_attn.layout import parse_layout

GATHERED_ELEMENTS = 1 << 24


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend(q, lambda rows: kv[rows].float(), kv.shape[0], indices, indptr, scale, d_v, sink)


def sparse_attn_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    layout: str,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = parse_layout(layout)
    slots = cache.shape[0] * cache.shape[1]
    return _attend(q, lambda rows: kind.decode(cache, rows).to(q.dtype).float(), slots, indices, indptr, scale, kind.latent, sink)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)).unsqueeze(-1)
    out = torch.where(weights > 0, weights * outs.float(), 0.0).sum(0)
    return apply_sink(out, lse, sink).to(outs.dtype), lse


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Scale fp32 ``out`` [tokens, heads, d_v] by exp(lse) / (exp(lse) + exp(sink))."""
    if sink is None:
        return out
    kept = torch.sigmoid(lse - sink[: lse.shape[1]])
    return torch.where(lse.isneginf(), 0.0, kept).unsqueeze(-1) * out


def _attend(
    q: torch.Tensor,
    fetch: Callable[[torch.Tensor], torch.Tensor],
    rows: int,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, d_qk = q.shape
    out = torch.zeros(tokens, heads, d_v, dtype=torch.float32, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, device=q.device)
    starts = indptr[:-1].long()
    lengths = (indptr[1:].long() - starts).clamp_min(0)
    width = int(lengths.max()) if tokens else 0
    if width == 0 or rows == 0:
        return out.to(q.dtype), lse
    step = max(1, GATHERED_ELEMENTS // (width * d_qk))
    for first in range(0, tokens, step):
        chunk = slice(first, first + step)
        column = torch.arange(width, device=q.device)
        inside = column < lengths[chunk].unsqueeze(1)
        at = (starts[chunk].unsqueeze(1) + column).clamp(0, indices.numel() - 1)
        row = indices[at].long()
        valid = inside & (row >= 0) & (row < rows)
        keys = torch.zeros(*row.shape, d_qk, device=q.device)
        keys[valid] = fetch(row[valid])
        scores = torch.einsum("thd,tkd->thk", q[chunk].float(), keys) * scale
        scores = torch.where(valid.unsqueeze(1), scores, -torch.inf)
        lse[chunk] = torch.logsumexp(scores, 2)
        shift = torch.where(lse[chunk].isneginf(), 0.0, lse[chunk]).unsqueeze(2)
        out[chunk] = torch.einsum("thk,tkd->thd", torch.exp(scores - shift), keys[..., :d_v])
    return apply_sink(out, lse, sink).to(q.dtype), lse
