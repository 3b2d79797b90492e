"""Shapes of a ragged pair built from dense rows."""

import torch


def allocate_ragged(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (indices [tokens * width], indptr [tokens + 1]), int32, on the device of ``dense`` [tokens, width]."""
    tokens, width = dense.shape
    return (
        torch.empty(tokens * width, dtype=torch.int32, device=dense.device),
        torch.empty(tokens + 1, dtype=torch.int32, device=dense.device),
    )
