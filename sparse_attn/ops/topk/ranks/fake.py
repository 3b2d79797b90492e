"""Fake implementations, the digits of a score, and the shapes of what ranks exchange."""

import torch

BITS = (11, 11, 10)  # of each digit, the most significant first
LEVELS = len(BITS)
SHIFTS = (21, 10, 0)  # bits below each digit
MOST_UINT8 = 255
MOST_CANDIDATES = 32768  # of a row of merge_candidates, both factors rounded up to a power of two


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


def count_words(width: int, block_size: int) -> int:
    """int32 words that hold a count of up to ``block_size`` for each block of a row."""
    return (num_blocks(width, block_size) * ties_dtype(block_size).itemsize + 3) // 4


def allocate_candidates(logits: torch.Tensor, k: int, block_size: int) -> torch.Tensor:
    words = k + count_words(logits.shape[1], block_size)
    return torch.empty((logits.shape[0], words), dtype=torch.int32, device=logits.device)


def padded_candidates(ranks: int, k: int) -> int:
    """Candidates of a row, ranks and k rounded up to powers of two."""
    return 1 << (ranks - 1).bit_length() + (k - 1).bit_length()


def count_digits(logits, level):
    return allocate_counts(logits, level), allocate_state(logits)


def count_ties(logits, block_size):
    return allocate_ties(logits, block_size), allocate_ties(logits, block_size), allocate_state(logits)


def take_winners(logits, k):
    return allocate_winners(logits, k)


def pack_candidates(logits, columns, block_size):
    return allocate_candidates(logits, columns.shape[1], block_size)


def merge_candidates(columns):
    return allocate_winners(columns, columns.shape[1])
