"""The forward of DeepSeek-V3.2 and GLM-5 as a pure function of weights, tokens, caches and a step plan.

What tells the two models apart (dimensions, index rope pairing, shared index layers, yarn, expert groups) is in the
spec. Under torch.compile ``spec`` and ``layouts`` may reach the function in any way. Where they are globals or
attributes of an nn.Module (generation.model.Model), Dynamo treats their numbers as constants. Where they are arguments,
closed over or in a functools.partial, it treats them as symbols that guards hold to their values.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.cache import allocate_cache
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.checks import check_caches, check_params, check_plan, check_tokens
from sparse_attn.models.mla import Params, attention
from sparse_attn.models.moe import gated_mlp, moe
from sparse_attn.models.norms import rms_norm
from sparse_attn.models.step import ModelStep, options_of
from sparse_attn.models.vocabulary import embedding, token_logits
from sparse_attn.pipeline import LOGITS_BYTES, CacheLayouts, Selection, check_block_size
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.context import own_plan, shards_prefill
from sparse_attn.pipeline.parallel.ranks import own_rows, sum_over_ranks, whole_rows
from sparse_attn.spec import Spec
from sparse_attn.types import Caches, StepPlan


def forward(
    params: dict[str, torch.Tensor],
    spec: Spec,
    tokens: torch.Tensor,
    caches: Caches,
    plan: StepPlan,
    *,
    layouts: CacheLayouts,
    impl: str = "auto",
    logits_bytes: int = LOGITS_BYTES,
    prefill_activations: str = "exact",
    batch_invariant: bool = False,
    mesh: Mesh = ONE_RANK,
    keep_hidden: bool = False,
) -> Any:
    """Run one step and return fp32 logits [T, vocab]; the step's keys are written into ``caches``.

    Args:
        params: what checkpoints.load gives.
        spec: the whole model's.
        tokens: int64 or int32 [T], a row per row of ``plan``; padded rows hold any id in [0, vocab), their logits mean
            nothing.
        caches: one KV cache per layer, one index cache per layer that has an indexer.
        plan: of all context ranks: its blocks are mesh.context.size times as long as those of ``caches``.
        layouts: of the caches.
        impl: as every op takes it.
        logits_bytes: bound on the index scores held at a time.
        prefill_activations: "fp8" quantises what a step with prefill rows multiplies by packed weights but the head
            (ops.layers.products: W8A8, W4A8). Steps of decode rows alone are exact.
        batch_invariant: of attention (pipeline.attend) and of every product.
        mesh: the ranks that this process is one of; ``params`` are its share (checkpoints.sharding).
        keep_hidden: return (logits, the normed hidden states [T, D] they come from), which models.mtp takes.

    Returns:
        fp32 [T, vocab].

    Raises:
        TypeError, ValueError: caches, plan or options that do not fit; what the operators refuse.
    """
    options = Options(impl, logits_bytes, batch_invariant, prefill_activations)
    return run(params, spec, tokens, caches, plan, layouts, options, mesh=mesh, keep_hidden=keep_hidden)


@no_autocast
def run(
    params: Params,
    spec: Spec,
    tokens: torch.Tensor,
    caches: Caches,
    plan: StepPlan,
    layouts: CacheLayouts,
    options: Options,
    *,
    mesh: Mesh = ONE_RANK,
    keep_hidden: bool = False,
) -> Any:
    """As forward, which makes ``options`` of its keywords."""
    check_params(params, spec)
    check_tokens(tokens, plan)
    check_caches("caches.kv", caches.kv, [True] * spec.num_layers)
    check_caches("caches.index", caches.index, spec.index_layers)
    held, ranks = caches.kv[0], mesh.context.size
    check_plan(plan, held, held, block_size=held.shape[1] * ranks, ranks=ranks)
    plan = own_plan(plan, mesh.context, block_size=held.shape[1])
    rows, sharded = tokens.shape[0], shards_prefill(plan, mesh.context)
    step = ModelStep(plan, layouts, options_of(plan, options), mesh, sharded)
    hidden = embedding(own_rows(tokens, mesh.context) if sharded else tokens, params["embed"], mesh=mesh)
    selection = None
    for layer in range(spec.num_layers):
        hidden, selection = decoder_layer(hidden, params, f"layers.{layer}.", spec, layer, caches, selection, step)
    hidden = rms_norm(hidden, params["norm"], spec.rms_eps)
    if sharded:
        hidden = whole_rows(hidden, rows, mesh.context)
    head = params["embed" if spec.tie_embeddings else "lm_head"]
    logits = token_logits(hidden, head, spec.vocab_size, options, mesh=mesh)
    return (logits, hidden) if keep_hidden else logits


def decoder_layer(
    hidden: torch.Tensor,
    params: Params,
    prefix: str,
    spec: Spec,
    layer: int,
    caches: Caches,
    selection: Selection | None,
    step: ModelStep,
) -> tuple[torch.Tensor, Selection]:
    """One layer: hidden [T, D] -> [T, D], and the selection it attended by."""
    options, mesh = step.options, step.mesh
    normed = rms_norm(hidden, params[prefix + "input_norm"], spec.rms_eps)
    if step.sharded:
        normed = whole_rows(normed, step.plan.positions.shape[0], mesh.context)
    out, selection = attention(normed, params, prefix, spec, caches.kv[layer], caches.index[layer], selection, step)
    hidden = hidden + out
    normed = rms_norm(hidden, params[prefix + "post_norm"], spec.rms_eps)
    if spec.moe_layers[layer]:
        out = moe(normed, params, prefix + "moe.", spec.moe, mesh=mesh.for_rows(step.sharded), options=options)
        return hidden + out, selection
    dense = params[prefix + "mlp.gate_up"], params[prefix + "mlp.down"]
    return hidden + sum_over_ranks(gated_mlp(normed, *dense, options=options), mesh.tensor), selection


def allocate_caches(
    spec: Spec, layouts: CacheLayouts, num_blocks: int, block_size: int, device: torch.device | str
) -> Caches:
    """Zeroed caches for every layer, index caches for the layers that run an indexer.

    Args:
        spec: of the model.
        layouts: of the caches.
        num_blocks: of each cache.
        block_size: tokens of a block.
        device: of the caches.

    Returns:
        Caches.

    Raises:
        TypeError, ValueError: what allocate_cache refuses.
    """
    check_block_size(spec, block_size)
    return Caches(
        tuple(allocate_cache(layouts.kv, num_blocks, block_size, device) for _ in range(spec.num_layers)),
        tuple(
            allocate_cache(layouts.index, num_blocks, block_size, device) if own else None for own in spec.index_layers
        ),
    )
