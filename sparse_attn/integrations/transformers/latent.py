"""Attention over latents: MLA in its absorbed form, on one cached row [latent, rotated key] per token."""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.framework.registration import followed
from sparse_attn.integrations.transformers.bounds import is_bounds
from sparse_attn.integrations.transformers.refusals import is_adapted, refuse
from sparse_attn.ops.attention.sparse import sparse_attn_prefill
from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense
from sparse_attn.types import Ragged

ROWS = 1024  # whose absorbed queries are held at once: 151 MB of V3.2's


class RowCache:
    """A cache of transformers whose keys are whole rows [latent, rotated key], and whose values are empty.

    A row takes the bytes that its two parts would take apart. Attention then reads the cache where it lies.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(self, latent: torch.Tensor, rope: torch.Tensor, layer: int, **others: Any):
        """(rows [batch, 1, keys, latent + rope], nothing of the same shape in front)."""
        rows = torch.cat([latent, rope], -1)
        return self.cache.update(rows, rows[..., :0], layer, **others)

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return self.cache.update_indexer(keys, layer)


def cached_rows(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of ``expand_kv``: rows for keys, nothing for values. Rows of a ``RowCache`` are whole already."""
    if rope.shape[-1] == 0:
        return latent, rope
    return torch.cat([latent, rope], -1), rope[..., :0]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of this implementation.

    query: [batch, heads, rows, nope + rope]. key: what ``cached_rows`` returned, [batch, 1, keys, latent + rope].
    indices: int32 [batch, rows, top_k], cache positions, -1 for none. s_aux: a sink per head, or None. Returns [batch,
    rows, heads, v], and no weights.
    """
    if not hasattr(module, "kv_b_proj"):
        refuse(
            "attn_implementation", f"sparse_attn for a {type(module).__name__}",
            'another one for what is no DSA layer, as in {"text_config": "sparse_attn", "vision_config": "sdpa"}',
        )  # fmt: skip
    if not is_bounds(attention_mask) or indices is None:
        refuse("attention_mask", "a mask that the caller has made", "a mask of 2 dimensions, or None")
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    weights = absorbed(module.kv_b_proj, heads, module.qk_nope_head_dim, module.v_head_dim, query.dtype)
    shift = torch.arange(batch, dtype=torch.int32, device=query.device) * keys
    shift, chosen = shift.repeat_interleave(rows), indices.flatten(0, 1)
    queries, sink = query.transpose(0, 1).flatten(1, 2), None if s_aux is None else s_aux.float()
    total = batch * rows
    # A loop over rows would be compiled for each length, and would add up a key's gradient in the dtype of keys.
    step = total if torch.compiler.is_compiling() or followed((key,), (0,)) else ROWS
    parts = []
    for start in range(0, total, max(step, 1)):
        part = slice(start, start + step)
        ragged = build_ragged_indices_from_dense(chosen[part], row_offsets=shift[part], num_rows=batch * keys)
        parts.append(_attend(queries[:, part], key.flatten(0, 2), weights, ragged, scaling, sink))
    return torch.unflatten(parts[0] if len(parts) == 1 else torch.cat(parts), 0, (batch, rows)), None


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    ragged: Ragged,
    scaling: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """[rows, heads, v] of queries [heads, rows, nope + rope] over rows [keys, latent + rope]."""
    to_key, to_value = weights
    nope, rope = queries.split([to_key.shape[1], queries.shape[2] - to_key.shape[1]], -1)
    queries = torch.cat([torch.bmm(nope, to_key), rope], -1).transpose(0, 1)
    out = sparse_attn_prefill(queries, keys, ragged, scale=scaling, d_v=to_key.shape[2], sink=sink).out
    return torch.bmm(out.transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1)


def absorbed(linear: Any, heads: int, nope: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b_proj as (keys [heads, nope, latent], values [heads, v, latent]): views of its weight.

    linear: what ``check_absorbable`` lets pass. Codes of an FP8Linear are multiplied by their scales for this call
    alone, and an adapter's weight is what it makes of each unit vector.
    """
    weight = linear.weight
    if is_adapted(linear):
        weight = linear(torch.eye(linear.in_features, dtype=dtype, device=weight.device)).T
    elif type(linear) is not torch.nn.Linear:
        weight = _dequantised(weight, linear.weight_scale_inv, linear.block_size, dtype)
    weight = torch.unflatten(weight, 0, (heads, nope + v))
    return weight[:, :nope], weight[:, nope:]


def _dequantised(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Codes [out, in] times the scales of their blocks; scales: one value, where ``block`` is None."""
    if codes.element_size() > 1 or block is None:
        return (codes.float() * scales.float()).to(dtype) if codes.element_size() == 1 else codes
    rows, columns = codes.shape
    wide = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (codes.float() * wide).to(dtype)
