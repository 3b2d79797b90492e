"""Context parallelism: what a step is to a rank that holds a part of the paged caches.

Blocks of ``ranks.size * block_size`` positions are what a request owns, in the block table and in every plan that is
not of a rank; they have the same ids on all ranks. Of each such block a rank's caches hold ``block_size`` positions,
under the same id: those behind the first ``rank * block_size``. So one rank's part of a plan is arithmetic over it, and
nothing is exchanged to find it. Every rank computes every decode row. Prefill rows are sharded where a step has no
others: a rank computes what concerns a row alone for its own, and all rows' queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_attn.mesh import Ranks
from sparse_attn.pipeline.parallel.ranks import local_limits
from sparse_attn.types import CompressedPlan, StepPlan


def own_slots(slots: torch.Tensor, ranks: Ranks, *, block_size: int) -> torch.Tensor:
    """Slots of this rank's cache, of blocks of ``block_size`` rows, from slots of blocks ``ranks.size`` times as long;
    -1 for slots of other ranks and for what is negative."""
    if ranks.size == 1:
        return slots
    whole = block_size * ranks.size
    inside = slots % whole
    own = (slots >= 0) & (inside // block_size == ranks.rank)
    return torch.where(own, slots // whole * block_size + inside % block_size, -1)


def own_room(tokens: int, requests: int, ranks: Ranks, *, block_size: int) -> int:
    """The most positions that a rank holds of ``requests`` with ``tokens`` in all; the same on every rank."""
    return tokens if ranks.size == 1 else tokens // ranks.size + requests * block_size


def own_bound(tokens: int, ranks: Ranks, *, block_size: int) -> int:
    """The most positions that a rank holds of one request of ``tokens``."""
    if ranks.size == 1:
        return tokens
    whole = block_size * ranks.size
    return (tokens + whole - 1) // whole * block_size


def own_plan(plan: StepPlan, ranks: Ranks, *, block_size: int) -> StepPlan:
    """``plan``, of blocks of ranks.size * block_size positions, as this rank's caches are read and written: limits,
    slots, lengths, ranges and bounds count its own keys. Which rows there are, their requests, positions and blocks
    stays. block_size: of this rank's caches."""
    if ranks.size == 1:
        return plan
    ranges = _own_ranges(plan.limits, plan.request_ids, plan.kv_indptr, plan, ranks, block_size)
    return plan._replace(
        **ranges._asdict(),
        slot_mapping=own_slots(plan.slot_mapping, ranks, block_size=block_size),
        kv_capacity=own_room(plan.kv_capacity, plan.kv_indptr.shape[0] - 1, ranks, block_size=block_size),
        max_context=own_bound(plan.max_context, ranks, block_size=block_size),
    )


def own_entries(entries: CompressedPlan, plan: StepPlan, ranks: Ranks, *, block_size: int) -> CompressedPlan:
    """As own_plan, of entries. block_size: entries a block of this rank's caches holds; ``entries`` was built for
    ranks.size times as many. plan: of the whole step."""
    if ranks.size == 1:
        return entries
    ranges = _own_ranges(entries.limits, plan.request_ids, entries.kv_indptr, plan, ranks, block_size)
    return entries._replace(
        **ranges._asdict(),
        slot_mapping=own_slots(entries.slot_mapping, ranks, block_size=block_size),
        kv_capacity=own_room(entries.kv_capacity, entries.kv_indptr.shape[0] - 1, ranks, block_size=block_size),
        max_context=own_bound(entries.max_context, ranks, block_size=block_size),
    )


def shards_prefill(plan: StepPlan, ranks: Ranks) -> bool:
    """Whether a step's rows are sharded to ranks: several prefill rows, and no others."""
    return ranks.size > 1 and plan.context_lens.shape[0] == 0 and plan.positions.shape[0] > 1


def counts_window(plan: StepPlan, ranks: Ranks) -> torch.Tensor:
    """bool [tokens]: whether it is this rank that counts a row's window, which all ranks hold. Requests take turns."""
    return plan.request_ids % ranks.size == ranks.rank


class _Ranges(NamedTuple):
    """What StepPlan and CompressedPlan say of each row, of a rank's own keys."""

    limits: torch.Tensor
    context_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_start: torch.Tensor
    kv_end: torch.Tensor


def _own_ranges(
    limits: torch.Tensor,
    request_ids: torch.Tensor,
    kv_indptr: torch.Tensor,
    plan: StepPlan,
    ranks: Ranks,
    block_size: int,
) -> _Ranges:
    num_decodes, next_n = plan.context_lens.shape
    rows, prefills = num_decodes * next_n, kv_indptr.shape[0] - 1
    limits = local_limits(limits, ranks, block_size=block_size)
    lengths = local_limits(kv_indptr.diff(), ranks, block_size=block_size)
    indptr = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    place = request_ids[rows:].long() - num_decodes
    known = (place >= 0) & (place < prefills)
    start = torch.where(known, indptr[place.clamp(0, prefills)], 0)
    end = start + torch.where(known, limits[rows:], 0)
    return _Ranges(limits, limits[:rows].view(num_decodes, next_n), indptr, start, end)
