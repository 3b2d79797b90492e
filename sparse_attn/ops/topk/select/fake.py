"""Fake implementation, and the shape of a selection."""

import torch

GROUP = 8  # neighbours whose highest score may come with them
WORD = 32  # columns of a word of a bitmask


def allocate_indices(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Uninitialised int32 [rows, k] on the device of ``logits`` [rows, width]."""
    return torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)


top_k_per_row = allocate_indices
