"""DeepSeek-V4: a window of raw keys and the entries that a compressor pools, under one softmax with a sink per head.

Projections and norms are transformers' modules. Scores, selection and attention are ours, and rotations too, which
take fewer calls. Source: modeling_deepseek_v4.py of transformers 5.24.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sparse_attn.framework.registration import followed
from sparse_attn.integrations.transformers.bounds import is_bounds
from sparse_attn.integrations.transformers.indexer import select
from sparse_attn.integrations.transformers.refusals import check_replaced, refuse
from sparse_attn.integrations.transformers.replay import selected
from sparse_attn.integrations.transformers.states import (
    POOLED_ROPE,
    SELECTING,
    Fixed,
    Growing,
    State,
    Turn,
    normed,
    rotate,
    turn_of,
    written,
)
from sparse_attn.layout import PLAIN_DTYPE, PlainLayout
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense
from sparse_attn.ops.topk.fused import index_topk_decode
from sparse_attn.types import Ragged

ROWS = 1024  # whose queries are held at once: 67 MB of V4 Flash's, and twice as many in fp32 in their norm
DTYPE_NAME = {dtype: name for name, dtype in PLAIN_DTYPE.items()}


class Seen(NamedTuple):
    """What the rows of a step attend to, and what selects among it.

    keys: [batch, n, dim]. columns: int32 [batch, rows, window], of keys, -1 for none. entries: [batch, m, dim], or None
    where there are none. index_keys: [batch, m, index dim], or None where all entries are seen. limits: int32 [batch,
    rows], entries that a row sees or selects among. layer: that of a static cache, or None. There ``m`` is the same in
    every step. It is a constant of the kernel that packs slots, which would be compiled anew for each other one. A
    single row there has ``keys`` and ``entries`` in one cache, whose rows ``columns`` name.
    """

    keys: torch.Tensor
    columns: torch.Tensor
    entries: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    limits: torch.Tensor | None = None
    layer: Any = None

    def of(self, rows: slice) -> Seen:
        limits = None if self.limits is None else self.limits[:, rows]
        return self._replace(columns=self.columns[:, rows], limits=limits)


class Rows(NamedTuple):
    """Rows of a step: hidden states [batch, rows, D], latents of queries, and rotations of queries and index queries,
    over heads."""

    hidden: torch.Tensor
    q_latent: torch.Tensor
    turn: Turn
    index_turn: Turn

    def of(self, rows: slice) -> Rows:
        return Rows(self.hidden[:, rows], self.q_latent[:, rows], self.turn.of(rows), self.index_turn.of(rows))


def attention(
    module: Any,
    hidden: torch.Tensor,
    positions: dict[str, tuple[torch.Tensor, torch.Tensor]],
    at: torch.Tensor,
    bounds: torch.Tensor | None,
    cache: Any,
) -> torch.Tensor:
    """One layer's attention, hidden [batch, rows, D] -> [batch, rows, D]. at: positions [batch or 1, rows]."""
    if not isinstance(bounds, torch.Tensor) or not is_bounds(bounds):
        refuse("attention_mask", "a mask that the caller has made", "a mask of 2 dimensions, or None")
    bounds = bounds.squeeze(1)
    if cache is None:
        _check_not_packed(at, bounds)
    _check_replaced(module)
    state, batch, count = _state(module, cache), *hidden.shape[:2]
    turn = index_turn = turn_of(*positions[module.rope_layer_type])
    if module.layer_type == SELECTING and module.rope_layer_type != POOLED_ROPE:
        index_turn = turn_of(*positions[POOLED_ROPE])
    window = rotate(normed(module.kv_norm, module.kv_proj(hidden)), turn).unsqueeze(1)
    seen = _seen(module, hidden, window, at.expand(batch, -1), bounds, state)
    q_latent = written(normed(module.q_a_norm, module.q_a_proj(hidden)))
    rows = Rows(hidden, q_latent, turn.over_heads(), index_turn.over_heads())
    whole = torch.compiler.is_compiling() or followed((seen.keys, seen.entries), (0, 1))
    step = count if whole else max(1, ROWS // batch)
    if count <= step:
        out = _attend(module, rows, seen)
    else:
        parts = [slice(start, start + step) for start in range(0, count, step)]
        out = torch.cat([_attend(module, rows.of(part), seen.of(part)) for part in parts], 1)
    state.finish(count)
    return out


def _check_replaced(module: Any) -> None:
    """Of a layer's modules, refuse those that are not called where a call would do more."""
    # Of the module itself: Dynamo of torch 2.11 follows no import out of one that is loaded lazily.
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
        COMPRESSOR_CLASSES,
        DeepseekV4Indexer,
        DeepseekV4IndexerScorer,
        DeepseekV4RotaryEmbedding,
    )

    if module.compressor is None:
        return
    check_replaced("compressor", module.compressor, *filter(None, COMPRESSOR_CLASSES.values()))
    if module.layer_type == SELECTING:
        index = module.compressor.indexer
        check_replaced("compressor.indexer", index, DeepseekV4Indexer)
        check_replaced("compressor.indexer.scorer", index.scorer, DeepseekV4IndexerScorer)
        check_replaced("compressor.indexer.rotary_emb", index.rotary_emb, DeepseekV4RotaryEmbedding)


