"""Attention over a window of raw keys and compressed entries, and the functions that write them.

A head's key is its value: one vector of head_dim per token (or entry), its last rope_dim values rotated. What was
rotated into the values is rotated back out of the output, at the query's position.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sparse_attn.framework import gradients
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.norms import linear_fp32, rms_norm, unit_rms
from sparse_attn.models.products import by_groups, product
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.layers.rope import apply_rope
from sparse_attn.pipeline import CacheLayouts, windowed
from sparse_attn.pipeline.parallel.ranks import own_rows, sum_over_ranks
from sparse_attn.pipeline.windowed import Entries, WindowStep
from sparse_attn.spec import CompressedSpec
from sparse_attn.types import StepPlan, WindowCaches

Params = dict[str, Any]  # tensors; a Weight where product() takes it


def held(caches: tuple[torch.Tensor | None, ...], layer: int) -> torch.Tensor:
    """The cache of a layer of a kind that has one."""
    cache = caches[layer]
    assert cache is not None
    return cache


@no_autocast
def compress(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: StepPlan,
    step: WindowStep,
    *,
    layout,
    hadamard: bool,
    batch_invariant: bool = False,
    impl: str,
) -> None:
    """Pool the step's tokens into entries of one of a layer's compressed caches: hidden [T, D]."""
    ratio, dim = spec.ratio(layer), params[prefix + "norm"].shape[0]
    product = linear_fp32(hidden, params[prefix + "kv_gate"], batch_invariant=batch_invariant, impl=impl)
    kv, gate = product.chunk(2, dim=-1)
    compress_and_cache(
        kv, gate, params[prefix + "position_bias"], params[prefix + "norm"], plan.positions, plan.request_ids,
        state, windowed.rings_of(plan), cache, step.compressed[ratio].slot_mapping, params["rope_compressed"],
        ratio=ratio, overlap=spec.layer_kinds[layer] == "indexed", eps=spec.rms_eps, rope_start=dim - spec.rope_dim,
        hadamard=hadamard, layout=layout, impl=impl,
    )  # fmt: skip


@no_autocast
def select(
    hidden: torch.Tensor,
    q_latent: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    caches: WindowCaches,
    plan: StepPlan,
    step: WindowStep,
    *,
    layouts: CacheLayouts,
    logits_bytes: int,
    activations: str = "exact",
    batch_invariant: bool = False,
    mesh: Mesh = ONE_RANK,
    impl: str,
) -> Entries:
    """Run a layer's indexer: pool this step's index keys, score, select. activations: of every packed product, see
    models.products.product."""
    index, cache = spec.index, held(caches.index, layer)
    options: dict[str, Any] = dict(batch_invariant=batch_invariant, impl=impl)
    compress(
        hidden, params, prefix, spec, layer, held(caches.index_state, layer), cache, plan, step,
        layout=layouts.index, hadamard=layouts.hadamard(index), **options,
    )  # fmt: skip
    queries = product(q_latent, params[prefix + "q_b"], activations=activations, **options)
    query = indexer_q_rope_quant(
        torch.unflatten(queries, -1, (index.num_heads, index.head_dim)),
        linear_fp32(hidden, params[prefix + "weights"], **options),
        plan.positions,
        params["rope_compressed"],
        start=index.rope_start,
        interleaved=index.rope_interleaved,
        hadamard=layouts.hadamard(index),
        weight_scale=index.weight_scale,
        layout=layouts.index,
        impl=impl,
    )
    return windowed.select_entries(
        query, cache, plan, step, ratio=spec.indexed_ratio, window=spec.window, layouts=layouts, top_k=index.top_k,
        logits_bytes=logits_bytes, ranks=mesh.context, alike=mesh.tensor, impl=impl,
    )  # fmt: skip


@no_autocast
def attention(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    caches: WindowCaches,
    plan: StepPlan,
    step: WindowStep,
    shared: dict[str, Entries],
    *,
    layouts: CacheLayouts,
    logits_bytes: int,
    activations: str = "exact",
    batch_invariant: bool = False,
    mesh: Mesh = ONE_RANK,
    dealt: bool = False,
    impl: str,
) -> torch.Tensor:
    """One layer's attention: hidden [T, D] -> [T, D]. shared: entries that all layers of a kind attend to, by kind.

    Compressors and the indexer are whole on every rank; tensor ranks may share its rows (pipeline.parallel.rows). They
    have groups of heads of their own, whose outputs they sum. Context ranks have entries of their own. dealt: return
    this context rank's rows alone (pipeline.parallel.ranks.own_rows). activations: of every packed product, see
    models.products.product.
    """
    attn, kind = prefix + "attn.", spec.layer_kinds[layer]
    rope = params["rope" if kind == "window" else "rope_compressed"]
    options: dict[str, Any] = dict(batch_invariant=batch_invariant, impl=impl)
    multiply = partial(product, activations=activations, **options)
    q_latent = rms_norm(multiply(hidden, params[attn + "q_a"]), params[attn + "q_a_norm"], spec.rms_eps)
    keys = rms_norm(multiply(hidden, params[attn + "kv"]), params[attn + "kv_norm"], spec.rms_eps)
    keys = apply_rope(keys, plan.positions, rope, start=spec.nope_dim, interleaved=True, impl=impl)
    windowed.write_window_keys(keys, caches.kv[layer], plan, layouts=layouts, impl=impl)
    if kind != "window":
        compress(
            hidden, params, prefix + "entry.", spec, layer, held(caches.state, layer), held(caches.compressed, layer),
            plan, step, layout=layouts.kv, hadamard=False, **options,
        )  # fmt: skip
    if kind == "indexed":
        entries = select(
            hidden, q_latent, params, prefix + "index.", spec, layer, caches, plan, step,
            layouts=layouts, logits_bytes=logits_bytes, mesh=mesh, activations=activations, **options,
        )  # fmt: skip
    else:
        entries = shared[kind]

    heads, groups = spec.num_heads // mesh.tensor.size, spec.o_groups // mesh.tensor.size
    q = torch.unflatten(multiply(q_latent, params[attn + "q_b"]), -1, (heads, spec.head_dim))
    q = unit_rms(q, spec.rms_eps, batch_invariant=batch_invariant)
    q = apply_rope(q, plan.positions, rope, start=spec.nope_dim, interleaved=True, impl=impl)
    q = gradients.end(q, "sparse_attn::write_kv_cache", keys)
    if kind != "window":
        pooled = [params[f"{prefix}entry.{name}"] for name in ("kv_gate", "position_bias", "norm")]
        q = gradients.end(q, "sparse_attn::compress_and_cache", *pooled)
    out = windowed.attend(
        q, caches.kv[layer], caches.compressed[layer], plan, step, entries,
        ratio=spec.ratio(layer), layouts=layouts, scale=spec.softmax_scale, sink=params[attn + "sink"],
        ranks=mesh.context, dealt=dealt, **options,
    ).out  # fmt: skip
    positions = own_rows(plan.positions, mesh.context) if dealt else plan.positions
    out = apply_rope(out, positions, rope, start=spec.nope_dim, interleaved=True, inverse=True, impl=impl)
    grouped = out.reshape(out.shape[0], groups, -1).transpose(0, 1)  # [groups, T, heads per group * head_dim]
    mixed = by_groups(grouped, params[attn + "o_a"], activations=activations, **options).transpose(0, 1)
    return sum_over_ranks(multiply(mixed.flatten(1), params[attn + "o_b"]), mesh.tensor)  # of [T, groups * o_lora]
