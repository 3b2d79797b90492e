"""How rows of scores lie in memory."""

import torch


def is_aligned(logits: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes and can be read up to the next multiple of 4 columns."""
    rows, width = logits.shape
    stride = logits.stride(0)
    readable = logits.untyped_storage().nbytes() // 4 - logits.storage_offset() - (rows - 1) * stride
    return bool(stride % 4 == 0 and logits.data_ptr() % 16 == 0 and -(-width // 4) * 4 <= readable)
