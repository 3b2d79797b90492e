"""The lightning indexer of the MLA families: their projections, then scores and an exact top-k by this library.

Every family scores ``sum_h weight[h] * relu(q[h] . k)`` over one cached key per token. They differ in how queries and
keys are rotated, which is what ``Rotation`` says. Source: modeling_*.py of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparse_attn.integrations.transformers.replay import selected
from sparse_attn.ops.topk.fused import index_topk_prefill


class Rotation(NamedTuple):
    """How a family rotates index queries and keys: its own function, and whether the rotated part comes last."""

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    last: bool


def project(
    indexer: Any,
    hidden: torch.Tensor,
    q_source: torch.Tensor,
    positions: tuple,
    at: torch.Tensor | None,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries [batch, rows, heads, dim], keys [batch, rows, dim], weights fp32 [batch, rows, heads]) of a step."""
    queries = torch.unflatten(indexer.wq_b(q_source), -1, (indexer.n_heads, indexer.head_dim))
    if hasattr(indexer, "softmax_scaling"):
        queries = indexer.softmax_scaling(queries, at, head_dim_first=False)
    keys = indexer.wk(hidden)
    keys = indexer.k_norm(keys.to(indexer.k_norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    if getattr(indexer, "use_rope", True):
        rope, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
        sizes, place = ([rest, rope], 1) if rotation.last else ([rope, rest], 0)
        q_parts, k_parts = list(queries.split(sizes, -1)), list(keys.split(sizes, -1))
        q_parts[place], k_parts[place] = rotation.rotate(q_parts[place], k_parts[place], *positions, unsqueeze_dim=2)
        queries, keys = (torch.cat([part.to(hidden.dtype) for part in parts], -1) for parts in (q_parts, k_parts))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    return queries, keys.squeeze(2), weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def select(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, bounds: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The ``top_k`` best keys of each row's range, exactly.

    queries: [batch, rows, heads, dim]. weights: fp32 [batch, rows, heads]. keys: [batch, keys, dim], the cache as it
    lies. bounds: int32 [batch, rows, 2], see ``row_bounds``. Returns int32 [batch, rows, top_k]: cache positions,
    ascending, -1 behind.
    """
    batch, rows, length = *queries.shape[:2], keys.shape[1]
    first, end = bounds.unbind(-1)
    if rows == 1 or batch == 1:  # one call: scores of a few rows against the keys of every sequence are few
        shift = torch.arange(batch, dtype=torch.int32, device=keys.device)[:, None] * length
        chosen = index_topk_prefill(
            queries.flatten(0, 1), weights.flatten(0, 1), keys.flatten(0, 1), None,
            (first + shift).flatten(), (end + shift).flatten(), top_k,
        )  # fmt: skip
        chosen = torch.unflatten(chosen, 0, (batch, rows))
    else:
        chosen = torch.stack([
            index_topk_prefill(queries[b], weights[b], keys[b], None, first[b], end[b], top_k) for b in range(batch)
        ])  # fmt: skip
    return torch.where(chosen < 0, -1, chosen + first.unsqueeze(-1))


def run(
    indexer: Any,
    hidden: torch.Tensor,
    q_source: torch.Tensor,
    positions: tuple,
    bounds: torch.Tensor,
    at: torch.Tensor | None,
    cache: Any,
    rotation: Rotation,
) -> torch.Tensor:
    """In the place of a family's ``Indexer.forward``: int32 [batch, rows, index_topk], cache positions, -1 for none."""
    queries, keys, weights = project(indexer, hidden, q_source, positions, at, rotation)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    return selected(indexer, bounds, lambda: select(queries, weights, keys, bounds, indexer.index_topk))
