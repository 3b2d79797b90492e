"""Fake implementations."""

import torch


def grouped_linear(rows, codes):
    return torch.empty(rows.shape[0], codes.shape[1], dtype=rows.dtype, device=rows.device)


def packed_experts(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
