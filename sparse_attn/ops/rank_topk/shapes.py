"""Digits of a score, and the shapes of what ranks exchange."""

import torch

BITS = (11, 11, 10)  # of each digit, the most significant first
LEVELS = len(BITS)
SHIFTS = (21, 10, 0)  # bits below each digit
MOST_UINT8 = 255


def num_blocks(width: int, block_size: int) -> int:
    return (width + block_size - 1) // block_size


def ties_dtype(block_size: int) -> torch.dtype:
    """What holds a count of up to ``block_size``."""
    return torch.uint8 if block_size <= MOST_UINT8 else torch.int32


def allocate_state(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty((logits.shape[0], 2), dtype=torch.int32, device=logits.device)


def allocate_counts(logits: torch.Tensor, level: int) -> torch.Tensor:
    """Uninitialised."""
    return torch.empty((logits.shape[0], 1 << BITS[level]), dtype=torch.int32, device=logits.device)


def allocate_ties(logits: torch.Tensor, block_size: int) -> torch.Tensor:
    shape = (logits.shape[0], num_blocks(logits.shape[1], block_size))
    return torch.empty(shape, dtype=ties_dtype(block_size), device=logits.device)


def allocate_winners(logits: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)
