"""Shapes of the router's result."""

import torch


def allocate_routes(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]) on the device of ``logits``."""
    tokens = logits.shape[0]
    return (
        torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device),
    )
