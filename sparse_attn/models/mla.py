"""Multi-head latent attention in its absorbed form, with the lightning indexer in front of it.

Absorbed: W_UK moves from the keys to the queries and W_UV from the values to the output, so every head attends to the
one cached row [latent, rotated key] of a token, and nothing is expanded per key.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sparse_attn import pipeline
from sparse_attn.framework import gradients
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.models.norms import layer_norm, linear_fp32, rms_norm
from sparse_attn.models.products import by_groups, product
from sparse_attn.models.step import ModelStep
from sparse_attn.ops.indexer.queries import hadamard_transform, indexer_q_rope_quant
from sparse_attn.ops.layers.rope import apply_rope
from sparse_attn.pipeline import Selection
from sparse_attn.pipeline.parallel.ranks import sum_over_ranks
from sparse_attn.spec import Spec

Params = dict[str, Any]  # tensors; a Weight where product() takes it


@no_autocast
def select(
    hidden: torch.Tensor,
    q_latent: torch.Tensor,
    params: Params,
    prefix: str,
    spec: Spec,
    cache: torch.Tensor,
    step: ModelStep,
) -> Selection:
    """Run a layer's indexer: cache this step's index keys, score, select. hidden [T, D], q_latent [T, q_lora]."""
    plan, layouts, options, mesh = step.plan, step.layouts, step.options, step.mesh
    index, rope = spec.index, params["rope"]
    keys = product(hidden, params[prefix + "k"], options)
    keys = layer_norm(keys, params[prefix + "k_norm"], params[prefix + "k_norm_bias"], index.norm_eps)
    keys = apply_rope(
        keys, plan.positions, rope, start=index.rope_start, interleaved=index.rope_interleaved, impl=options.impl
    )
    hadamard = layouts.hadamard(index)
    if hadamard:
        keys = hadamard_transform(keys)
    pipeline.write_index_keys(keys, cache, plan, layouts=layouts, impl=options.impl)
    query = indexer_q_rope_quant(
        torch.unflatten(product(q_latent, params[prefix + "q_b"], options), -1, (index.num_heads, index.head_dim)),
        linear_fp32(hidden, params[prefix + "weights"], options),
        plan.positions,
        rope,
        start=index.rope_start,
        interleaved=index.rope_interleaved,
        hadamard=hadamard,
        weight_scale=index.weight_scale,
        layout=layouts.index,
        impl=options.impl,
    )
    return pipeline.index_select(
        query,
        cache,
        plan,
        layouts=layouts,
        top_k=index.top_k,
        logits_bytes=options.logits_bytes,
        ranks=mesh.context,
        alike=mesh.tensor,
        impl=options.impl,
    )


@no_autocast
def attention(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: Spec,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor | None,
    selection: Selection | None,
    step: ModelStep,
) -> tuple[torch.Tensor, Selection]:
    """One layer's attention: hidden [T, D] -> [T, D], or this context rank's rows of it where the step's are sharded,
    and the selection it attended by. ``index_cache`` None: the layer has no indexer and attends by ``selection``."""
    plan, layouts, options, mesh = step.plan, step.layouts, step.options, step.mesh
    attn, rope = prefix + "attn.", params["rope"]
    q_latent = product(hidden, params[attn + "q_a"], options)
    q_latent = rms_norm(q_latent, params[attn + "q_a_norm"], spec.latent_norm_eps)
    if index_cache is not None:
        selection = select(hidden, q_latent, params, prefix + "index.", spec, index_cache, step)
    elif selection is None:
        raise ValueError("selection: got None, allowed: another layer's, where this one has no index_cache")
    latent, key_rope = product(hidden, params[attn + "kv_a"], options).split([spec.kv_lora, spec.rope_dim], dim=-1)
    latent = rms_norm(latent, params[attn + "kv_a_norm"], spec.latent_norm_eps)
    rotate = partial(apply_rope, start=0, interleaved=spec.rope_interleaved, impl=options.impl)
    key_rope = rotate(key_rope, plan.positions, rope)
    pipeline.write_latents(latent, key_rope, kv_cache, plan, layouts=layouts, impl=options.impl)

    heads = spec.num_heads // mesh.tensor.size
    q = torch.unflatten(product(q_latent, params[attn + "q_b"], options), -1, (heads, spec.qk_dim))
    q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
    q_rope = rotate(q_rope, plan.positions, rope)
    absorbed = by_groups(q_nope.transpose(0, 1), params[attn + "w_uk"].transpose(1, 2), options)  # [H, T, kv_lora]
    out = pipeline.attend(
        gradients.end(
            torch.cat([absorbed.transpose(0, 1), q_rope], dim=-1), "sparse_attn::write_kv_cache", latent, key_rope
        ),
        kv_cache,
        plan,
        selection,
        layouts=layouts,
        scale=spec.softmax_scale,
        d_v=spec.kv_lora,
        batch_invariant=options.batch_invariant,
        ranks=mesh.context,
        sharded=step.sharded,
        impl=options.impl,
    ).out
    values = by_groups(out.transpose(0, 1), params[attn + "w_uv"].transpose(1, 2), options)  # [H, T, v_dim]
    values = values.transpose(0, 1).flatten(1)
    return sum_over_ranks(product(values, params[attn + "o"], options), mesh.tensor), selection
