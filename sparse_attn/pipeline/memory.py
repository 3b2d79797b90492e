"""How many bytes a model's caches take."""

from __future__ import annotations

from typing import NamedTuple

from sparse_attn.cache import block_bytes
from sparse_attn.layout import Layout
from sparse_attn.pipeline.bounds import Bounds
from sparse_attn.pipeline.layouts import CacheLayouts, check_block_size, state_ring, window_ring
from sparse_attn.spec import CompressedSpec, Spec

FP32_BYTES = 4


class CacheUse(NamedTuple):
    """One kind of cache. bytes_per_token: in one layer, for a token of a request or of its ring. layers: how many
    layers have such a cache. nbytes: of all layers at the bounds, with the space between blocks."""

    kind: str
    layout: str
    bytes_per_token: float
    layers: int
    nbytes: int


def cache_uses(spec: Spec | CompressedSpec, layouts: CacheLayouts, bounds: Bounds) -> list[CacheUse]:
    """Bytes of the caches of max_batch requests of max_model_len tokens. There are rings for at least one request."""
    check_block_size(spec, bounds.block_size)
    if isinstance(spec, CompressedSpec):
        return _windowed_uses(spec, layouts, bounds)
    return [
        _paged("kv", layouts.kv, spec.num_layers, 1, bounds),
        _paged("index", layouts.index, spec.num_index_layers, 1, bounds),
    ]


def cache_bytes(spec: Spec | CompressedSpec, layouts: CacheLayouts, bounds: Bounds) -> int:
    """Bytes of all caches together."""
    return sum(use.nbytes for use in cache_uses(spec, layouts, bounds))


def _windowed_uses(spec: CompressedSpec, layouts: CacheLayouts, bounds: Bounds) -> list[CacheUse]:
    requests = max(bounds.max_batch, 1)
    step_rows = min(bounds.max_batched_tokens, bounds.max_model_len)  # of one request
    ring = window_ring(spec, max(step_rows, bounds.next_n))
    row = layouts.kv.row * layouts.kv.dtype.itemsize
    uses = [
        CacheUse(
            "window", layouts.kv.name, row, spec.num_layers, requests * block_bytes(layouts.kv, ring) * spec.num_layers
        )
    ]
    for kind, ratio in (("indexed", spec.indexed_ratio), ("full", spec.full_ratio)):
        layers = spec.layer_kinds.count(kind)
        if not layers:
            continue
        uses.append(_paged(f"{kind} entries", layouts.kv, layers, ratio, bounds))
        dims = {"state": spec.head_dim}
        if kind == "indexed":
            uses.append(_paged("index", layouts.index, layers, ratio, bounds))
            dims["index state"] = spec.index.head_dim
        for name, dim in dims.items():
            tokens, width = state_ring(spec, spec.layer_kinds.index(kind), dim, bounds.next_n)
            state = FP32_BYTES * width
            uses.append(CacheUse(f"{kind} {name}", f"fp32/{width}", state, layers, requests * tokens * state * layers))
    return uses


def _paged(kind: str, layout: Layout, layers: int, ratio: int, bounds: Bounds) -> CacheUse:
    row = layout.row * layout.dtype.itemsize
    block = block_bytes(layout, bounds.block_size // ratio)
    return CacheUse(kind, layout.name, row / ratio if ratio > 1 else row, layers, block * layers * bounds.num_blocks)
