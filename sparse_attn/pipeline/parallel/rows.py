"""Rows of the indexer, sharded to ranks that hold the same index keys.

Tensor ranks hold whole index caches. Cutting index heads would leave each of them all keys to read, and partial scores
to add up: more bytes on the wire than scores are. A rank scores and selects its share of the rows instead, with all
heads, and the ranks gather what was selected: an integer for each key, the same bits as one process selects.
"""

from __future__ import annotations

import torch

from sparse_attn.mesh import Ranks
from sparse_attn.pipeline.parallel.ranks import first_row, shard_rows, whole_rows
from sparse_attn.pipeline.select import Search, choose_decode, choose_over_ranks, choose_prefill
from sparse_attn.types import CompressedPlan, QuantisedQuery, StepPlan

SHARDED_KEYS = 32768  # that a row may have: with fewer, a collective takes longer than the rows of the other ranks


def shares_rows(keys: int, ranks: Ranks) -> bool:
    """Whether ``ranks``, which hold the same index keys, share the rows of steps in which a row may have ``keys``."""
    return ranks.size > 1 and keys >= SHARDED_KEYS


def shards_rows(plan: StepPlan | CompressedPlan, ranks: Ranks) -> bool:
    """Whether rows are sharded: several, with many keys, all of them of decode requests or all of prefills."""
    requests, rows = plan.context_lens.shape[0], plan.kv_start.shape[0]
    if not shares_rows(plan.max_context, ranks) or (requests > 0) == (rows > 0):
        return False
    return (requests or rows) > 1


def choose_sharded(search: Search, keys: Ranks, ranks: Ranks) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As choose_over_ranks, where shards_rows. keys: ranks that hold a part of the keys each. ranks: those that hold
    the same keys, and share the rows. One collective over those."""
    query, block_table, plan = search.query, search.block_table, search.plan
    requests, next_n = plan.context_lens.shape
    units, width = (requests, next_n) if requests else (plan.kv_start.shape[0], 1)
    each, first = shard_rows(units, ranks), first_row(units, ranks)
    own = QuantisedQuery(*(value.narrow(0, first * width, each * width) for value in query))
    if requests:
        block_table = block_table[:requests].narrow(0, first, each)
        plan = plan._replace(context_lens=plan.context_lens.narrow(0, first, each))
    else:
        plan = plan._replace(kv_start=plan.kv_start.narrow(0, first, each), kv_end=plan.kv_end.narrow(0, first, each))
    search = search._replace(query=own, block_table=block_table, plan=plan)
    if keys.size > 1:
        chosen = choose_over_ranks(search, keys)[0 if requests else 1]
    else:
        chosen = (choose_decode if requests else choose_prefill)(search)
    assert chosen is not None
    whole = whole_rows(torch.unflatten(chosen, 0, (each, width)), units, ranks).flatten(0, 1)
    return (whole, None) if requests else (None, whole)


def sharded_bytes(units: int, top_k: int, ranks: Ranks) -> int:
    """Bytes that a rank sends, counted as pipeline.parallel.ranks.exchanged_bytes counts."""
    return (ranks.size - 1) * shard_rows(units, ranks) * top_k * 4 if ranks.size > 1 < units else 0
