"""How many bytes a model takes at given bounds, by what takes them: computed, not profiled."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparse_attn.mesh import show_mesh
from sparse_attn.models.memory import activation_bytes, file_bytes, gathered_bytes, weight_bytes
from sparse_attn.models.share import DEALT, REPLICATED, share_of
from sparse_attn.pipeline import Bounds, CacheLayouts, CacheUse, cache_layouts, cache_uses, workspace_size
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.target import Target
from sparse_attn.workspace import WorkspaceSize

GPUS = (1, 2, 4, 8)
CARDS = {"h200": 141 * 10**9, "h100": 80 * 10**9, "mi300x": 192 * 10**9}  # bytes, as vendors name them


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
    form: str = "bf16", predicted: int = 0,
) -> dict[str, object]:  # fmt: skip
    """Bytes of the weights by kind; of every kind of cache, for max_batch requests of max_model_len tokens; of the
    workspace; of the keys gathered for a step; and at most of a step's activations (models.memory says how they are
    counted). Not counted are the driver's own bytes for each CUDA context, and what the allocator rounds up.

    form: of models.forms, that of the weights. predicted: layers of multi-token prediction. "gpus": the same for each
    of GPUS, as one of them holds it (models.share says what it holds), and the cards that this fits. Their workspace is
    counted for all heads.
    """
    layouts = cache_layouts(spec, kind, index_kind=index_kind)
    uses = cache_uses(spec, layouts, bounds)
    files = file_bytes(spec, form, predicted=predicted)
    size = workspace_size(spec, bounds, target, layouts)
    whole = _held(spec, spec, size, bounds, target, layouts, form, predicted)
    return {
        "model": spec.name,
        "format": form,
        "target": asdict(target),
        "bounds": asdict(bounds) | {"dtype": str(bounds.dtype).removeprefix("torch."), "mesh": show_mesh(bounds.mesh)},
        "blocks": bounds.num_blocks,
        "caches": {use.kind: _cache(use) for use in uses},
        "files": files,
        "file_bytes": sum(files.values()),
        **whole,
        "cards": CARDS,
        "sharding": {"dealt": DEALT, "replicated": REPLICATED},
        "gpus": [_rank(spec, gpus, size, bounds, target, layouts, form, predicted) for gpus in GPUS],
    }


def _held(
    spec: Spec | CompressedSpec, busiest: Spec | CompressedSpec, size: WorkspaceSize, bounds: Bounds, target: Target,
    layouts: CacheLayouts, form: str, predicted: int,
) -> dict[str, Any]:  # fmt: skip
    """What a GPU holds of ``spec``. busiest: the same where a token takes the most of its experts."""
    weights = weight_bytes(spec, bounds.dtype, form, predicted=predicted)
    found = {
        "weight_bytes": sum(weights.values()),
        "cache_bytes": sum(use.nbytes for use in cache_uses(spec, layouts, bounds)),
        "gathered_bytes": gathered_bytes(spec, bounds, layouts),
        "activation_bytes": activation_bytes(busiest, bounds, target),
    }
    return {
        "weights": weights,
        **found,
        "workspace": {"scratch_bytes": size.nbytes, "counter_bytes": size.total - size.nbytes, "bytes": size.total},
        "bytes": sum(found.values()) + size.total,
    }


def _rank(
    spec: Spec | CompressedSpec, gpus: int, size: WorkspaceSize, bounds: Bounds, target: Target, layouts: CacheLayouts,
    form: str, predicted: int,
) -> dict[str, object]:  # fmt: skip
    try:
        share, busiest = share_of(spec, gpus), share_of(spec, gpus, busiest=True)
    except ValueError as error:
        return {"gpus": gpus, "refused": str(error)}
    held = _held(share, busiest, size, bounds, target, layouts, form, predicted)
    return {"gpus": gpus, **held, "fits": {card: held["bytes"] <= most for card, most in CARDS.items()}}
