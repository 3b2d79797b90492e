"""What a model's steps never exceed, and from that, bytes: of caches and of the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparse_attn import checks, workspace
from sparse_attn.layout import LatentFp8Layout
from sparse_attn.ops.attention import config as attention_config
from sparse_attn.ops.index_topk import LOGITS_BYTES
from sparse_attn.ops.index_topk import config as index_topk_config
from sparse_attn.ops.ragged import config as ragged_config
from sparse_attn.pipeline.layouts import CacheLayouts, cache_layouts
from sparse_attn.spec import Spec
from sparse_attn.target import Target
from sparse_attn.workspace import Scratch, WorkspaceSize


@dataclass(frozen=True)
class Bounds:
    """What no step exceeds. max_batch: decode requests, of next_n rows each (0: no decodes). max_batched_tokens:
    prefill rows (0: no prefills). max_model_len: tokens of a request. kv_rows: keys gathered for a step's prefill
    requests, the plan's kv_capacity; None: max_model_len. logits_bytes: the budget given to the forward. dtype: the
    model's.
    """

    max_batch: int
    max_batched_tokens: int
    max_model_len: int
    next_n: int = 1
    block_size: int = 64
    kv_rows: int | None = None
    logits_bytes: int = LOGITS_BYTES
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        for name, least in (("max_batch", 0), ("max_batched_tokens", 0), ("max_model_len", 1), ("next_n", 1),
                            ("block_size", 1), ("logits_bytes", 0)):  # fmt: skip
            checks.check_at_least(name, getattr(self, name), least)
        if self.kv_rows is not None:
            checks.check_at_least("kv_rows", self.kv_rows, 0)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold max_batch requests of max_model_len tokens."""
        return self.max_batch * -(-self.max_model_len // self.block_size)


def workspace_size(spec: Spec, bounds: Bounds, target: Target, layouts: CacheLayouts | None = None) -> WorkspaceSize:
    """The scratch that any step within ``bounds`` takes on ``target``, exactly: what the largest op takes at its
    largest.

    layouts: the caches'; None: fp8. A pure function: nothing is run or measured. The reference takes none.
    """
    if target.vendor == "cpu" and not target.interpreted:
        return WorkspaceSize(0, 0)
    layouts = layouts or cache_layouts(spec, "fp8")
    return workspace.largest(workspace.size_of(scratch) for scratch in _scratches(spec, bounds, target, layouts))


def _scratches(spec: Spec, bounds: Bounds, target: Target, layouts: CacheLayouts) -> Iterator[Scratch]:
    """What the ops ask for, at every row count: few rows are split over more programs, so the most rows need not be
    most."""
    kv_rows = bounds.max_model_len if bounds.kv_rows is None else bounds.kv_rows
    fp8 = isinstance(layouts.kv, LatentFp8Layout)
    for most, group, width, decode in (
        (bounds.max_batch * bounds.next_n, bounds.next_n, bounds.max_model_len, True),
        (bounds.max_batched_tokens, 1, kv_rows, False),
    ):
        for rows in range(group, most + 1, group):
            yield ragged_config.scratch(rows, target)
            yield _attention_scratch(spec, rows, bounds.dtype, fp8 and decode, target)
            yield index_topk_config.scratch(rows, width, spec.index.top_k, bounds.logits_bytes, target, group)
        # A narrower call fits more rows into the budget, and so may leave less of it unused.
        for rows in range(group, most + 1, group):
            narrow = bounds.logits_bytes // (4 * rows) // 64 * 64
            if 0 < narrow < width:
                yield index_topk_config.scratch(most, narrow, spec.index.top_k, bounds.logits_bytes, target, group)


def _attention_scratch(spec: Spec, rows: int, dtype: torch.dtype, fp8: bool, target: Target) -> Scratch:
    launch = attention_config.config(
        rows, spec.num_heads, spec.latent_dim, rows * spec.index.top_k, dtype.itemsize, fp8, target
    )
    return attention_config.scratch(rows, spec.num_heads, spec.kv_lora, launch.splits)
