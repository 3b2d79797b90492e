"""The forward of DeepSeek-V4 as a pure function of weights, tokens, caches and a step plan.

How ``spec`` and ``layouts`` reach a compiled function: see models.deepseek_v32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sparse_attn.cache import allocate_cache, allocate_side_by_side, mark_cache
from sparse_attn.framework.autocast import no_autocast
from sparse_attn.layout import PlainLayout
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.checks import check_caches, check_params, check_plan, check_tokens
from sparse_attn.models.moe import moe
from sparse_attn.models.norms import linear_fp32, rms_norm
from sparse_attn.models.step import ModelStep, options_of
from sparse_attn.models.vocabulary import embedding, token_logits
from sparse_attn.models.windowed import Params, attention
from sparse_attn.ops.layers.hyper_connection import hyper_head, hyper_merge, hyper_mix
from sparse_attn.pipeline import LOGITS_BYTES, CacheLayouts, windowed
from sparse_attn.pipeline.layouts import check_block_size, state_ring, window_ring
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.context import shards_prefill
from sparse_attn.pipeline.parallel.ranks import own_rows, whole_rows
from sparse_attn.pipeline.windowed import Entries, WindowStep
from sparse_attn.spec import CompressedSpec
from sparse_attn.types import HyperMix, StepPlan, WindowCaches


def forward(
    params: dict[str, torch.Tensor],
    spec: CompressedSpec,
    tokens: torch.Tensor,
    caches: WindowCaches,
    plan: StepPlan,
    *,
    layouts: CacheLayouts,
    impl: str = "auto",
    logits_bytes: int = LOGITS_BYTES,
    prefill_in_place: bool = False,
    prefill_activations: str = "exact",
    batch_invariant: bool = False,
    mesh: Mesh = ONE_RANK,
    keep_hidden: bool = False,
) -> Any:
    """Run one step and return fp32 logits [T, vocab]; the step's keys and entries are written into ``caches``.

    Args:
        params: what checkpoints.load gives.
        spec: the whole model's.
        tokens: int64 or int32 [T], a row per row of ``plan``; padded rows hold any id in [0, vocab), their logits mean
            nothing.
        caches: what allocate_caches gives.
        plan: with a ring_table; of all context ranks: its blocks are mesh.context.size times as long as those of
            ``caches``.
        layouts: of the caches.
        impl: as every op takes it.
        logits_bytes: bound on the index scores held at a time.
        prefill_in_place: see pipeline.windowed.
        prefill_activations: as models.deepseek_v32.forward takes it.
        batch_invariant: of attention (pipeline.attend) and of every product (ops.layers.products).
        mesh: the ranks that this process is one of; ``params`` are its share (checkpoints.sharding). Rings and states
            are whole on every rank.
        keep_hidden: return (logits, the streams [T, streams, D] they come from), which models.mtp takes.

    Returns:
        fp32 [T, vocab].

    Raises:
        TypeError, ValueError: caches, plan or options that do not fit; what the operators refuse.
    """
    options = Options(impl, logits_bytes, batch_invariant, prefill_activations)
    return run(
        params, spec, tokens, caches, plan, layouts, options,
        prefill_in_place=prefill_in_place, mesh=mesh, keep_hidden=keep_hidden,
    )  # fmt: skip


@no_autocast
def run(
    params: Params,
    spec: CompressedSpec,
    tokens: torch.Tensor,
    caches: WindowCaches,
    plan: StepPlan,
    layouts: CacheLayouts,
    options: Options,
    *,
    prefill_in_place: bool = False,
    mesh: Mesh = ONE_RANK,
    keep_hidden: bool = False,
) -> Any:
    """As forward, which makes ``options`` of its keywords."""
    check_params(params, spec)
    _check(spec, tokens, caches, plan, mesh.context.size)
    rows, sharded = tokens.shape[0], shards_prefill(plan, mesh.context)
    step = ModelStep(plan, layouts, options_of(plan, options), mesh, sharded)
    windows, shared = step_windows(spec, caches, step, prefill_in_place=prefill_in_place)
    tokens = own_rows(tokens, mesh.context) if sharded else tokens
    streams = embedding(tokens, params["embed"], mesh=mesh).unsqueeze(1).repeat(1, spec.streams, 1)
    for layer in range(spec.num_layers):
        streams = decoder_layer(streams, tokens, params, f"layers.{layer}.", spec, layer, caches, step, windows, shared)
    if sharded:
        streams = whole_rows(streams, rows, mesh.context)
    logits = streams_logits(streams, params, "", spec, options, mesh=mesh)
    return (logits, streams) if keep_hidden else logits


def step_windows(
    spec: CompressedSpec, caches: WindowCaches, step: ModelStep, *, prefill_in_place: bool = False
) -> tuple[WindowStep, dict[str, Entries]]:
    """What a step's rows see, and the entries that layers without an indexer attend to, by kind of layer."""
    plan, impl, sizes = step.plan, step.options.impl, _entries_per_block(spec, caches)
    windows = windowed.plan_windows(
        plan, window=spec.window, ring=caches.kv[0].shape[1], entries_per_block=sizes,
        prefill_in_place=prefill_in_place, ranks=step.mesh.context, impl=impl,
    )  # fmt: skip
    shared = {}
    if "window" in spec.layer_kinds:
        shared["window"] = windowed.no_entries(plan, windows, window=spec.window, impl=impl)
    if "full" in spec.layer_kinds:
        ratio = spec.full_ratio
        shared["full"] = windowed.all_entries(
            plan, windows, ratio=ratio, window=spec.window, block_size=sizes[ratio], impl=impl
        )
    return windows, shared


