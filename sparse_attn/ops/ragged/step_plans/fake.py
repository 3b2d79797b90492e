"""Fake implementations."""

from sparse_attn.ops.ragged.step_plans.shapes import allocate_compressed, allocate_plan


def step_plan(query_start_loc, seq_lens, slot_mapping, num_decodes, next_n):
    return allocate_plan(seq_lens, slot_mapping, num_decodes, next_n)


def compressed_plan(request_ids, positions, block_table, kv_indptr, decode_rows, ratio, block_size):
    return allocate_compressed(positions, kv_indptr, decode_rows)
