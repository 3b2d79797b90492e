"""Fake implementations, shapes, and how rows are cut to the logits budget."""

import torch

ROW_ALIGNMENT = 64  # logits rows start at multiples of this many elements


def allocate_prefill(q: torch.Tensor, top_k: int) -> torch.Tensor:
    """Uninitialised int32 [rows, top_k] for q [rows, heads, dim]."""
    return torch.empty((q.shape[0], top_k), dtype=torch.int32, device=q.device)


def allocate_decode(q: torch.Tensor, top_k: int) -> torch.Tensor:
    """Uninitialised int32 [requests * next_n, top_k] for q [requests, next_n, heads, dim]."""
    return torch.empty((q.shape[0] * q.shape[1], top_k), dtype=torch.int32, device=q.device)


def allocate_slots(q: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised int32 (indices [rows * top_k], indptr [rows + 1]) for the rows of q [requests, next_n, heads,
    dim]."""
    rows = q.shape[0] * q.shape[1]
    return q.new_empty(rows * top_k, dtype=torch.int32), q.new_empty(rows + 1, dtype=torch.int32)


def padded(width: int) -> int:
    """Elements between the logits of neighbouring rows."""
    return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT


def rows_at_once(rows: int, width: int, logits_bytes: int, group: int = 1) -> int:
    """How many rows of logits fit the budget: whole groups, at least one of them, no more than there are."""
    fitting = logits_bytes // (4 * max(padded(width), 1)) // group * group
    return min(max(fitting, group), rows)


index_topk_prefill, index_topk_decode, index_topk_decode_slots = allocate_prefill, allocate_decode, allocate_slots
