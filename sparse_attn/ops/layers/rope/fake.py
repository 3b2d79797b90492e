"""Fake implementation."""

import torch


def apply_rope(x, positions, cos_sin, start, interleaved, inverse):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
