"""The GPU implementation: one attention launch, and one merge where rows are split."""

from __future__ import annotations

import math

import torch
import triton

from sparse_attn import workspace
from sparse_attn.layout import LatentFp8Layout, parse_layout
from sparse_attn.ops.attention import config, kernels, shapes
from sparse_attn.target import target_of

LOG2_E = math.log2(math.e)
MERGED_ELEMENTS = 8192  # partial values a merging program holds


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = kv.unsqueeze(0)  # one block that holds every row
    return _attend("sparse_attn_prefill", q, rows, indices, indptr, scale, d_v, sink, None)


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
    fp8 = kind if isinstance(kind, LatentFp8Layout) else None
    return _attend("sparse_attn_decode", q, cache, indices, indptr, scale, kind.latent, sink, fp8)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens, heads, d_v = outs.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, outs)
    _merge(outs, lses, sink, out, lse, LOG2_E)
    return out, lse


def _attend(who, q, cache, indices, indptr, scale, d_v, sink, fp8):
    tokens, heads, d_qk = q.shape
    out, lse = shapes.allocate_output(tokens, heads, d_v, q)
    if tokens == 0:
        return out, lse
    target = target_of(q.device)
    launch = config.config(tokens, heads, d_qk, indices.numel(), q.element_size(), fp8 is not None, target)
    split = launch.splits > 1
    views, _ = workspace.take(who, config.scratch(tokens, heads, d_v, launch.splits), q.device)
    to, to_lse = views if split else (out.unsqueeze(0), lse.unsqueeze(0))
    num_blocks, block_size, row = cache.shape
    paged = num_blocks > 1 and cache.stride(0) != block_size * cache.stride(1)
    kernels.attend[(tokens, triton.cdiv(heads, launch.block_h), launch.splits)](
        q,
        cache,
        indices,
        indptr,
        sink,
        to,
        to_lse,
        heads,
        num_blocks * block_size,
        block_size,
        indices.numel(),
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        to.stride(0),
        to.stride(1),
        to.stride(2),
        to_lse.stride(0),
        to_lse.stride(1),
        D_V=d_v,
        D_REST=d_qk - d_v,
        PAD_V=_padded(d_v),
        PAD_REST=_padded(d_qk - d_v),
        GROUP=fp8.group if fp8 else 0,
        SCALE_AT=fp8.scale_offset if fp8 else 0,
        REST_AT=fp8.rope_offset if fp8 else 0,
        FNUZ=fp8 is not None and fp8.flavour == "e4m3fnuz",
        PAGED=paged,
        SPLIT=split,
        BLOCK_H=launch.block_h,
        BLOCK_K=launch.block_k,
        STAGES=launch.num_stages,
        SHORT=indices.numel() < launch.block_k,
        num_warps=launch.num_warps,
    )
    if split:
        _merge(to, to_lse, sink, out, lse, 1.0)
    return out, lse


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _merge(outs, lses, sink, out, lse, to_log2):
    states, tokens, heads, d_v = outs.shape
    if tokens == 0:
        return
    block_s = max(2, triton.next_power_of_2(states))
    block_d = min(max(64, MERGED_ELEMENTS // block_s), triton.next_power_of_2(d_v))
    kernels.merge[(tokens, heads, triton.cdiv(d_v, block_d))](
        outs,
        lses,
        sink,
        out,
        lse,
        states,
        d_v,
        to_log2,
        *outs.stride()[:3],
        *lses.stride(),
        *out.stride()[:2],
        lse.stride(0),
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=4,
    )
