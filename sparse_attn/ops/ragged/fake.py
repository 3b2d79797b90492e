"""Fake implementations."""

from sparse_attn.ops.ragged.shapes import allocate_ragged


def build_ragged_indices_from_dense(indices, lengths, row_offsets, num_rows):
    return allocate_ragged(indices)


def compute_global_topk_ragged_indices_and_indptr(topk, request_ids, block_table, block_size):
    return allocate_ragged(topk)
