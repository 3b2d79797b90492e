"""Fake implementations."""

from sparse_attn.ops.ragged.lists.shapes import allocate_ragged


def build_ragged_indices_from_dense(indices, lengths, row_offsets, num_rows):
    return allocate_ragged(indices, indices.shape[1])


def compute_global_topk_ragged_indices_and_indptr(topk, request_ids, block_table, block_size):
    return allocate_ragged(topk, topk.shape[1])


def window_indices(positions, request_ids, block_table, block_size, window):
    return allocate_ragged(positions, window)


def entry_indices(limits, request_ids, block_table, block_size, max_entries):
    return allocate_ragged(limits, max_entries)


def combine_topk_swa_indices_ragged(
    topk, limits, positions, entry_offsets, window_offsets, window, max_entries, num_rows
):
    return allocate_ragged(positions, (max_entries if topk is None else topk.shape[1]) + window)