def decoder_layer(
    streams: torch.Tensor,
    tokens: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    layer: int,
    caches: WindowCaches,
    step: ModelStep,
    windows: WindowStep,
    shared: dict[str, Entries],
) -> torch.Tensor:
    """One layer: streams [T, streams, D] -> the same shape. tokens [T], the rows of streams: for a layer whose experts
    go by them."""
    options, mesh = step.options, step.mesh
    mix = _mix(streams, params, prefix + "attn_hyper.", spec, options)
    normed = rms_norm(mix.collapsed, params[prefix + "input_norm"], spec.rms_eps)
    if step.sharded:
        normed = whole_rows(normed, step.plan.positions.shape[0], mesh.context)
    out = attention(normed, params, prefix, spec, layer, caches, step, windows, shared)
    streams = hyper_merge(out, streams, mix.post, mix.comb, impl=options.impl)
    mix = _mix(streams, params, prefix + "moe_hyper.", spec, options)
    normed = rms_norm(mix.collapsed, params[prefix + "post_norm"], spec.rms_eps)
    by_table = tokens if spec.hash_layers[layer] else None
    out = moe(normed, params, prefix + "moe.", spec.moe, by_table, mesh=mesh.for_rows(step.sharded), options=options)
    return hyper_merge(out, streams, mix.post, mix.comb, impl=options.impl)


def streams_logits(
    streams: torch.Tensor,
    params: Params,
    prefix: str,
    spec: CompressedSpec,
    options: Options,
    *,
    mesh: Mesh,
) -> torch.Tensor:
    """fp32 logits [T, vocab] of streams [T, streams, D], by the head and the norm whose names begin with ``prefix``."""
    hidden = hyper_head(
        streams, params[prefix + "head.fn"], params[prefix + "head.base"], params[prefix + "head.scale"],
        eps=spec.hyper_eps, norm_eps=spec.rms_eps, product=_product(options), impl=options.impl,
    )  # fmt: skip
    hidden = rms_norm(hidden, params[prefix + "norm"], spec.rms_eps)
    head = params["embed" if spec.tie_embeddings else "lm_head"]
    return token_logits(hidden, head, spec.vocab_size, options, mesh=mesh)


