"""Exact top-k columns of each row of scores."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.ops.topk.select import op


def top_k_per_row(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """The k largest scores of each row's range, exactly.

    logits: fp32 [rows, width], last dimension contiguous, row stride free. k: at least 1, may exceed the width.
    row_starts, row_ends: int32 [rows], row r competes with columns [row_starts[r], row_ends[r]), both clamped to
    [0, width]; None means 0 and width.

    Returns int32 [rows, k]: columns relative to the row's (clamped) start, ascending, packed to the front, -1 behind.
    NaN and -inf are never selected, +inf may be; ties go to the lowest column and -0.0 equals +0.0. What lies outside
    the range is never looked at. The same scores give the same bits on every run and backend.

    Field: top_k_per_row_prefill / top_k_per_row_decode of vLLM, there with any subset of ties and in any order.
    """
    checks.check_dtype("logits", logits, (torch.float32,))
    checks.check_rank("logits", logits, 2)
    checks.check_unit_stride("logits", logits)
    checks.check_at_least("k", k, 1)
    rows = logits.shape[0]
    for name, value in (("row_starts", row_starts), ("row_ends", row_ends)):
        if value is not None:
            checks.check_dtype(name, value, (torch.int32,))
            checks.check_shape(name, value, (rows,), "[rows]")
    checks.check_same_device(logits=logits, row_starts=row_starts, row_ends=row_ends)
    return op.top_k_per_row(logits, row_starts, row_ends, k, impl)
