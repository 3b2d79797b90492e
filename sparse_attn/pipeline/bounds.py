"""Sizes that a model's steps never exceed, and the workspace that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparse_attn import workspace
from sparse_attn.framework import checks
from sparse_attn.framework.target import Target
from sparse_attn.layout import PLAIN_NAME, IndexLayout, LatentFp8Layout, PlainLayout
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.ops.attention.sparse import dispatch as attention
from sparse_attn.ops.attention.sparse.problem import KvLayout, Problem, packed_decode, packed_prefill
from sparse_attn.ops.indexer.scores import dispatch as scoring
from sparse_attn.ops.ragged.lists import config as ragged_config
from sparse_attn.ops.topk.fused import LOGITS_BYTES
from sparse_attn.ops.topk.fused import config as index_topk_config
from sparse_attn.ops.topk.fused.fake import ROW_ALIGNMENT
from sparse_attn.ops.topk.select import dispatch as selection
from sparse_attn.ops.topk.select.plan import Problem as SelectionProblem
from sparse_attn.pipeline.layouts import CacheLayouts, cache_layouts
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.context import own_bound, own_room
from sparse_attn.pipeline.parallel.experts import most_dispatched
from sparse_attn.pipeline.parallel.rows import shares_rows
from sparse_attn.pipeline.products import product_scratches
from sparse_attn.pipeline.select import FP32_BYTES, check_scores
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import Weight
from sparse_attn.workspace import Scratch, WorkspaceSize


@dataclass(frozen=True)
class Bounds:
    """Sizes that no step exceeds.

    Attributes:
        max_batch: decode requests, of next_n rows each (0: no decodes).
        max_batched_tokens: prefill rows (0: no prefills).
        max_model_len: tokens of a request.
        next_n: rows of a decode request.
        block_size: tokens a block of the paged caches covers on a rank.
        kv_rows: keys gathered for a step's prefill requests, the plan's kv_capacity; None: max_model_len.
        logits_bytes: the budget given to the forward.
        dtype: of the model.
        prefill_in_place: whether prefill rows attend in place (DeepSeek-V4).
        prefill_activations: what steps with prefill rows multiply by packed weights, "exact" or "fp8".
        batch_invariant: whether attention is batch-invariant. Then decode rows, however many, take scratch as rows of a
            small step do.
        mesh: the ranks that a process is one of; all sizes but block_size are the whole group's, and what follows from
            them is this process's share.

    Raises:
        TypeError: wrong types.
        ValueError: sizes out of range.
    """

    max_batch: int
    max_batched_tokens: int
    max_model_len: int
    next_n: int = 1
    block_size: int = 64
    kv_rows: int | None = None
    logits_bytes: int = LOGITS_BYTES
    dtype: torch.dtype = torch.bfloat16
    prefill_in_place: bool = False
    prefill_activations: str = "exact"
    batch_invariant: bool = False
    mesh: Mesh = ONE_RANK

    def __post_init__(self):
        for name, least in (("max_batch", 0), ("max_batched_tokens", 0), ("max_model_len", 1), ("next_n", 1),
                            ("block_size", 1)):  # fmt: skip
            checks.check_at_least(name, getattr(self, name), least)
        if self.kv_rows is not None:
            checks.check_at_least("kv_rows", self.kv_rows, 0)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"dtype: got {self.dtype!r}, allowed: a floating torch.dtype")
        checks.check_flag("prefill_in_place", self.prefill_in_place)
        self.options()  # which are checked as they are made

    def options(self) -> Options:
        """Of the steps."""
        return Options("auto", self.logits_bytes, self.batch_invariant, self.prefill_activations)

    @property
    def num_blocks(self) -> int:
        """Blocks of a rank that hold its part of max_batch requests of max_model_len tokens."""
        return self.max_batch * -(-self.max_model_len // (self.block_size * self.mesh.context.size))

    def own_keys(self, ratio: int = 1) -> tuple[int, int]:
        """(keys that a rank holds of one request, keys that it gathers for a step's prefill requests) at most. ratio:
        tokens that a key stands for."""
        kv_rows = self.max_model_len if self.kv_rows is None else self.kv_rows
        ranks, block_size = self.mesh.context, self.block_size // ratio
        requests = min(max(self.max_batch, 1), self.max_batched_tokens)
        return (
            own_bound(self.max_model_len // ratio, ranks, block_size=block_size),
            own_room(kv_rows // ratio, requests, ranks, block_size=block_size),
        )


def workspace_size(
    spec: Spec | CompressedSpec,
    bounds: Bounds,
    target: Target,
    layouts: CacheLayouts | None = None,
    *,
    weights: Mapping[str, Weight] | None = None,
) -> WorkspaceSize:
    """The scratch that any step within ``bounds`` takes on ``target``, exactly: the most that any op takes for any row
    count.

    A pure function: nothing is run or measured. The reference takes none.

    Args:
        spec: of the model.
        bounds: of the steps.
        target: where they run; see target_of.
        layouts: of the caches; None: fp8.
        weights: of a rank, by name, on any device, the meta device too; products with packed ones take scratch. None:
            none is packed.

    Returns:
        WorkspaceSize(nbytes, counters), which ``reserve`` takes.

    Raises:
        ValueError: scores of context ranks that exceed bounds.logits_bytes; what no kernel of the target runs.
    """
    if target.vendor == "cpu" and not target.interpreted:
        return WorkspaceSize(0, 0)
    layouts = layouts or cache_layouts(spec, "fp8")
    check_rank_scores(spec, bounds)
    compressed = isinstance(spec, CompressedSpec)
    parts = _windowed(spec, bounds, layouts) if compressed else _latent(spec, bounds, layouts)
    sizes = [workspace.size_of(scratch) for part in parts for scratch in _scratches(part, bounds, target)]
    of_experts = {name: weight for name, weight in (weights or {}).items() if ".moe." in name}  # shared ones, too
    others = {name: weight for name, weight in (weights or {}).items() if name not in of_experts}
    for decode, prefill, options in _steps(bounds):
        routed = most_dispatched(decode, prefill, bounds.mesh)
        for held, most in ((of_experts, routed), (others, decode + prefill)):
            routes = spec.moe.experts_per_token, spec.moe.num_experts
            found = product_scratches(held, *routes, most, target, dtype=bounds.dtype, options=options)
            sizes += map(workspace.size_of, found)
    return workspace.largest(sizes)


def _steps(bounds: Bounds) -> Iterator[tuple[int, int, Options]]:
    """(decode rows, prefill rows, options) of the largest step, for each kind of activations."""
    decode, prefill, options = bounds.max_batch * bounds.next_n, bounds.max_batched_tokens, bounds.options()
    if options == options.exact():
        yield decode, prefill, options
        return
    yield decode, 0, options.exact()
    if prefill:
        yield decode, prefill, options


def fitting_rows(spec: Spec | CompressedSpec, bounds: Bounds) -> int:
    """Prefill rows of a step: max_batched_tokens, or the fewer whose scores fit the budget of context ranks, which
    select all rows of a step together."""
    if bounds.mesh.context.size == 1 or (isinstance(spec, CompressedSpec) and "indexed" not in spec.layer_kinds):
        return bounds.max_batched_tokens
    _, gathered = bounds.own_keys(spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1)
    return min(bounds.max_batched_tokens, bounds.logits_bytes // (FP32_BYTES * max(gathered, 1)))


def check_rank_scores(spec: Spec | CompressedSpec, bounds: Bounds) -> None:
    """ValueError where the scores of decode rows, or of prefill rows, would exceed the budget of context ranks, which
    select all rows of a step together."""
    if bounds.mesh.context.size == 1 or (isinstance(spec, CompressedSpec) and "indexed" not in spec.layer_kinds):
        return
    keys, gathered = bounds.own_keys(spec.indexed_ratio if isinstance(spec, CompressedSpec) else 1)
    check_scores(bounds.max_batch * bounds.next_n, keys, 0, 0, bounds.logits_bytes)
    check_scores(0, 0, bounds.max_batched_tokens, gathered, bounds.logits_bytes)


def _own_scratch(rows: int, keys: int, top_k: int, logits_bytes: int, target: Target, group: int) -> Scratch:
    """Of rows over context ranks, each of which selects its own highest first. Ranks that count digits instead count in
    outputs, and take less. Scores are held in an output."""
    return selection.choose(SelectionProblem(rows, keys, top_k), target).plan.scratch if rows and keys else Scratch()


def _rank_scratch(
    rows: int, keys: int, top_k: int, logits_bytes: int, target: Target, group: int, *, heads: int, layout: IndexLayout
) -> Scratch:
    """Of the scores of prefill rows over context ranks."""
    return scoring.prefill_scratch(rows, keys, heads, layout, target)


@dataclass(frozen=True)
class _Part:
    """Decode rows, prefill rows, or both where they attend at once. select_scratch: gives the scratch of their
    selection. most: rows at most, in groups of ``group``. keys: index keys a row is scored against. attended: indices a
    row holds, for each kind of layer. layout: of the keys that attention reads. attention: makes attention's problem of
    such sizes."""

    select_scratch: Callable[..., Scratch]
    most: int
    group: int
    keys: int
    top_k: int
    heads: int
    attended: tuple[int, ...]
    layout: KvLayout
    attention: Callable[..., Problem]


def _latent(spec: Spec, bounds: Bounds, layouts: CacheLayouts) -> Iterator[_Part]:
    kv_rows = bounds.max_model_len if bounds.kv_rows is None else bounds.kv_rows
    shape = spec.index.top_k, spec.num_heads // bounds.mesh.tensor.size
    plain = PlainLayout(PLAIN_NAME[bounds.dtype], spec.kv_lora, spec.rope_dim)
    cached = layouts.kv if isinstance(layouts.kv, LatentFp8Layout) else plain
    decode_rows, next_n, attended = bounds.max_batch * bounds.next_n, bounds.next_n, (spec.index.top_k,)
    decode, prefill = (attended, cached, packed_decode), (attended, plain, packed_prefill)
    scored: dict[str, Any] = dict(heads=spec.index.num_heads, layout=layouts.index)
    if bounds.mesh.context.size > 1:
        own, gathered = bounds.own_keys()
        yield _Part(_own_scratch, decode_rows, next_n, own, *shape, *decode)
        yield _Part(_own_scratch, bounds.max_batched_tokens, 1, gathered, *shape, *prefill)
        yield _Part(partial(_rank_scratch, **scored), bounds.max_batched_tokens, 1, gathered, *shape, *prefill)
        return
    yield _Part(index_topk_config.slots_scratch, decode_rows, next_n, bounds.max_model_len, *shape, *decode)
    if shares_rows(bounds.max_model_len, bounds.mesh.tensor):
        yield _Part(index_topk_config.scratch, decode_rows, next_n, bounds.max_model_len, *shape, *decode)
    choosing = partial(index_topk_config.prefill_scratch, **scored)
    yield _Part(choosing, bounds.max_batched_tokens, 1, kv_rows, *shape, *prefill)


def _windowed(spec: CompressedSpec, bounds: Bounds, layouts: CacheLayouts) -> Iterator[_Part]:
    kv_rows = bounds.max_model_len if bounds.kv_rows is None else bounds.kv_rows
    whole = bounds.mesh.context.size == 1
    entries = {"window": 0, "indexed": spec.index.top_k, "full": 0}
    if "full" in spec.layer_kinds:
        entries["full"], _ = bounds.own_keys(spec.full_ratio)
    attended = tuple(spec.window + entries[kind] for kind in sorted(set(spec.layer_kinds)))
    shape = spec.index.top_k, spec.num_heads // bounds.mesh.tensor.size
    plain = PlainLayout(PLAIN_NAME[bounds.dtype], spec.head_dim)
    decode_keys, prefill_keys = (
        tokens // spec.indexed_ratio if "indexed" in spec.layer_kinds and whole else 0
        for tokens in (bounds.max_model_len, kv_rows)
    )
    cached = plain if isinstance(layouts.kv, PlainLayout) else layouts.kv
    decode_rows, next_n = bounds.max_batch * bounds.next_n, bounds.next_n
    prefill_rows, gathering = bounds.max_batched_tokens, () if bounds.prefill_in_place else attended
    decode, prefill = (attended, cached, packed_decode), (gathering, plain, packed_prefill)
    slots, positions = index_topk_config.slots_scratch, index_topk_config.scratch
    scored: dict[str, Any] = dict(heads=spec.index.num_heads, layout=layouts.index)
    choosing = partial(index_topk_config.prefill_scratch, **scored)
    if not whole:
        slots = positions = _own_scratch
        choosing = partial(_rank_scratch, **scored)
        if "indexed" in spec.layer_kinds:
            decode_keys, prefill_keys = bounds.own_keys(spec.indexed_ratio)
        yield _Part(_own_scratch, prefill_rows, 1, prefill_keys, *shape, *prefill)
    yield _Part(slots, decode_rows, next_n, decode_keys, *shape, *decode)
    if shares_rows(decode_keys, bounds.mesh.tensor):
        yield _Part(positions, decode_rows, next_n, decode_keys, *shape, *decode)
    yield _Part(choosing, prefill_rows, 1, prefill_keys, *shape, *prefill)
    if bounds.prefill_in_place:
        yield _Part(positions, decode_rows + prefill_rows, 1, 0, *shape, *decode)


def _scratches(part: _Part, bounds: Bounds, target: Target) -> Iterator[Scratch]:
    """The scratch that ops ask for, at every row count that may take the most. Few rows are split over more CTAs, so
    the largest count need not take the most."""
    for keys in sorted(part.attended)[-1:]:  # the most; fewer count as well
        sizes = part.most, part.heads, part.layout, part.most * keys, bounds.dtype, bounds.batch_invariant
        yield from attention.reserved(part.attention(*sizes), target, part.group)
    if not part.most:
        return
    yield ragged_config.scratch(part.most, target)
    how = part.top_k, bounds.logits_bytes, target, part.group
    for keys in index_topk_config.widths_of_most_scratch(part.keys):
        changing = index_topk_config.last_change(part.most, keys, *how)
        for rows in (*range(part.group, changing + 1, part.group), part.most):
            yield part.select_scratch(rows, keys, *how)
    for narrow in _narrower(part, bounds.logits_bytes):
        yield part.select_scratch(part.most, narrow, *how)


def _narrower(part: _Part, logits_bytes: int) -> Iterator[int]:
    """Widths below ``part.keys`` at which some number of rows fills the budget. A narrower call fits more rows into it,
    and so may leave less of it unused."""
    rows, line = part.group, 4 * ROW_ALIGNMENT
    while rows <= part.most and (lines := logits_bytes // (line * rows)):
        if lines * ROW_ALIGNMENT < part.keys:
            yield lines * ROW_ALIGNMENT
        rows = -(-(logits_bytes // (line * lines) + 1) // part.group) * part.group
