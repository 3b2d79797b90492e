"""Fake implementations, and the allocation of outputs that the real ones share."""

import torch


def biased_grouped_topk(logits, top_k):
    return allocate_routes(logits, top_k)


def allocate_routes(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]) on the device of ``logits``."""
    tokens = logits.shape[0]
    return (
        torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device),
    )
