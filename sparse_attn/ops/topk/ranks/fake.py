"""Fake implementations."""

from sparse_attn.ops.topk.ranks.shapes import (
    allocate_candidates,
    allocate_counts,
    allocate_state,
    allocate_ties,
    allocate_winners,
)


def count_digits(logits, row_starts, row_ends, sums, state, k, level):
    return allocate_counts(logits, level), allocate_state(logits)


def count_ties(logits, row_starts, row_ends, sums, state, block_size):
    return allocate_ties(logits, block_size), allocate_ties(logits, block_size), allocate_state(logits)


def take_winners(logits, row_starts, row_ends, ties, above, state, k, block_size, rank):
    return allocate_winners(logits, k)


def pack_candidates(logits, columns, row_starts, block_size):
    return allocate_candidates(logits, columns.shape[1], block_size)


def merge_candidates(candidates, columns, block_size, rank):
    return allocate_winners(columns, columns.shape[1])
