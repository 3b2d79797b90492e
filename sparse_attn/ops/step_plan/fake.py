"""Fake implementation."""

from sparse_attn.ops.step_plan.shapes import allocate_plan


def step_plan(query_start_loc, seq_lens, slot_mapping, num_decodes, next_n):
    return allocate_plan(seq_lens, slot_mapping, num_decodes, next_n)
