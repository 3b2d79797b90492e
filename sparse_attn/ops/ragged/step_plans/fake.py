"""Fake implementations, and the allocation of outputs that the real ones share."""

import torch


def step_plan(seq_lens, slot_mapping, num_decodes, next_n):
    return allocate_plan(seq_lens, slot_mapping, num_decodes, next_n)


def compressed_plan(positions, kv_indptr, decode_rows):
    return allocate_compressed(positions, kv_indptr, decode_rows)


def allocate_plan(seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int):
    """Uninitialised (request_ids, positions, limits int32 [T], slots int64 [T], kv_indptr int32 [prefills + 1],
    kv_start and kv_end int32 [prefill rows])."""
    tokens = slot_mapping.shape[0]
    prefill_tokens = tokens - num_decodes * next_n
    prefills = seq_lens.shape[0] - num_decodes
    sizes = (tokens, tokens, tokens, tokens, prefills + 1, prefill_tokens, prefill_tokens)
    dtypes = (torch.int32,) * 3 + (torch.int64,) + (torch.int32,) * 3
    return tuple(torch.empty(size, dtype=dtype, device=slot_mapping.device) for size, dtype in zip(sizes, dtypes))


def allocate_compressed(positions: torch.Tensor, kv_indptr: torch.Tensor, decode_rows: int):
    """Uninitialised (limits int32 [T], slots int64 [T], kv_indptr int32 [prefills + 1], kv_start and kv_end int32
    [prefill rows])."""
    tokens = positions.shape[0]
    sizes = (tokens, tokens, kv_indptr.shape[0], tokens - decode_rows, tokens - decode_rows)
    dtypes = (torch.int32, torch.int64, torch.int32, torch.int32, torch.int32)
    return tuple(torch.empty(size, dtype=dtype, device=positions.device) for size, dtype in zip(sizes, dtypes))
