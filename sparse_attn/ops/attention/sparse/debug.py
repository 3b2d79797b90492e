"""What debug mode asks of values."""

from __future__ import annotations

import torch

from sparse_attn.framework import debug


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
    batch_invariant: bool,
) -> None:
    _rows("", indices, indptr, kv.shape[0], "rows of kv")
    debug.not_nan("sink", sink)


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
    batch_invariant: bool,
) -> None:
    _rows("", indices, indptr, cache.shape[0] * cache.shape[1], "slots of the cache")
    if extra_cache is not None and extra_indices is not None and extra_indptr is not None:
        slots = extra_cache.shape[0] * extra_cache.shape[1]
        _rows("extra_", extra_indices, extra_indptr, slots, "slots of the extra cache")
    debug.not_nan("sink", sink)


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
) -> None:
    """Indices are free: what lies outside of a cache names no key."""
    debug.indptr("ragged.indptr", indptr, indices.shape[0], "the capacity of indices")
    if extra_indices is not None and extra_indptr is not None:
        debug.indptr("extra_ragged.indptr", extra_indptr, extra_indices.shape[0], "the capacity of indices")
    debug.not_nan("sink", sink)


def merge_attn_states(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None) -> None:
    debug.refuse("lses", lses, lses.isnan() | lses.isposinf(), "numbers, and -inf for a state without keys")
    debug.not_nan("sink", sink)


def _rows(prefix: str, indices: torch.Tensor, indptr: torch.Tensor, count: int, of: str) -> None:
    """Rows within the indices, and every index that a row has within [0, count) or -1."""
    debug.indptr(f"{prefix}ragged.indptr", indptr, indices.shape[0], "the capacity of indices")
    at = torch.arange(indices.shape[0], device=indices.device)
    row = torch.searchsorted(indptr.long(), at, right=True) - 1
    live = (row >= 0) & (row < indptr.shape[0] - 1)
    debug.places(f"{prefix}ragged.indices", torch.where(live, indices, -1), count, of, row)
