"""Sparse multi-query attention over ragged indices.

For every row t and head h, with S = the valid indices of row t (duplicates count as often as they stand there):
z_i = scale * (q . k_i), out = sum_i softmax(z)_i v_i, v_i = the first d_v values of k_i. With a sink (fp32 [heads],
natural log units, not scaled) the denominator gains exp(sink). lse = log sum_i exp(z_i) leaves the sink out. A row
without a valid index gives out 0 and lse -inf; sink -inf changes nothing, sink +inf gives out 0.

An index is valid inside [0, rows); others are skipped, and NaN in a row that no valid index names never reaches an output.
"""

from __future__ import annotations

import math

import torch

from sparse_attn import checks
from sparse_attn.layout import IndexFp8Layout, Layout, LatentFp8Layout, PlainLayout, check_cache
from sparse_attn.ops.attention import op
from sparse_attn.types import AttentionOutput, Ragged

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEADS = 128


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    ragged: Ragged,
    *,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend to rows of a dense key-value matrix.

    q: [tokens, heads, d_qk] bf16, fp16 or fp32, 1 to 128 heads. kv: [rows, d_qk] or [rows, 1, d_qk], dtype of q.
    ragged: row ids per token. d_v: leading values of a row that are its value, at most d_qk. sink: fp32 [>= heads] or None.

    Returns AttentionOutput(out [tokens, heads, d_v] dtype of q, lse fp32 [tokens, heads]).
    """
    _check_queries(q, ragged, sink)
    checks.check_dtype("kv", kv, (q.dtype,))
    checks.check_rank("kv", kv, 2, 3)
    if kv.dim() == 3:
        checks.check_shape("kv", kv, (None, 1, q.shape[2]), "[rows, 1, d_qk of q]")
        kv = kv.squeeze(1)
    checks.check_shape("kv", kv, (None, q.shape[2]), "[rows, d_qk of q]")
    checks.check_unit_stride("kv", kv)
    if not 1 <= d_v <= q.shape[2]:
        raise ValueError(f"d_v: got {d_v}, allowed: 1 to d_qk = {q.shape[2]}")
    checks.check_same_device(q=q, kv=kv, indices=ragged.indices, sink=sink)
    return AttentionOutput(*op.sparse_attn_prefill(q, kv, *ragged, scale, d_v, sink, impl))


def sparse_attn_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    ragged: Ragged,
    *,
    scale: float,
    layout: Layout,
    sink: torch.Tensor | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Attend to slots of a paged cache.

    q: [tokens, heads, d_qk] bf16, fp16 or fp32, 1 to 128 heads, d_qk = layout.latent + layout.rope. cache: blocks of
    ``layout`` [num_blocks, block_size, row], block stride free; keys are converted to q's dtype. ragged: slots (block *
    block_size + offset) per token. sink: fp32 [>= heads] or None.

    Returns AttentionOutput(out [tokens, heads, layout.latent] dtype of q, lse fp32 [tokens, heads]).
    """
    _check_queries(q, ragged, sink)
    if isinstance(layout, IndexFp8Layout) or not isinstance(layout, (PlainLayout, LatentFp8Layout)):
        raise ValueError(f"layout: got {layout!r}, allowed: PlainLayout, LatentFp8Layout")
    check_cache("cache", cache, layout)
    checks.check_shape("q", q, (None, None, layout.dim), "[tokens, heads, layout.latent + layout.rope]")
    checks.check_same_device(q=q, cache=cache, indices=ragged.indices, sink=sink)
    return AttentionOutput(*op.sparse_attn_decode(q, cache, *ragged, scale, layout.name, sink, impl))


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, *, sink: torch.Tensor | None = None, impl: str = "auto"
) -> AttentionOutput:
    """Merge attention over disjoint sets of keys into attention over their union.

    outs: [states, tokens, heads, d_v] bf16, fp16 or fp32. lses: fp32 [states, tokens, heads], natural log, -inf for a state
    without keys (whose out is ignored). sink: fp32 [>= heads], counted once, or None.

    Returns AttentionOutput(out [tokens, heads, d_v] dtype of outs, lse fp32 [tokens, heads]).
    """
    checks.check_dtype("outs", outs, FLOATS)
    checks.check_rank("outs", outs, 4)
    checks.check_at_least("outs states", outs.shape[0], 1)
    checks.check_unit_stride("outs", outs)
    checks.check_dtype("lses", lses, (torch.float32,))
    checks.check_shape("lses", lses, outs.shape[:3], "[states, tokens, heads]")
    _check_sink(sink, outs.shape[2])
    checks.check_same_device(outs=outs, lses=lses, sink=sink)
    return AttentionOutput(*op.merge_attn_states(outs, lses, sink, impl))


def lse_to_base2(lse: torch.Tensor) -> torch.Tensor:
    """Natural-log lse -> base-2 lse."""
    return lse * math.log2(math.e)


def lse_to_flashmla(lse: torch.Tensor) -> torch.Tensor:
    """This library's lse (-inf for an empty row) -> FlashMLA's (+inf for an empty row)."""
    return torch.where(lse == -math.inf, math.inf, lse)


def _check_queries(q: torch.Tensor, ragged: Ragged, sink: torch.Tensor | None) -> None:
    checks.check_dtype("q", q, FLOATS)
    checks.check_rank("q", q, 3)
    if not 1 <= q.shape[1] <= MAX_HEADS:
        raise ValueError(f"q: got {q.shape[1]} heads, allowed: 1 to {MAX_HEADS}")
    checks.check_unit_stride("q", q)
    checks.check_dtype("ragged.indices", ragged.indices, (torch.int32,))
    checks.check_rank("ragged.indices", ragged.indices, 1)
    checks.check_unit_stride("ragged.indices", ragged.indices)
    checks.check_dtype("ragged.indptr", ragged.indptr, (torch.int32,))
    checks.check_shape("ragged.indptr", ragged.indptr, (q.shape[0] + 1,), "[tokens + 1]")
    checks.check_unit_stride("ragged.indptr", ragged.indptr)
    checks.check_same_device(q=q, **{"ragged.indices": ragged.indices, "ragged.indptr": ragged.indptr})
    _check_sink(sink, q.shape[1])


def _check_sink(sink: torch.Tensor | None, heads: int) -> None:
    if sink is None:
        return
    checks.check_dtype("sink", sink, (torch.float32,))
    checks.check_rank("sink", sink, 1)
    checks.check_unit_stride("sink", sink)
    if sink.shape[0] < heads:
        raise ValueError(f"sink: got {sink.shape[0]} values, allowed: at least the {heads} heads")