def _seen(
    module: Any, hidden: torch.Tensor, window: torch.Tensor, at: torch.Tensor, bounds: torch.Tensor, state: State
) -> Seen:
    keys, columns = state.window(window, _window(bounds, module.sliding_window))
    layer = state.layer if isinstance(state, Fixed) else None
    if module.compressor is None:
        return Seen(keys, columns, layer=layer)
    entries, selects = state.entries(module.compressor, hidden, "compressor"), module.layer_type == SELECTING
    index_keys = state.entries(module.compressor.indexer, hidden, "indexer").contiguous() if selects else None
    if not entries.shape[1]:
        return Seen(keys, columns, layer=layer)
    limits = state.limits(at, module.compressor.compress_rate, entries.shape[1], selects)
    return Seen(keys, columns, entries.contiguous(), index_keys, limits, layer)


def _attend(module: Any, rows: Rows, seen: Seen) -> torch.Tensor:
    query = torch.unflatten(module.q_b_proj(rows.q_latent), -1, (-1, module.head_dim))
    query = rotate(module.q_b_norm(query), rows.turn)  # [batch, rows, heads, dim]
    layout = PlainLayout(DTYPE_NAME[seen.keys.dtype], module.head_dim)
    if seen.layer is not None and query.shape[1] == 1:
        out = _attend_to_one_cache(module, query.squeeze(1), rows, seen, layout)
    else:
        out = _attend_to_two(module, query, rows, seen, layout)
    out = rotate(torch.unflatten(out, 0, query.shape[:2]), rows.turn.back())  # a value is a rotated key
    out = written(out.to(query.dtype))
    groups = torch.unflatten(out.flatten(2), -1, (module.config.o_groups, -1))
    return module.o_b_proj(module.o_a_proj(groups).flatten(2))


def _attend_to_two(module: Any, query: torch.Tensor, rows: Rows, seen: Seen, layout: PlainLayout) -> torch.Tensor:
    """[batch * rows, heads, dim] of queries [batch, rows, heads, dim]: window and entries under one softmax."""
    queries, sink, keys, entries = query.flatten(0, 1), module.sinks.float(), seen.keys, seen.entries
    listed, more = _ragged(seen.columns, keys.shape[1]), None if entries is None else _entries(module, rows, seen)
    if followed((query, keys, entries, sink), range(4)):  # attention in place has no gradient
        rows_of = None if entries is None else entries.flatten(0, 1)
        return sparse_attn_prefill(
            queries, keys.flatten(0, 1), listed, scale=module.scaling, d_v=module.head_dim, extra_kv=rows_of,
            extra_ragged=more, sink=sink,
        ).out  # fmt: skip
    return sparse_attn_decode(
        queries, keys, listed, scale=module.scaling, layout=layout, extra_cache=entries, extra_ragged=more,
        extra_layout=None if entries is None else layout, sink=sink,
    ).out  # fmt: skip


