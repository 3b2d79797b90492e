"""Shapes of the index scores."""

import torch


def allocate_logits(rows, keys, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised fp32 [rows, keys] on the device of ``like``."""
    return torch.empty(rows, keys, dtype=torch.float32, device=like.device)
