"""The oracle: decode, multiply, relu, weigh, sum, mask."""

from __future__ import annotations

import torch

from sparse_attn.fp8 import fp8_decode
from sparse_attn.framework import debug
from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, parse_layout
from sparse_attn.mxfp4 import MXFP4, mxfp4_decode

PRODUCT_ELEMENTS = 1 << 24  # of [rows, heads, keys] held at once


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    flavour: str,
) -> torch.Tensor:
    if flavour == MXFP4:
        assert k_scale is not None, "MXFP4 keys have scales"
        q, k, k_scale = _decode_query(q, IndexMxfp4Layout(2 * k.shape[1])), mxfp4_decode(k, k_scale), None
    elif k_scale is not None:
        q, k = fp8_decode(q, flavour), fp8_decode(k, flavour)
    position = torch.arange(k.shape[0], device=k.device)
    inside = (position >= kv_start.unsqueeze(1)) & (position < kv_end.unsqueeze(1))
    scale = torch.ones(k.shape[0], dtype=torch.float32, device=k.device) if k_scale is None else k_scale
    return _scores(q.float(), k.float(), scale, weights, inside)


def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    layout: str,
) -> torch.Tensor:
    kind = parse_layout(layout)
    requests, next_n = q.shape[:2]
    num_blocks, block_size, _ = cache.shape
    if isinstance(kind, IndexMxfp4Layout):
        q = _decode_query(q.flatten(0, 1), kind).unflatten(0, (requests, next_n))
    else:
        q = fp8_decode(q, kind.flavour) if isinstance(kind, IndexFp8Layout) else q.float()
    logits = torch.full((requests, next_n, max_context_len), -torch.inf, dtype=torch.float32, device=q.device)
    position = torch.arange(max_context_len, device=q.device)
    column = position // block_size
    mapped = column < block_table.shape[1]
    for request in range(requests if next_n else 0):
        limit = context_lens[request].clamp(0, max_context_len)
        block = torch.full_like(position, -1)
        block[mapped] = block_table[request, column[mapped]].long()
        known = (block >= 0) & (block < num_blocks) & (position < limit.amax())
        slots = (block * block_size + position % block_size)[known]
        if isinstance(kind, IndexFp8Layout):
            codes, scale = kind.decode_parts(cache, slots)
            keys = fp8_decode(codes, kind.flavour)
        else:
            keys = kind.decode(cache, slots)
            scale = torch.ones(keys.shape[0], dtype=torch.float32, device=q.device)
        inside = position[known] < limit.unsqueeze(1)
        rows = weights[request * next_n : (request + 1) * next_n]
        logits[request][:, known] = _scores(q[request], keys, scale, rows, inside)
    return logits.flatten(0, 1)


def _decode_query(q: torch.Tensor, layout: IndexMxfp4Layout) -> torch.Tensor:
    """fp32 [rows, heads, dim] of MXFP4 queries [rows, heads, layout.row], a block of the layout each."""
    rows, heads, _ = q.shape
    return layout.decode(q.contiguous(), torch.arange(rows * heads, device=q.device)).view(rows, heads, layout.dim)


def _scores(
    q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, weights: torch.Tensor, inside: torch.Tensor
) -> torch.Tensor:
    """fp32 [rows, keys] from q [rows, heads, dim] and k [keys, dim]; -inf where not ``inside`` [rows, keys]."""
    logits = torch.empty(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    step = max(1, PRODUCT_ELEMENTS // max(1, q.shape[1] * k.shape[0]))
    for first in range(0, q.shape[0], step):
        some = slice(first, first + step)
        products = torch.matmul(q[some], k.t()).relu()  # [rows, heads, keys]
        weighed = torch.einsum("mhn,mh->mn", products, weights[some]) * k_scale
        logits[some] = torch.where(inside[some], weighed, -torch.inf)
    return logits


# --- what debug mode asks of values


def rules_of_mqa_logits(k: torch.Tensor, kv_start: torch.Tensor, kv_end: torch.Tensor) -> None:
    debug.ranges("kv_start", kv_start, "kv_end", kv_end, k.shape[0], "keys")


def rules_of_paged_mqa_logits(
    cache: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, max_context_len: int
) -> None:
    debug.paged(cache, context_lens, block_table, max_context_len)
