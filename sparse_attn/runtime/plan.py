"""How many bytes a model's caches and workspace take at given bounds: computed, not profiled."""

from __future__ import annotations

from dataclasses import asdict

from sparse_attn.layout import Layout
from sparse_attn.pipeline import Bounds, cache_bytes, cache_layouts, workspace_size
from sparse_attn.spec import Spec
from sparse_attn.target import Target


def _cache(layout: Layout, layers: int, bounds: Bounds) -> dict[str, object]:
    token = layout.row * layout.dtype.itemsize
    return {
        "layout": layout.name,
        "bytes_per_token_and_layer": token,
        "layers": layers,
        "bytes_per_token": token * layers,
        "bytes": token * layers * bounds.num_blocks * bounds.block_size,
    }


def plan(spec: Spec, bounds: Bounds, target: Target, kind: str) -> dict[str, object]:
    """Bytes of every kind of cache, with room for max_batch requests of max_model_len tokens, and of the workspace."""
    layouts = cache_layouts(spec, kind)
    caches = {
        "kv": _cache(layouts.kv, spec.num_layers, bounds),
        "index": _cache(layouts.index, spec.num_index_layers, bounds),
    }
    total = cache_bytes(spec, layouts, bounds.num_blocks, bounds.block_size)
    size = workspace_size(spec, bounds, target, layouts)
    return {
        "model": spec.name,
        "target": asdict(target),
        "bounds": asdict(bounds) | {"dtype": str(bounds.dtype).removeprefix("torch.")},
        "blocks": bounds.num_blocks,
        "caches": caches,
        "cache_bytes": total,
        "workspace": {"scratch_bytes": size.nbytes, "counter_bytes": size.total - size.nbytes, "bytes": size.total},
        "bytes": total + size.total,
    }
