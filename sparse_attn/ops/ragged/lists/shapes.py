"""Shapes of a ragged pair."""

import torch


def allocate_ragged(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (indices [tokens * width], indptr [tokens + 1]), int32, for rows of up to ``width`` entries.
    ``rows`` [tokens, ...] gives tokens and device."""
    tokens = rows.shape[0]
    return (
        torch.empty(tokens * width, dtype=torch.int32, device=rows.device),
        torch.empty(tokens + 1, dtype=torch.int32, device=rows.device),
    )
