"""Fake implementations, and the allocation of outputs that the real ones share."""

import torch


def build_ragged_indices_from_dense(indices):
    return allocate_ragged(indices, indices.shape[1])


def compute_global_topk_ragged_indices_and_indptr(topk):
    return allocate_ragged(topk, topk.shape[1])


def window_indices(positions, window):
    return allocate_ragged(positions, window)


def entry_indices(limits, max_entries):
    return allocate_ragged(limits, max_entries)


def combine_topk_swa_indices_ragged(topk, positions, window, max_entries):
    return allocate_ragged(positions, (max_entries if topk is None else topk.shape[1]) + window)


def allocate_ragged(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (indices [tokens * width], indptr [tokens + 1]), int32, for rows of up to ``width`` entries.
    ``rows`` [tokens, ...] gives tokens and device."""
    tokens = rows.shape[0]
    return (
        torch.empty(tokens * width, dtype=torch.int32, device=rows.device),
        torch.empty(tokens + 1, dtype=torch.int32, device=rows.device),
    )