def allocate_caches(
    spec: CompressedSpec,
    layouts: CacheLayouts,
    num_blocks: int,
    block_size: int,
    device: torch.device | str,
    *,
    requests: int,
    step_rows: int,
    next_n: int = 1,
    rings_together: bool = False,
) -> WindowCaches:
    """Zeroed caches for every layer.

    Args:
        spec: of the model.
        layouts: of the caches.
        num_blocks: of the paged caches of entries.
        block_size: tokens that a block of them covers, a multiple of every ratio.
        device: of the caches.
        requests: how many rings there are.
        step_rows: most rows of one request in a step.
        next_n: most decode rows of one.
        rings_together: a request's rings of all layers are one piece of memory, see cache.allocate_side_by_side; but
            not where keys are plain rows, which kernels want block by block.

    Returns:
        WindowCaches.

    Raises:
        TypeError, ValueError: what allocate_cache refuses; a block that is no multiple of a ratio.
    """
    check_block_size(spec, block_size)
    ring = window_ring(spec, step_rows)

    def paged(kinds: tuple[str, ...], layout) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            allocate_cache(layout, num_blocks, block_size // spec.ratio(layer), device) if kind in kinds else None
            for layer, kind in enumerate(spec.layer_kinds)
        )

    def states(kinds: tuple[str, ...], dim: int) -> list[tuple[int, int] | None]:
        return [
            state_ring(spec, layer, dim, next_n) if kind in kinds else None
            for layer, kind in enumerate(spec.layer_kinds)
        ]

    state, index_state = states(("indexed", "full"), spec.head_dim), states(("indexed",), spec.index.head_dim)
    shapes = [shape for shape in state + index_state if shape is not None]
    if rings_together and not isinstance(layouts.kv, PlainLayout):
        keys = [(ring, layouts.kv.row, layouts.kv.dtype) for _ in spec.layer_kinds]
        made = allocate_side_by_side(keys + [(*shape, torch.float32) for shape in shapes], requests, device)
    else:
        made = [allocate_cache(layouts.kv, requests, ring, device) for _ in spec.layer_kinds]
        made += [mark_cache(torch.zeros(requests, *shape, dtype=torch.float32, device=device)) for shape in shapes]
    rings = iter(made)
    return WindowCaches(
        kv=tuple(next(rings) for _ in spec.layer_kinds),
        compressed=paged(("indexed", "full"), layouts.kv),
        index=paged(("indexed",), layouts.index),
        state=tuple(None if shape is None else next(rings) for shape in state),
        index_state=tuple(None if shape is None else next(rings) for shape in index_state),
    )


def _mix(streams: torch.Tensor, params: Params, prefix: str, spec: CompressedSpec, options: Options) -> HyperMix:
    return hyper_mix(
        streams, params[prefix + "fn"], params[prefix + "base"], params[prefix + "scale"],
        iterations=spec.sinkhorn_iterations, eps=spec.hyper_eps, norm_eps=spec.rms_eps,
        product=_product(options), impl=options.impl,
    )  # fmt: skip


def _product(options: Options) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """How streams are multiplied, for the operators that mix them."""
    return functools.partial(linear_fp32, options=options) if options.batch_invariant else F.linear


def _entries_per_block(spec: CompressedSpec, caches: WindowCaches) -> dict[int, int]:
    return {spec.ratio(layer): cache.shape[1] for layer, cache in enumerate(caches.compressed) if cache is not None}


def _check(spec: CompressedSpec, tokens: torch.Tensor, caches: WindowCaches, plan: StepPlan, ranks: int) -> None:
    check_tokens(tokens, plan)
    windowed.rings_of(plan)
    kinds = spec.layer_kinds
    compressed, indexed = [kind != "window" for kind in kinds], [kind == "indexed" for kind in kinds]
    for name, present in (("kv", [True] * len(kinds)), ("compressed", compressed), ("state", compressed),
                          ("index", indexed), ("index_state", indexed)):  # fmt: skip
        check_caches(f"caches.{name}", getattr(caches, name), present)
    if not torch.compiler.is_compiling():
        paged = {spec.ratio(layer): cache for layer, cache in enumerate(caches.compressed) if cache is not None}
        ratio = min(paged, default=1)
        size = paged[ratio].shape[1] * ranks if paged else 1
        check_plan(plan, caches.kv[0], paged.get(ratio), block_size=size, ratio=ratio)