def _attend_to_one_cache(module: Any, query: torch.Tensor, rows: Rows, seen: Seen, layout: PlainLayout) -> torch.Tensor:
    """[batch, heads, dim] of single rows [batch, heads, dim], whose window and entries lie in one static cache."""
    chosen = [seen.columns] if seen.entries is None else [seen.columns, _chosen(module, rows, seen)]
    first = seen.layer.table.unsqueeze(1) * seen.keys.shape[1]
    listed = torch.cat([torch.where(part < 0, -1, part + first) for part in chosen], -1)
    (batch, heads, dim), sink, most = query.shape, module.sinks.float(), seen.layer.most_heads
    parts = heads // most if most and heads % most == 0 else 1
    ragged = Ragged(listed.expand(-1, parts, -1).flatten(), seen.layer.indptr[: batch * parts + 1])
    if parts == 1:
        return sparse_attn_decode(query, seen.keys, ragged, scale=module.scaling, layout=layout, sink=sink).out
    query = query.reshape(batch * parts, -1, dim)
    out, lse = sparse_attn_decode(query, seen.keys, ragged, scale=module.scaling, layout=layout)
    counted = torch.sigmoid(lse.reshape(batch, heads, 1) - sink.unsqueeze(-1))  # what a head's sink leaves of its sum
    return out.reshape(batch, heads, dim).float() * counted


def _state(module: Any, cache: Any) -> State:
    if cache is None:
        return Growing(cache, module.layer_idx)
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    if hasattr(layer, "pools"):
        return Fixed(layer)
    pools = module.compressor is None or hasattr(layer, "store_compression_weights")
    if layer is None or layer.is_compileable or not pools:
        refuse(
            "cache",
            "none of its layers" if layer is None else f"a layer {layer}, which has no room for entries",
            "DynamicCache(config=model.config), or bridge.static_cache(model, max_len)",
        )
    return Growing(cache, module.layer_idx)


def _entries(module: Any, rows: Rows, seen: Seen) -> Ragged:
    """Slots of the entries that each row attends to."""
    assert seen.entries is not None
    return _ragged(_chosen(module, rows, seen), seen.entries.shape[1])


def _chosen(module: Any, rows: Rows, seen: Seen) -> torch.Tensor:
    """The entries that each row attends to, int32 [batch, rows, n], -1 for none."""
    assert seen.entries is not None and seen.limits is not None
    room = seen.entries.shape[1] if seen.layer is None else seen.layer.room
    if seen.index_keys is None:
        entries = torch.arange(room, dtype=torch.int32, device=rows.hidden.device)
        return torch.where(entries < seen.limits.unsqueeze(-1), entries, -1)
    ranges = torch.stack([torch.zeros_like(seen.limits), seen.limits], -1)
    return selected(module.compressor.indexer, ranges, lambda: _best(module, rows, seen, ranges))


def _best(module: Any, rows: Rows, seen: Seen, ranges: torch.Tensor) -> torch.Tensor:
    """The entries that the indexer selects of each row's range, as ``_chosen``."""
    index, keys = module.compressor.indexer, seen.index_keys
    assert keys is not None and seen.limits is not None
    query = torch.unflatten(index.q_b_proj(rows.q_latent), -1, (-1, index.head_dim))
    query, scorer = rotate(query, rows.index_turn), index.scorer
    weights = scorer.weights_proj(rows.hidden).float() * (scorer.weights_scaling * scorer.softmax_scale)
    if query.shape[1] == 1 and seen.layer is not None:
        layout = PlainLayout(DTYPE_NAME[keys.dtype], index.head_dim)
        inputs = query, weights.flatten(0, 1), keys, seen.limits, seen.layer.table
        return index_topk_decode(*inputs, index.index_topk, seen.layer.room, layout).unsqueeze(1)
    return select(query, weights, keys, ranges, index.index_topk)


def _window(bounds: torch.Tensor, window: int) -> torch.Tensor:
    """The keys of each row's range, int32 [batch, rows, window], -1 for none."""
    columns = bounds[..., :1] + torch.arange(window, dtype=torch.int32, device=bounds.device)
    return torch.where(columns < bounds[..., 1:], columns, -1)


def _ragged(chosen: torch.Tensor, keys: int) -> Ragged:
    """Slots of caches of one block of ``keys`` rows per sequence, of int32 [batch, rows, n] in a block, -1 for none."""
    batch, rows, width = chosen.shape
    if batch == rows == 1:  # as it is: a reader skips what is -1
        indptr = torch.arange(0, 2 * width, width, dtype=torch.int32, device=chosen.device)
        return Ragged(chosen.flatten(), indptr)
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
