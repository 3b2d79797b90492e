"""What a batch of requests runs on: blocks, caches, decode state, and the workspace its steps need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sparse_attn import workspace
from sparse_attn.framework import checks
from sparse_attn.framework.target import Target, resolve_impl, target_of
from sparse_attn.framework.torch_private import mark_static_address
from sparse_attn.generation.blocks import BlockPool, BlockTables, Span, blocks_for, prefill_chunks
from sparse_attn.generation.model import AnyCaches, Model
from sparse_attn.generation.sampling import Draws
from sparse_attn.generation.steps import Decode, least_capacity
from sparse_attn.models.checks import check_params
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline import Bounds, CacheLayouts, check_block_size, default_block_size, workspace_size
from sparse_attn.pipeline.bounds import check_rank_scores, fitting_rows
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import Weight

# Inductor chooses nothing by timing and reuses no graph compiled for other sizes: either may change the order of sums.
REPEATABLE: dict[str, Any] = {"deterministic": True, "fx_graph_cache": False}


class Batch(NamedTuple):
    """chunks: the prefill steps, each a list of spans. max_context: tokens the longest request may hold."""

    tables: BlockTables
    caches: AnyCaches
    state: Decode
    chunks: list[list[Span]]
    max_context: int
    bounds: Bounds


def bounds_of(
    model: Model,
    *,
    max_batch: int,
    max_batched_tokens: int,
    max_model_len: int,
    next_n: int,
    block_size: int,
    kv_rows: int,
) -> Bounds:
    """Of the model's steps."""
    options = model.options
    return Bounds(
        max_batch, max_batched_tokens, max_model_len, next_n, block_size, kv_rows, options.logits_bytes,
        model.embed.dtype, prefill_activations=options.activations, batch_invariant=options.batch_invariant,
        mesh=model.mesh,
    )  # fmt: skip


def prepare(
    model: Model,
    lengths: Sequence[int],
    reach: Sequence[int],
    *,
    block_size: int | None,
    prefill_tokens: int,
    stop_ids: Sequence[int] = (),
    seeds: torch.Tensor | None = None,
    draws: Draws | None = None,
    next_n: int = 1,
) -> Batch:
    """What requests of ``lengths`` tokens need to grow to ``reach``, prefilled ``prefill_tokens`` a step.

    block_size: tokens a block of the paged caches covers on a context rank; None: what suits the model. The state
    expects the first token after every prompt. stop_ids, seeds, draws: of the state. next_n: rows that a request owns
    in a decode step. Rings are as long as these lengths need. Only the number of requests may be below 2: Dynamo takes
    sizes of 0 and 1 for constants.
    """
    device, count = model.device, len(lengths)
    block_size = default_block_size(model.spec) if block_size is None else block_size
    check_block_size(model.spec, block_size)
    checks.check_at_least("prefill_tokens", prefill_tokens, 1)
    block_size, prefill_tokens = int(block_size), int(prefill_tokens)
    sharded = block_size * model.mesh.context.size  # tokens of a block on all context ranks
    max_context = max(*reach, least_capacity(model, sharded))
    pool = BlockPool(max(2, sum(blocks_for(tokens, sharded) for tokens in reach)))
    tables = BlockTables(pool, count, max(2, blocks_for(max_context, sharded)), sharded)
    for request, tokens in enumerate(reach):
        tables.reserve(request, tokens)
    step = bounds_of(
        model, max_batch=count, max_batched_tokens=prefill_tokens, max_model_len=max_context, next_n=next_n,
        block_size=block_size, kv_rows=max(lengths) + prefill_tokens,
    )  # fmt: skip
    chunks = list(prefill_chunks(lengths, max(1, fitting_rows(model.spec, step))))
    longest = max(span.stop - span.start for spans in chunks for span in spans)
    caches = model.allocate_caches(
        pool.num_blocks, block_size, requests=count, step_rows=max(longest, next_n), next_n=next_n
    )
    state = Decode(
        tokens=torch.zeros(count, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([length + 1 for length in lengths], dtype=torch.int32, device=device),
        block_table=tables.table.to(device),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
        stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=device),
        ring_table=torch.arange(count, dtype=torch.int32, device=device).unsqueeze(1) if model.has_rings else None,
        seeds=None if seeds is None else seeds.to(device),
        draws=draws,
    )
    bounds = replace(
        step,
        max_batched_tokens=max(2, *(sum(span.stop - span.start for span in spans) for spans in chunks)),
        kv_rows=max(least_capacity(model, sharded), *(sum(span.stop for span in spans) for spans in chunks)),
    )
    check_rank_scores(model.spec, bounds)
    return Batch(tables, caches, state, chunks, max_context, bounds)


def compiled(model: torch.nn.Module, caches: AnyCaches) -> Any:
    """The model under torch.compile, for ``caches`` and others like them. The code follows from the
    sizes of the first call alone, so another process computes the same bits. model: a Model, or its Predictor.
    ValueError where it lacks a weight, which Dynamo's error would not name."""
    whole: Any = getattr(model, "model", model)
    predicts = whole is not model
    check_params(whole.params, prediction_spec(whole.spec) if predicts else whole.spec, predicts=predicts)
    for cache in (cache for layers in caches for cache in layers):
        if cache is not None:
            mark_static_address(cache)
    run: Any = torch.compile(model, fullgraph=True, dynamic=True, options=REPEATABLE)
    return run


def scratch_size(model: Model, bounds: Bounds) -> workspace.WorkspaceSize:
    """The workspace that the model's steps take, computed."""
    if resolve_impl(model.impl, model.device) == "reference":
        return workspace.WorkspaceSize(0, 0)
    return largest_scratch(
        model.spec, bounds, target_of(model.device), model.layouts, predicts=model.predicts, weights=model.params
    )  # fmt: skip


def largest_scratch(
    spec: Spec | CompressedSpec,
    bounds: Bounds,
    target: Target,
    layouts: CacheLayouts,
    *,
    predicts: bool,
    weights: Mapping[str, Weight],
) -> workspace.WorkspaceSize:
    """Of steps within ``bounds``. Where a request owns several rows, of steps of one row too: a layer of multi-token
    prediction takes them, and few rows are split more often. predicts: count those of such a layer."""
    sizes = [
        workspace_size(one, replace(bounds, next_n=rows), target, layouts, weights=weights)
        for one in ([spec, prediction_spec(spec)] if predicts else [spec])
        for rows in {1, bounds.next_n}
    ]
    return workspace.WorkspaceSize(*map(max, zip(*sizes)))


def locked_workspace(model: Model, bounds: Bounds) -> workspace.Workspace:
    """Scratch for every step within ``bounds``, computed and locked: a step that wanted more would be an error."""
    owner = workspace.Workspace(scratch_size(model, bounds), model.device)
    owner.lock()
    return owner
