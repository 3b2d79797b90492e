"""Shape of a selection, and how its scores lie."""

import torch

GROUP = 8  # neighbours whose highest score may come with them
WORD = 32  # columns of a word of a bitmask


def allocate_indices(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Uninitialised int32 [rows, k] on the device of ``logits`` [rows, width]."""
    return torch.empty((logits.shape[0], k), dtype=torch.int32, device=logits.device)


def is_aligned(logits: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes and can be read up to the next multiple of 4 columns."""
    rows, width = logits.shape
    stride = logits.stride(0)
    readable = logits.untyped_storage().nbytes() // 4 - logits.storage_offset() - (rows - 1) * stride
    return bool(stride % 4 == 0 and logits.data_ptr() % 16 == 0 and -(-width // 4) * 4 <= readable)
