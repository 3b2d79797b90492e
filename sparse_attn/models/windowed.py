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
from sparse_attn.models.norms import linear_fp32, rms_norm, unit_rms
from sparse_attn.models.products import by_groups, product
from sparse_attn.models.step import ModelStep
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.indexer.queries import indexer_q_rope_quant
from sparse_attn.ops.layers.rope import apply_rope
from sparse_attn.pipeline import windowed
from sparse_attn.pipeline.parallel.ranks import own_rows, sum_over_ranks
from sparse_attn.pipeline.windowed import Entries, WindowStep
from sparse_attn.spec import CompressedSpec
from sparse_attn.types import WindowCaches

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
    step: ModelStep,
    windows: WindowStep,
    *,
    layout,
    hadamard: bool,
) -> None:
    """Pool the step's tokens into entries of one of a layer's compressed caches: hidden [T, D]."""
    plan, ratio, dim = step.plan, spec.ratio(layer), params[prefix + "norm"].shape[0]
    kv, gate = linear_fp32(hidden, params[prefix + "kv_gate"], step.options).chunk(2, dim=-1)
    compress_and_cache(
        kv, gate, params[prefix + "position_bias"], params[prefix + "norm"], plan.positions, plan.request_ids,
        state, windowed.rings_of(plan), cache, windows.compressed[ratio].slot_mapping, params["rope_compressed"],
        ratio=ratio, overlap=spec.layer_kinds[layer] == "indexed", eps=spec.rms_eps, rope_start=dim - spec.rope_dim,
        hadamard=hadamard, layout=layout, impl=step.options.impl,
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
    step: ModelStep,
    windows: WindowStep,
) -> Entries:
    """Run a layer's indexer: pool this step's index keys, score, select."""
    layouts, options, index, cache = step.layouts, step.options, spec.index, held(caches.index, layer)
    state, hadamard = held(caches.index_state, layer), layouts.hadamard(index)
    compress(hidden, params, prefix, spec, layer, state, cache, step, windows, layout=layouts.index, hadamard=hadamard)
    query = indexer_q_rope_quant(
        torch.unflatten(product(q_latent, params[prefix + "q_b"], options), -1, (index.num_heads, index.head_dim)),
        linear_fp32(hidden, params[prefix + "weights"], options),
        step.plan.positions,
        params["rope_compressed"],
        start=index.rope_start,
        interleaved=index.rope_interleaved,
        hadamard=hadamard,
        weight_scale=index.weight_scale,
        layout=layouts.index,
        impl=options.impl,
    )
    return windowed.select_entries(
        query,
        cache,
        step.plan,
        windows,
        ratio=spec.indexed_ratio,
        window=spec.window,
        layouts=layouts,
        top_k=index.top_k,
        logits_bytes=options.logits_bytes,
        ranks=step.mesh.context,
        alike=step.mesh.tensor,
        impl=options.impl,
    )


@no_autocast
def attention(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    caches: WindowCaches,
    step: ModelStep,
    windows: WindowStep,
    shared: dict[str, Entries],
) -> torch.Tensor:
    """One layer's attention: hidden [T, D] -> [T, D], or this context rank's rows of it where the step's are sharded.
    shared: entries that all layers of a kind attend to, by kind. Compressors are whole on every rank. Tensor ranks have
    groups of heads of their own, context ranks entries."""
    plan, layouts, options, mesh = step.plan, step.layouts, step.options, step.mesh
    attn, kind = prefix + "attn.", spec.layer_kinds[layer]
    rope = params["rope" if kind == "window" else "rope_compressed"]
    rotate = partial(apply_rope, start=spec.nope_dim, interleaved=True, impl=options.impl)
    q_latent = rms_norm(product(hidden, params[attn + "q_a"], options), params[attn + "q_a_norm"], spec.rms_eps)
    keys = rms_norm(product(hidden, params[attn + "kv"], options), params[attn + "kv_norm"], spec.rms_eps)
    keys = rotate(keys, plan.positions, rope)
    windowed.write_window_keys(keys, caches.kv[layer], plan, layouts=layouts, impl=options.impl)
    if kind != "window":
        compress(
            hidden, params, prefix + "entry.", spec, layer, held(caches.state, layer), held(caches.compressed, layer),
            step, windows, layout=layouts.kv, hadamard=False,
        )  # fmt: skip
    if kind == "indexed":
        entries = select(hidden, q_latent, params, prefix + "index.", spec, layer, caches, step, windows)
    else:
        entries = shared[kind]

    heads, groups = spec.num_heads // mesh.tensor.size, spec.o_groups // mesh.tensor.size
    q = torch.unflatten(product(q_latent, params[attn + "q_b"], options), -1, (heads, spec.head_dim))
    q = rotate(unit_rms(q, spec.rms_eps, options), plan.positions, rope)
    q = gradients.end(q, "sparse_attn::write_kv_cache", keys)
    if kind != "window":
        pooled = [params[f"{prefix}entry.{name}"] for name in ("kv_gate", "position_bias", "norm")]
        q = gradients.end(q, "sparse_attn::compress_and_cache", *pooled)
    out = windowed.attend(
        q,
        caches.kv[layer],
        caches.compressed[layer],
        plan,
        windows,
        entries,
        ratio=spec.ratio(layer),
        layouts=layouts,
        scale=spec.softmax_scale,
        sink=params[attn + "sink"],
        batch_invariant=options.batch_invariant,
        ranks=mesh.context,
        sharded=step.sharded,
        impl=options.impl,
    ).out
    positions = own_rows(plan.positions, mesh.context) if step.sharded else plan.positions
    out = rotate(out, positions, rope, inverse=True)
    grouped = out.reshape(out.shape[0], groups, -1).transpose(0, 1)  # [groups, T, heads per group * head_dim]
    mixed = by_groups(grouped, params[attn + "o_a"], options).transpose(0, 1)
    return sum_over_ranks(
        product(mixed.flatten(1), params[attn + "o_b"], options), mesh.tensor
    )  # of [T, groups * o_lora]
