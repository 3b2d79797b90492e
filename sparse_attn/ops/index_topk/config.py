"""Scratch of the fused score and select: the logits of some rows, and what selecting and packing them takes."""

from __future__ import annotations

import torch

from sparse_attn.ops.index_topk.shapes import padded, rows_at_once
from sparse_attn.ops.ragged import config as ragged
from sparse_attn.ops.ragged.reference import MOST_ROWS
from sparse_attn.ops.topk import config as selection
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

# Bytes for candidates, a little below 16 MiB: with fewer columns more rows are held at once, which must not take more.
ROOM = (16 << 20) - (1 << 16)
MOST_GROUPED = selection.GROUP * selection.HELD  # columns, beyond which a decode selection takes less beside its logits


def scratch(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> Scratch:
    """rows: query rows, ``group`` of which stay together (next_n); width: keys a row may see (capacity or bound)."""
    if rows == 0 or width == 0:
        return Scratch()
    some = rows_at_once(rows, width, logits_bytes, group)
    return scratch_of(some, width, select_config(some, width, top_k, target))


def select_config(rows: int, width: int, top_k: int, target: Target) -> selection.TopkConfig:
    """How ``rows`` held at once are selected."""
    return selection.config(rows, width, top_k, target, ROOM)


def decode_config(rows: int, width: int, top_k: int, target: Target) -> selection.TopkConfig:
    """The same of index_topk_decode, whose scores come with the highest of every group where that is of use."""
    return selection.grouped(rows, width, top_k, target) or select_config(rows, width, top_k, target)


def last_change(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> int:
    """How many of ``rows`` there are beyond which one more never takes less scratch."""
    if rows == 0 or width == 0:
        return 0
    some = rows_at_once(rows, width, logits_bytes, group)
    staged = select_config(some, width, top_k, target).staged
    return min(some, selection.MOST_STAGED if staged else selection.STAGED * target.num_sms)


def scratch_of(rows: int, width: int, select: selection.TopkConfig) -> Scratch:
    """The same for ``rows`` held at once."""
    chosen = selection.scratch_of(select, width)
    return Scratch((Buffer("logits", (rows, padded(width)), torch.float32), *chosen.buffers), chosen.counters)


def slots_scratch(rows: int, width: int, top_k: int, logits_bytes: int, target: Target, group: int = 1) -> Scratch:
    """Of index_topk_decode_slots."""
    if rows == 0 or width == 0:
        return Scratch()
    some = rows_at_once(rows, width, logits_bytes, group)
    return slots_scratch_of(some, width, decode_config(some, width, top_k, target), rows, target)


def slots_scratch_of(step: int, width: int, select: selection.TopkConfig, rows: int, target: Target) -> Scratch:
    """The same for ``step`` of the rows held at once."""
    chosen, packed = scratch_of(step, width, select), ragged.scratch(rows, target)
    return Scratch(chosen.buffers, chosen.counters + packed.counters)


def packs_blocks(num_blocks: int, block_size: int) -> bool:
    """Whether what selects can map columns to slots: 32 side by side lie in one block, and every slot is one."""
    return block_size % selection.WORD == 0 and num_blocks * block_size <= MOST_ROWS
