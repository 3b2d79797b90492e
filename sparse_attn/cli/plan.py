"""How many bytes a model takes at given bounds, by what takes them: computed, not profiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from sparse_attn.checkpoints.memory import (
    activation_bytes,
    file_bytes,
    gathered_bytes,
    packed_weights,
    prediction_bytes,
    weight_bytes,
)
from sparse_attn.checkpoints.sharding import REPLICATED, SHARDED, check_mesh
from sparse_attn.framework.target import Target
from sparse_attn.generation.batch import largest_scratch
from sparse_attn.mesh import Mesh, planned_mesh, show_mesh
from sparse_attn.models.exchange import drafting_bytes, drafting_calls, step_bytes, step_calls
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline import Bounds, CacheLayouts, CacheUse, cache_layouts, cache_uses
from sparse_attn.pipeline.bounds import fitting_rows
from sparse_attn.pipeline.parallel.experts import dispatch_bytes, way_of
from sparse_attn.pipeline.parallel.rows import sharded_bytes, shares_rows
from sparse_attn.pipeline.select import FP32_BYTES
from sparse_attn.roofline import LINK
from sparse_attn.spec import CompressedSpec, Spec

GPUS = (1, 2, 4, 8)  # up to those of a host
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
    form: str = "bf16", predicted: int = 0, meshes: Sequence[Mesh] = (), speculate: int = 0,
) -> dict[str, object]:  # fmt: skip
    """Bytes of the weights by kind; of every kind of cache, for max_batch requests of max_model_len tokens; of the
    workspace; of the keys gathered for a step; and at most of a step's activations (checkpoints.memory says how they
    are counted). Not counted are the driver's own bytes for each CUDA context, and what the allocator rounds up.

    form: of checkpoints.formats, that of the weights. predicted: layers of multi-token prediction that files hold. They
    are read, and one has caches, where ``speculate`` drafts are made a step; requests then own speculate + 1 rows.
    "gpus": the same for one rank of each of ``meshes`` (none: of tensor and expert ranks, GPUS each), what it sends in
    a decode step, and the cards that this fits. Of GPUS, a number that the model cannot be sharded over says so
    ("refused"). Bounds are those of a group of ranks that compute the same tokens. ValueError for drafts of files that
    hold no such layer, and for meshes that the model cannot be sharded over or that are more than a host has.
    """
    for mesh in meshes:
        if mesh.size > GPUS[-1]:
            raise ValueError(f"gpus: got {mesh.size}, allowed: at most {GPUS[-1]}, no model runs over several hosts")
    if speculate and not predicted:
        raise ValueError(f"speculate: got {speculate}, allowed: 0, {form} files of {spec.name} hold no layer to draft")
    if speculate:
        bounds = replace(bounds, next_n=speculate + 1)
    layouts = cache_layouts(spec, kind, index_kind=index_kind)
    uses = _caches(spec, layouts, bounds, speculate)
    files = file_bytes(spec, form, predicted=predicted)
    loaded = predicted if speculate else 0

    @functools.cache
    def held(bounds: Bounds) -> dict[str, Any]:
        return _held(spec, bounds, target, layouts, form, loaded)

    asked, meshes = bool(meshes), meshes or [planned_mesh(tensor=gpus, expert=gpus) for gpus in GPUS]
    return {
        "model": spec.name,
        "format": form,
        "target": asdict(target),
        "bounds": asdict(bounds) | {"dtype": str(bounds.dtype).removeprefix("torch."), "mesh": show_mesh(bounds.mesh)},
        "blocks": bounds.num_blocks,
        "caches": {use.kind: _cache(use) for use in uses},
        "files": files,
        "file_bytes": sum(files.values()),
        **held(bounds),
        "cards": CARDS,
        "sharding": {"dealt": SHARDED, "replicated": REPLICATED},
        "gpus": [_rank(spec, replace(bounds, mesh=mesh), held, loaded, asked) for mesh in meshes],
    }


def _caches(
    spec: Spec | CompressedSpec, layouts: CacheLayouts, bounds: Bounds, predicted: int
) -> list[CacheUse]:  # fmt: skip
    """By kind; those of a layer of multi-token prediction behind the others, where there is one."""
    uses = cache_uses(spec, layouts, bounds)
    if predicted:
        uses += [use._replace(kind=f"mtp {use.kind}") for use in cache_uses(prediction_spec(spec), layouts, bounds)]
    return uses


def _held(
    spec: Spec | CompressedSpec, bounds: Bounds, target: Target, layouts: CacheLayouts, form: str, predicted: int
) -> dict[str, Any]:
    """What a GPU holds, by bounds.mesh."""
    weights = weight_bytes(spec, bounds.dtype, form, predicted=predicted, mesh=bounds.mesh)
    packed = packed_weights(spec, form, predicted=predicted, mesh=bounds.mesh)
    gathered, activations = gathered_bytes(spec, bounds, layouts), activation_bytes(spec, bounds, target)
    size = largest_scratch(spec, bounds, target, layouts, predicts=predicted > 0, weights=packed)
    if predicted:
        gathered = max(gathered, gathered_bytes(prediction_spec(spec), bounds, layouts))
        activations = max(activations, prediction_bytes(spec, bounds, target))
    found = {
        "weight_bytes": sum(weights.values()),
        "cache_bytes": sum(use.nbytes for use in _caches(spec, layouts, bounds, predicted)),
        "gathered_bytes": gathered,
        "activation_bytes": activations,
    }
    return {
        "weights": weights,
        **found,
        "workspace": {"scratch_bytes": size.nbytes, "counter_bytes": size.total - size.nbytes, "bytes": size.total},
        "bytes": sum(found.values()) + size.total,
    }


def _rank(
    spec: Spec | CompressedSpec, bounds: Bounds, held_within: Callable[[Bounds], dict[str, Any]], predicted: int,
    asked: bool,
) -> dict[str, object]:  # fmt: skip
    """What a rank holds and sends, or why there is none; a ValueError where this mesh is ``asked`` for."""
    mesh = bounds.mesh
    named: dict[str, object] = {"gpus": mesh.size, "ranks": show_mesh(mesh)}
    if (rows := fitting_rows(spec, bounds)) < bounds.max_batched_tokens:
        named["max_batched_tokens"] = rows
        bounds = replace(bounds, max_batched_tokens=rows)
    try:
        check_mesh(spec, mesh)
        held = held_within(bounds)
    except ValueError as error:
        if asked:
            raise
        return named | {"refused": str(error)}
    sizes: dict[str, Any] = dict(max_context=bounds.max_model_len, block_size=bounds.block_size)
    sent = step_bytes(spec, mesh, bounds.max_batch * bounds.next_n, bounds.dtype, **sizes)
    calls = step_calls(spec, mesh, bounds.max_batch * bounds.next_n, **sizes)
    if predicted:
        drafting = drafting_bytes(spec, mesh, bounds.max_batch, bounds.next_n - 1, bounds.dtype, **sizes)
        sent = {name: nbytes + drafting[name] for name, nbytes in sent.items()}
        calls += drafting_calls(spec, mesh, bounds.max_batch, bounds.next_n - 1, **sizes)
    wire = {"collectives_per_step": calls, "collective_us_per_step": round(LINK.us(calls, sum(sent.values())), 1)}
    fits = {card: held["bytes"] <= most for card, most in CARDS.items()}
    ways = {"experts": _experts(spec, mesh, bounds), "indexer": _indexer(spec, mesh, bounds)}
    return named | held | {"collective_bytes_per_step": sent, **wire, **ways, "fits": fits}


def _indexer(spec: Spec | CompressedSpec, mesh: Mesh, bounds: Bounds) -> dict[str, object]:
    """Whether tensor ranks share a decode step's rows of the indexer or each score them all, and what a rank sends in a
    layer: for what is selected of shared rows, and what the scores of shared heads would take."""
    keys, _ = bounds.own_keys(spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1)
    rows, ranks = bounds.max_batch * bounds.next_n, mesh.tensor
    shared = bounds.max_batch > 1 and shares_rows(keys, ranks)
    summed = 2 * (ranks.size - 1) * rows * keys * FP32_BYTES // ranks.size
    sent = {"rows": sharded_bytes(rows, spec.index.top_k, ranks), "heads": summed}
    return {"way": "rows" if shared else "replicated", "bytes_per_layer": sent}


def _experts(spec: Spec | CompressedSpec, mesh: Mesh, bounds: Bounds) -> dict[str, object]:
    """How rows of a decode step come to their experts, and what a rank sends for them in a layer, each way."""
    rows = bounds.max_batch * bounds.next_n
    found: dict[str, object] = {"way": way_of(rows, mesh)}
    if mesh.expert_replicas > 1:
        sizes = rows, spec.hidden_size, spec.moe.experts_per_token, bounds.dtype.itemsize, mesh
        found["bytes_per_layer"] = {way: dispatch_bytes(*sizes, way) for way in ("exchange", "sum")}
    return found
