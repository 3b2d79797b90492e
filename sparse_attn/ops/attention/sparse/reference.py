"""The oracle: gather the named rows, softmax in fp32, sum.

Rows are handled a few at a time so that the gathered keys stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sparse_attn.framework import debug
from sparse_attn.framework.lanes import by_rows
from sparse_attn.layout import parse_kv_layout, parse_layout
from sparse_attn.ops.attention.sparse.fake import WIDE, allocate_gradients

GATHERED_ELEMENTS = 1 << 24


class Keys(NamedTuple):
    """Rows to attend to: fetch(row ids, all valid) -> fp32 or float64 [n, d_qk], how many rows there are, and each
    token's ids, of which the first lengths[token] count."""

    fetch: Callable[[torch.Tensor], torch.Tensor]
    rows: int
    indices: torch.Tensor
    indptr: torch.Tensor
    lengths: torch.Tensor | None = None


def sparse_attn_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    scale: float,
    d_v: int,
    sink: torch.Tensor | None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = [Keys(lambda rows: kv[rows].to(WIDE.get(q.dtype, torch.float32)), kv.shape[0], indices, indptr)]
    return (_attend_alone if batch_invariant else _attend)(q, keys, scale, d_v, sink)[:2]


def sparse_attn_prefill_backward(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
    d_v: int,
    wants_q: bool,
    wants_kv: bool,
    wants_sink: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row of queries after the other, so that no bit of a row depends on those beside it."""
    wide, heads = lse.dtype, q.shape[1]
    dq, dkv, dsink = (one.zero_() for one in allocate_gradients(q, kv, sink, wants_q, wants_kv, wants_sink))
    dk = torch.zeros_like(dkv, dtype=wide)
    live = ~lse.isneginf()
    kept = torch.ones_like(lse) if sink is None else by_rows(torch.sigmoid, lse - sink[:heads])
    delta = torch.zeros_like(lse) if dout is None else (dout.to(wide) * out.to(wide)).sum(-1)
    delta = torch.where(live, delta, 0.0)
    if wants_sink:
        dsink[:heads] = -torch.where(live, (1 - kept) * delta, 0.0).sum(0)
    bounds = indptr.clamp(0, indices.numel()).tolist()
    for row in range(q.shape[0] if wants_q or wants_kv else 0):
        places = indices[bounds[row] : bounds[row + 1]].long()
        places = places[(places >= 0) & (places < kv.shape[0])]
        if not places.numel():
            continue
        keys, queries = kv[places].to(wide), q[row].to(wide)
        weights = softmax(queries @ keys.T * scale, -1)[0]
        dz = torch.zeros_like(weights) if dlse is None else weights * dlse[row].to(wide).unsqueeze(1)
        if dout is not None:
            given = dout[row].to(wide)
            counted = weights * kept[row].unsqueeze(1)
            dz = dz + counted * (given @ keys[:, :d_v].T - delta[row].unsqueeze(1))
        if wants_q:
            dq[row] = (dz @ keys * scale).to(q.dtype)
        if wants_kv:
            of_keys = dz.T @ queries * scale
            if dout is not None:
                of_keys[:, :d_v] += counted.T @ given
            _add_rows(dk, places, of_keys)
    return dq, dk.to(kv.dtype), dsink


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
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = [_cached_keys(cache, indices, indptr, layout, q.dtype)]
    if extra_cache is not None and extra_indices is not None and extra_indptr is not None:
        keys.append(_cached_keys(extra_cache, extra_indices, extra_indptr, extra_layout, q.dtype))
    return (_attend_alone if batch_invariant else _attend)(q, keys, scale, parse_kv_layout(layout).value_dim, sink)[:2]


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
    keys = [_cached_keys(cache, indices, indptr, layout, q.dtype, lengths)]
    if extra_cache is not None and extra_indices is not None and extra_indptr is not None:
        extra = extra_cache, extra_indices, extra_indptr, extra_layout
        keys.append(_cached_keys(*extra, q.dtype, extra_lengths))
    attend = _attend_alone if batch_invariant else _attend
    result, logs, largest = attend(q, keys, scale, parse_kv_layout(layout).value_dim, sink)
    out.copy_(result)
    lse.copy_(torch.where(logs.isneginf(), torch.inf, logs) if inf_lse else logs)
    if max_logits is not None:
        max_logits.copy_(largest)


def merge_attn_states(
    outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, lse = softmax(lses, 0)
    weights = weights.unsqueeze(-1)
    out = torch.where(weights == 0, 0.0, weights * outs.float()).sum(0)
    return apply_sink(out, lse, sink).to(outs.dtype), lse


def _add_rows(total: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """total[places] += rows, one after the other where a place stands more than once."""
    if total.device.type == "cpu":
        total.index_add_(0, places, rows)
    else:
        total.index_put_((places,), rows, accumulate=True)  # which sorts, and so is the same in every run


def softmax(scores: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, lse) of fp32 scores in natural log units; 0 and -inf where all scores are -inf, NaN where one is NaN or
    inf.

    A score beyond fp32 in base 2, in which kernels reckon, is infinite.
    """
    scores = torch.where((scores * math.log2(math.e)).isinf(), torch.inf * scores, scores)
    top = scores.amax(dim, keepdim=True)
    weights = torch.exp(scores - torch.where(top.isneginf(), 0.0, top))
    total = weights.sum(dim, keepdim=True)
    lse = torch.where(top.isneginf(), top, top + total.log()).squeeze(dim)
    return weights / torch.where(total == 0, 1.0, total), lse


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Scale fp32 ``out`` [tokens, heads, d_v] by exp(lse) / (exp(lse) + exp(sink))."""
    if sink is None:
        return out
    kept = by_rows(torch.sigmoid, lse - sink[: lse.shape[1]])
    return torch.where(lse.isneginf(), 0.0, kept).unsqueeze(-1) * out


def _cached_keys(
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
    lengths: torch.Tensor | None = None,
) -> Keys:
    if cache.dim() == 2:
        return Keys(lambda rows: cache[rows].to(dtype).float(), cache.shape[0], indices, indptr, lengths)
    kind = parse_layout(layout)
    slots = cache.shape[0] * cache.shape[1]
    return Keys(lambda rows: kind.decode(cache, rows).to(dtype).float(), slots, indices, indptr, lengths)


def _attend(
    q: torch.Tensor, keys: list[Keys], scale: float, d_v: int, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, max_logits)"""
    (tokens, heads, d_qk), wide = q.shape, WIDE.get(q.dtype, torch.float32)
    out = torch.zeros(tokens, heads, d_v, dtype=wide, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=wide, device=q.device)
    largest = lse.clone()
    widths = [_width(part) for part in keys]
    if sum(widths) == 0:
        return out.to(q.dtype), lse, largest
    step = max(1, GATHERED_ELEMENTS // (sum(widths) * d_qk))
    for first in range(0, tokens, step):
        chunk = slice(first, first + step)
        gathered = [_gather(part, chunk, width, d_qk, wide) for part, width in zip(keys, widths) if width]
        rows = torch.cat([row for row, _ in gathered], 1)
        valid = torch.cat([known for _, known in gathered], 1)
        scores = torch.einsum("thd,tkd->thk", q[chunk].to(wide), rows) * scale
        scores = torch.where(valid.unsqueeze(1), scores, -torch.inf)
        weights, lse[chunk] = softmax(scores, 2)
        largest[chunk] = torch.where(scores.isnan(), -torch.inf, scores).amax(2)
        out[chunk] = torch.einsum("thk,tkd->thd", weights, rows[..., :d_v])
    return apply_sink(out, lse, sink).to(q.dtype), lse, largest


def _attend_alone(
    q: torch.Tensor, keys: list[Keys], scale: float, d_v: int, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token by token. Together they are as wide as the widest, and sums of another width round otherwise."""
    parts = [
        _attend(q[token : token + 1], [_of_token(part, token) for part in keys], scale, d_v, sink)
        for token in range(q.shape[0])
    ]  # fmt: skip
    if not parts:
        return _attend(q, keys, scale, d_v, sink)
    outs, lses, largest = zip(*parts)
    return torch.cat(outs), torch.cat(lses), torch.cat(largest)


def _of_token(keys: Keys, token: int) -> Keys:
    lengths = None if keys.lengths is None else keys.lengths[token : token + 1]
    return keys._replace(indptr=keys.indptr[token : token + 2], lengths=lengths)


def _width(keys: Keys) -> int:
    """The most indices of a token."""
    if keys.indptr.numel() == 1 or keys.rows == 0:
        return 0
    return min(max(int(keys.indptr.long().diff().max()), 0), keys.indices.numel())


def _gather(keys: Keys, chunk: slice, width: int, d_qk: int, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``width`` rows that each token of a chunk names: ([tokens, width, d_qk], valid [tokens, width]).

    Rows that are not valid are 0.
    """
    capacity = keys.indices.numel()
    starts, ends = keys.indptr[:-1][chunk].long(), keys.indptr[1:][chunk].long().clamp_max(capacity)
    starts = starts.clamp_min(0)
    if keys.lengths is not None:
        ends = torch.minimum(ends, starts + keys.lengths[chunk].long().clamp_min(0))
    at = starts.unsqueeze(1) + torch.arange(width, device=starts.device)
    row = keys.indices[at.clamp_max(capacity - 1)].long()
    valid = (at < ends.unsqueeze(1)) & (row >= 0) & (row < keys.rows)
    rows = torch.zeros(*row.shape, d_qk, dtype=wide, device=row.device)
    rows[valid] = keys.fetch(row[valid])
    return rows, valid


# --- what debug mode asks of values


def rules_of_sparse_attn_prefill(
    kv: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, sink: torch.Tensor | None
) -> None:
    _rows("", indices, indptr, kv.shape[0], "rows of kv")
    debug.not_nan("sink", sink)


def rules_of_sparse_attn_prefill_backward(
    kv: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> None:
    rules_of_sparse_attn_prefill(kv, indices, indptr, sink)
    debug.refuse("lse", lse, lse.isposinf(), "what the forward gave")


def rules_of_sparse_attn_decode(
    cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    extra_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> None:
    _rows("", indices, indptr, cache.shape[0] * cache.shape[1], "slots of the cache")
    if extra_cache is not None and extra_indices is not None and extra_indptr is not None:
        slots = extra_cache.shape[0] * extra_cache.shape[1]
        _rows("extra_", extra_indices, extra_indptr, slots, "slots of the extra cache")
    debug.not_nan("sink", sink)


def rules_of_sparse_attn_into(
    indices: torch.Tensor,
    indptr: torch.Tensor,
    extra_indices: torch.Tensor | None,
    extra_indptr: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> None:
    """Indices are free: what lies outside of a cache names no key."""
    debug.indptr("ragged.indptr", indptr, indices.shape[0], "the capacity of indices")
    if extra_indices is not None and extra_indptr is not None:
        debug.indptr("extra_ragged.indptr", extra_indptr, extra_indices.shape[0], "the capacity of indices")
    debug.not_nan("sink", sink)


def rules_of_merge_attn_states(lses: torch.Tensor, sink: torch.Tensor | None) -> None:
    debug.refuse("lses", lses, lses.isnan() | lses.isposinf(), "numbers, and -inf for a state without keys")
    debug.not_nan("sink", sink)


def _rows(prefix: str, indices: torch.Tensor, indptr: torch.Tensor, count: int, of: str) -> None:
    """Rows within the indices, and every index that a row has within [0, count) or -1."""
    debug.indptr(f"{prefix}ragged.indptr", indptr, indices.shape[0], "the capacity of indices")
    at = torch.arange(indices.shape[0], device=indices.device)
    row = torch.searchsorted(indptr.long(), at, right=True) - 1
    live = (row >= 0) & (row < indptr.shape[0] - 1)
    debug.places(f"{prefix}ragged.indices", torch.where(live, indices, -1), count, of, row)
