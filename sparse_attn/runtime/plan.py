"""How many bytes a model's caches and workspace take at given bounds: computed, not profiled."""

from __future__ import annotations

from dataclasses import asdict

from sparse_attn.pipeline import Bounds, CacheUse, cache_layouts, cache_uses, workspace_size
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.target import Target


def _cache(use: CacheUse) -> dict[str, object]:
    return {
        "layout": use.layout,
        "bytes_per_token_and_layer": use.bytes_per_token,
        "layers": use.layers,
        "bytes_per_token": use.bytes_per_token * use.layers,
        "bytes": use.nbytes,
    }


def plan(spec: Spec | CompressedSpec, bounds: Bounds, target: Target, kind: str) -> dict[str, object]:
    """Bytes of every kind of cache, with room for max_batch requests of max_model_len tokens, and of the workspace."""
    layouts = cache_layouts(spec, kind)
    uses = cache_uses(spec, layouts, bounds)
    total = sum(use.nbytes for use in uses)
    size = workspace_size(spec, bounds, target, layouts)
    return {
        "model": spec.name,
        "target": asdict(target),
        "bounds": asdict(bounds) | {"dtype": str(bounds.dtype).removeprefix("torch.")},
        "blocks": bounds.num_blocks,
        "caches": {use.kind: _cache(use) for use in uses},
        "cache_bytes": total,
        "workspace": {"scratch_bytes": size.nbytes, "counter_bytes": size.total - size.nbytes, "bytes": size.total},
        "bytes": total + size.total,
    }
