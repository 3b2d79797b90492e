"""Collectives of a decode step and the bytes that a rank sends in them, by shapes. They are taken for rings: 2 (size -
1) / size of what is summed, and size - 1 times what is gathered."""

from __future__ import annotations

import torch

from sparse_attn.mesh import Mesh, Ranks
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline.parallel.context import own_bound
from sparse_attn.pipeline.parallel.experts import dispatch_bytes, dispatch_calls
from sparse_attn.pipeline.parallel.ranks import exchanged_bytes, merged_bytes, merged_calls, selection_calls, shard_rows
from sparse_attn.pipeline.parallel.rows import sharded_bytes, shares_rows
from sparse_attn.spec import CompressedSpec, Spec


def step_bytes(
    spec: Spec | CompressedSpec, mesh: Mesh, rows: int, dtype: torch.dtype, *, max_context: int, block_size: int
) -> dict[str, int]:
    """Of a step of ``rows`` decode rows, by dimension: "tensor": embedding, heads, dense MLPs and logits, and what is
    selected where tensor ranks share the indexer's rows (taken for one a request). "experts": the sums of routed and
    shared experts, and the rows that data ranks send each other. "context": selections, and outputs to merge.
    max_context: tokens a request may hold. block_size: tokens a block of a rank's paged caches covers."""
    return _step_bytes(spec, mesh, rows, rows, dtype, max_context, block_size)


def drafting_bytes(
    spec: Spec | CompressedSpec, mesh: Mesh, requests: int, drafts: int, dtype: torch.dtype, *, max_context: int,
    block_size: int,
) -> dict[str, int]:  # fmt: skip
    """Beside step_bytes of ``requests`` * (drafts + 1) rows, where the layer of multi-token prediction drafts: it runs
    over these rows, then over one of each request for every draft behind the first."""
    one = prediction_spec(spec)
    parts = [
        _step_bytes(one, mesh, rows, requests, dtype, max_context, block_size) for rows in _drafting(requests, drafts)
    ]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def drafting_calls(
    spec: Spec | CompressedSpec, mesh: Mesh, requests: int, drafts: int, *, max_context: int, block_size: int
) -> int:
    """Collectives of what drafting_bytes counts the bytes of."""
    one, sizes = prediction_spec(spec), (max_context, block_size)
    return sum(_step_calls(one, mesh, rows, *sizes) for rows in _drafting(requests, drafts))


def _drafting(requests: int, drafts: int) -> list[int]:
    """Rows of each run of the layer."""
    return [requests * (drafts + 1)] + [requests] * (drafts - 1)


def _step_bytes(
    spec: Spec | CompressedSpec, mesh: Mesh, rows: int, drawn: int, dtype: torch.dtype, max_context: int,
    block_size: int,
) -> dict[str, int]:  # fmt: skip
    """drawn: rows that logits are made of."""
    value, hidden = dtype.itemsize, rows * spec.hidden_size * dtype.itemsize
    tensor, (sums, moe_layers) = mesh.tensor, _sums(spec)
    logits = drawn * -(-spec.vocab_size // tensor.size) * value
    return {
        "tensor": sums * _summed(hidden, tensor)
        + (tensor.size - 1) * logits
        + _selected(spec, mesh, rows, max_context, block_size),
        "experts": moe_layers * _routed(spec, mesh, rows, value),
        "context": _context(spec, mesh, rows, value, max_context, block_size),
    }


def step_calls(spec: Spec | CompressedSpec, mesh: Mesh, rows: int, *, max_context: int, block_size: int) -> int:
    """Collectives of what step_bytes counts the bytes of. Each takes some microseconds however few its bytes are
    (roofline.LINK)."""
    return _step_calls(spec, mesh, rows, max_context, block_size)


def _step_calls(spec: Spec | CompressedSpec, mesh: Mesh, rows: int, max_context: int, block_size: int) -> int:
    calls, (sums, moe_layers) = 0, _sums(spec)
    indexed, keys = _indexed(spec, mesh, max_context, block_size)
    if mesh.tensor.size > 1:
        calls += sums + 1 + (indexed if rows > 1 and shares_rows(keys, mesh.tensor) else 0)
    calls += moe_layers * (dispatch_calls(rows, mesh) if mesh.expert_replicas > 1 else int(mesh.expert_sum.size > 1))
    if mesh.context.size > 1:
        heads, _, merged = _outputs(spec, mesh)
        selecting = selection_calls(_scored(rows, keys, mesh), spec.index.top_k, mesh.context.size)
        calls += indexed * selecting + merged * merged_calls(rows, heads, mesh.context.size)
    return calls


def _sums(spec: Spec | CompressedSpec) -> tuple[int, int]:
    """(sums over tensor ranks: of the embedding, each layer's attention and dense MLPs; layers with routed experts)."""
    moe_layers = spec.num_layers if isinstance(spec, CompressedSpec) else sum(spec.moe_layers)
    return 1 + 2 * spec.num_layers - moe_layers, moe_layers


def _outputs(spec: Spec | CompressedSpec, mesh: Mesh) -> tuple[int, int, int]:
    """(heads of a rank, values of a head's output, layers whose outputs context ranks merge)."""
    heads = spec.num_heads // mesh.tensor.size
    if isinstance(spec, CompressedSpec):
        return heads, spec.head_dim, sum(kind != "window" for kind in spec.layer_kinds)
    return heads, spec.kv_lora, spec.num_layers


def _selected(spec: Spec | CompressedSpec, mesh: Mesh, rows: int, max_context: int, block_size: int) -> int:
    """What tensor ranks that share the indexer's rows gather."""
    indexed, keys = _indexed(spec, mesh, max_context, block_size)
    return indexed * sharded_bytes(rows, spec.index.top_k, mesh.tensor) if shares_rows(keys, mesh.tensor) else 0


def _indexed(spec: Spec | CompressedSpec, mesh: Mesh, max_context: int, block_size: int) -> tuple[int, int]:
    """Layers with an indexer, and the most of its keys that a rank holds of a request."""
    if isinstance(spec, CompressedSpec):
        indexed, ratio = spec.layer_kinds.count("indexed"), spec.indexed_ratio
    else:
        indexed, ratio = spec.num_index_layers, 1
    return indexed, own_bound(max_context // ratio, mesh.context, block_size=block_size // ratio)


def _routed(spec: Spec | CompressedSpec, mesh: Mesh, rows: int, value: int) -> int:
    if mesh.expert_replicas > 1:
        return dispatch_bytes(rows, spec.hidden_size, spec.moe.experts_per_token, value, mesh)
    return _summed(rows * spec.hidden_size * value, mesh.expert_sum)


def _summed(nbytes: int, ranks: Ranks) -> int:
    return 2 * (ranks.size - 1) * nbytes // ranks.size


def _context(
    spec: Spec | CompressedSpec, mesh: Mesh, rows: int, value: int, max_context: int, block_size: int
) -> int:  # fmt: skip
    ranks = mesh.context
    if ranks.size == 1:
        return 0
    heads, width, merged = _outputs(spec, mesh)
    ratio = spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1
    indexed, keys = _indexed(spec, mesh, max_context, block_size)
    scored = _scored(rows, keys, mesh)
    chosen = exchanged_bytes(scored, keys, ranks.size, k=spec.index.top_k, block_size=block_size // ratio)
    return indexed * chosen + merged * merged_bytes(rows, heads, width, value, ranks.size)


def _scored(rows: int, keys: int, mesh: Mesh) -> int:
    """Rows that a rank's indexer scores."""
    return shard_rows(rows, mesh.tensor) if rows > 1 and shares_rows(keys, mesh.tensor) else rows
