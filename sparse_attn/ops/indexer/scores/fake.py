"""Fake implementations, and the output that the launchers allocate alike."""

import torch


def allocate_logits(rows, keys, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised fp32 [rows, keys] on the device of ``like``."""
    return torch.empty(rows, keys, dtype=torch.float32, device=like.device)


def mqa_logits(q, k):
    return allocate_logits(q.shape[0], k.shape[0], q)


def paged_mqa_logits(q, max_context_len):
    return allocate_logits(q.shape[0] * q.shape[1], max_context_len, q)
