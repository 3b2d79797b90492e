"""Fake implementations, and the allocation of outputs that the real ones share."""

import torch


def hyper_mix(streams):
    return allocate_mix(streams)


def hyper_merge(streams):
    return allocate_streams(streams)


def allocate_mix(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised (collapsed [tokens, hidden] like ``streams``, post fp32 [tokens, N], comb fp32 [tokens, N, N])."""
    tokens, count, hidden = streams.shape
    return (
        torch.empty(tokens, hidden, dtype=streams.dtype, device=streams.device),
        torch.empty(tokens, count, dtype=torch.float32, device=streams.device),
        torch.empty(tokens, count, count, dtype=torch.float32, device=streams.device),
    )


def allocate_streams(streams: torch.Tensor) -> torch.Tensor:
    """Uninitialised, of the shape and dtype of ``streams``, contiguous."""
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
