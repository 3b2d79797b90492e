"""The GPU implementation: one launch writes every element."""

from __future__ import annotations

import torch

from sparse_attn.layout import IndexFp8Layout, parse_layout
from sparse_attn.ops.index_logits import config, shapes
from sparse_attn.ops.index_logits.portable import kernels
from sparse_attn.target import target_of


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    kv_start: torch.Tensor,
    kv_end: torch.Tensor,
    flavour: str,
) -> torch.Tensor:
    out = shapes.allocate_logits(q.shape[0], k.shape[0], q)
    launch = config.mqa_config(q.shape[0], k.shape[0], *q.shape[1:], flavour, q.element_size(), target_of(q.device))
    kernels.launch_mqa_logits(q, k, k_scale, weights, kv_start, kv_end, flavour, out, launch, clean=True)
    return out


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
    flavour = kind.flavour if isinstance(kind, IndexFp8Layout) else "none"
    out = shapes.allocate_logits(q.shape[0] * q.shape[1], max_context_len, q)
    launch = config.paged_config(*q.shape, max_context_len, flavour, q.element_size(), target_of(q.device))
    kernels.launch_paged_mqa_logits(
        q, cache, weights, context_lens, block_table, max_context_len, flavour, out, launch, clean=True
    )
    return out
