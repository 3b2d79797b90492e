"""DeepSeek-V4: a window of raw keys and the entries that a compressor pools, under one softmax with a sink per head.

Projections, norms and rope are transformers' modules, and the states of compressors are its cache's. Entries follow
its rules: they are pooled by place in the cache, and a row sees those that its position has passed. Scores, selection
and attention are ours. Source: modeling_deepseek_v4.py of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparse_attn.integrations.transformers.bounds import is_bounds
from sparse_attn.integrations.transformers.indexer import select
from sparse_attn.integrations.transformers.refusals import refuse
from sparse_attn.layout import PLAIN_DTYPE, PlainLayout
from sparse_attn.ops.attention import sparse_attn_decode
from sparse_attn.ops.ragged import build_ragged_indices_from_dense
from sparse_attn.types import Ragged

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SELECTING = "compressed_sparse_attention"
POOLED_ROPE = "compress"
DTYPE_NAME = {dtype: name for name, dtype in PLAIN_DTYPE.items()}


def attention(
    module: Any,
    hidden: torch.Tensor,
    positions: dict[str, tuple[torch.Tensor, torch.Tensor]],
    at: torch.Tensor,
    bounds: torch.Tensor | None,
    cache: Any,
    rotate: Rotate,
) -> torch.Tensor:
    """One layer's attention, hidden [batch, rows, D] -> [batch, rows, D]. at: positions [batch or 1, rows]."""
    if not isinstance(bounds, torch.Tensor) or not is_bounds(bounds):
        refuse("attention_mask", "a mask that the caller has made", "a mask of 2 dimensions, or None")
    bounds = bounds.squeeze(1)
    if cache is None:
        _check_not_packed(at, bounds)
    cos, sin = positions[module.rope_layer_type]
    q_latent = module.q_a_norm(module.q_a_proj(hidden))
    query = torch.unflatten(module.q_b_proj(q_latent), -1, (-1, module.head_dim)).transpose(1, 2)
    query = rotate(module.q_b_norm(query), cos, sin).transpose(1, 2)  # [batch, rows, heads, dim]
    window = rotate(module.kv_norm(module.kv_proj(hidden)).unsqueeze(1), cos, sin)
    if cache is not None:
        window = cache.update(window, window, module.layer_idx)[0]
    layout = PlainLayout(DTYPE_NAME[window.dtype], module.head_dim)
    extra: dict[str, Any] = {}
    if module.compressor is not None:
        state = None if cache is None else cache.layers[module.layer_idx]
        entries = compress(module.compressor, hidden, state, "compressor", rotate)
        chosen = _chosen(module, hidden, q_latent, at.expand(hidden.shape[0], -1), state, entries.shape[1], rotate)
        if chosen is not None:
            listed = _ragged(chosen, entries.shape[1])
            extra = dict(extra_cache=entries.contiguous(), extra_ragged=listed, extra_layout=layout)
    keys = window.squeeze(1).contiguous()
    out = sparse_attn_decode(
        query.flatten(0, 1), keys, _ragged(_window(bounds, module.sliding_window), keys.shape[1]),
        scale=module.scaling, layout=layout, sink=module.sinks.float(), **extra,
    ).out  # fmt: skip
    out = torch.unflatten(out, 0, query.shape[:2]).transpose(1, 2)
    out = rotate(out, cos, -sin).transpose(1, 2)  # a value holds its key's rotation, which is taken back
    groups = torch.unflatten(out.flatten(2), -1, (module.config.o_groups, -1))
    return module.o_b_proj(module.o_a_proj(groups).flatten(2))


