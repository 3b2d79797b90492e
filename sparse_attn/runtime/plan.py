"""How many bytes a model takes at given bounds, by what takes them: computed, not profiled."""

from __future__ import annotations

from dataclasses import asdict

from sparse_attn.models.memory import activation_bytes, gathered_bytes, weight_bytes
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


def plan(
    spec: Spec | CompressedSpec, bounds: Bounds, target: Target, kind: str, index_kind: str | None = None,
    form: str = "bf16",
) -> dict[str, object]:  # fmt: skip
    """Bytes of the weights by kind, packed as files of a published form have them; of every kind of cache, for
    max_batch requests of max_model_len tokens; of the workspace; of the keys gathered for a step; and at most of a
    step's activations (models.memory says how they are counted). Not counted are the driver's own bytes for each CUDA
    context, and what the allocator rounds up."""
    layouts = cache_layouts(spec, kind, index_kind=index_kind)
    uses = cache_uses(spec, layouts, bounds)
    caches = sum(use.nbytes for use in uses)
    size = workspace_size(spec, bounds, target, layouts)
    weights = weight_bytes(spec, bounds.dtype, form)
    step = {
        "gathered_bytes": gathered_bytes(spec, bounds, layouts),
        "activation_bytes": activation_bytes(spec, bounds, target),
    }
    return {
        "model": spec.name,
        "format": form,
        "target": asdict(target),
        "bounds": asdict(bounds) | {"dtype": str(bounds.dtype).removeprefix("torch.")},
        "blocks": bounds.num_blocks,
        "caches": {use.kind: _cache(use) for use in uses},
        "cache_bytes": caches,
        "weights": weights,
        "weight_bytes": sum(weights.values()),
        "workspace": {"scratch_bytes": size.nbytes, "counter_bytes": size.total - size.nbytes, "bytes": size.total},
        **step,
        "bytes": sum(weights.values()) + caches + size.total + sum(step.values()),
    }
