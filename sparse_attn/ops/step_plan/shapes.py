"""Shapes of a step plan's tensors."""

import torch


def allocate_plan(seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int):
    """Uninitialised int32 (request_ids, positions, limits [T]; kv_indptr [prefills + 1]; kv_start, kv_end [prefill rows])."""
    tokens = slot_mapping.shape[0]
    prefill_tokens = tokens - num_decodes * next_n
    prefills = seq_lens.shape[0] - num_decodes
    sizes = (tokens, tokens, tokens, prefills + 1, prefill_tokens, prefill_tokens)
    return tuple(torch.empty(size, dtype=torch.int32, device=slot_mapping.device) for size in sizes)