def compress(module: Any, hidden: torch.Tensor, state: Any, name: str, rotate: Rotate) -> torch.Tensor:
    """All entries so far [batch, entries, dim], those that this step completes among them. state: the cache's layer."""
    values, gates = module.kv_proj(hidden), module.gate_proj(hidden)
    ratio, dim, first = module.compress_rate, module.head_dim, 0
    if state is None:
        whole = values.shape[1] // ratio * ratio
        values, gates = values[:, :whole], gates[:, :whole]
    else:
        values, gates, first = state.store_compression_weights(name, values, gates)
    count = values.shape[1] // ratio
    entries = values[:, :0, :dim]
    if count:
        values, gates = (torch.unflatten(part, 1, (count, ratio)) for part in (values, gates))
        gates = gates + module.position_bias
        if values.shape[-1] == 2 * dim:
            before = (None, None) if state is None else state.update_overlap_state(name, values, gates, dim)
            values, gates = _overlapped(values, before[0], 0.0, dim), _overlapped(gates, before[1], -torch.inf, dim)
        weights = gates.softmax(2, dtype=torch.float32).to(values.dtype)
        entries = module.kv_norm((values * weights).sum(2))
        at = torch.arange(count, dtype=torch.int64, device=hidden.device) * ratio + first
        cos, sin = module.rotary_emb(entries, position_ids=at.expand(hidden.shape[0], -1), layer_type=POOLED_ROPE)
        entries = rotate(entries.unsqueeze(1), cos, sin).squeeze(1)
    return entries if state is None else state.update_compressor_states(name, entries)


def _overlapped(parts: torch.Tensor, before: torch.Tensor | None, empty: float, dim: int) -> torch.Tensor:
    """[batch, windows, 2 * ratio, dim]: the leading half of the window before, then the trailing half of the own."""
    lead = parts[:, :-1, :, :dim]
    last = torch.full_like(parts[:, :1, :, :dim], empty) if before is None else before.to(parts.dtype).unsqueeze(1)
    return torch.cat([torch.cat([last, lead], 1), parts[..., dim:]], 2)


def _chosen(
    module: Any, hidden: torch.Tensor, q_latent: torch.Tensor, at: torch.Tensor, state: Any, count: int, rotate: Rotate
) -> torch.Tensor | None:
    """Entries that each row attends to, int32 [batch, rows, n], -1 for none; None where there is no entry."""
    ratio = module.compressor.compress_rate
    limits = ((at + 1) // ratio).to(torch.int32)
    if module.layer_type != SELECTING:
        if not count:
            return None
        entries = torch.arange(count, dtype=torch.int32, device=hidden.device)
        if at.shape[1] == 1:  # transformers lets a single row see all entries, whatever its position
            return entries.expand(*at.shape, -1)
        return torch.where(entries < limits.unsqueeze(-1), entries, -1)
    scorer, index = module.compressor.indexer.scorer, module.compressor.indexer
    keys = compress(index, hidden, state, "indexer", rotate)
    if not count:
        return None
    cos, sin = index.rotary_emb(hidden, position_ids=at, layer_type=POOLED_ROPE)
    query = torch.unflatten(index.q_b_proj(q_latent), -1, (-1, index.head_dim)).transpose(1, 2)
    query = rotate(query, cos, sin).transpose(1, 2)
    weights = scorer.weights_proj(hidden).float() * (scorer.weights_scaling * scorer.softmax_scale)
    bounds = torch.stack([torch.zeros_like(limits), limits], -1)
    return select(query, weights, keys.contiguous(), bounds, index.index_topk)


def _window(bounds: torch.Tensor, window: int) -> torch.Tensor:
    """The keys of each row's range, int32 [batch, rows, window], -1 for none."""
    columns = bounds[..., :1] + torch.arange(window, dtype=torch.int32, device=bounds.device)
    return torch.where(columns < bounds[..., 1:], columns, -1)


def _ragged(chosen: torch.Tensor, keys: int) -> Ragged:
    """Slots of caches of one block of ``keys`` rows per sequence."""
    batch, rows, _ = chosen.shape
    shift = torch.arange(batch, dtype=torch.int32, device=chosen.device) * keys
    return build_ragged_indices_from_dense(
        chosen.flatten(0, 1), row_offsets=shift.repeat_interleave(rows), num_rows=batch * keys
    )


def _check_not_packed(at: torch.Tensor, bounds: torch.Tensor) -> None:
    """A position that falls from one token to the next begins another sequence."""
    if torch.compiler.is_compiling() or at.shape[1] == 1:
        return
    token = bounds[..., 0] < bounds[..., 1]
    if ((at.diff(dim=-1) < 0) & token[:, 1:] & token[:, :-1]).any():
        refuse("position_ids", "packed sequences", "one sequence a row")
