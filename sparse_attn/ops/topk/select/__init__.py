"""Exact top-k columns of each row of scores."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.registration import define_op
from sparse_attn.ops.topk.select import dispatch, fake, reference

_GUARD = checks.Guard()


def _launchers():
    from sparse_attn.ops.topk.select import launch

    return launch


_top_k_per_row = define_op(
    "top_k_per_row",
    "(Tensor logits, Tensor? row_starts, Tensor? row_ends, int k, str impl) -> Tensor",
    fake=fake.top_k_per_row,
    reference=reference.top_k_per_row,
    rules=reference.rules_of_top_k_per_row,
    launch=lambda: _launchers().top_k_per_row,
    kernels=dispatch.KERNELS,
)


def top_k_per_row(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """The k largest scores of each row's range, exactly.

    NaN and -inf are never selected, +inf may be; ties go to the lowest column and -0.0 equals +0.0. What lies outside
    the range is never looked at. The same scores give the same bits on every run and backend.

    Field: top_k_per_row_prefill / top_k_per_row_decode of vLLM, there with any subset of ties and in any order.

    Args:
        logits: fp32 [rows, width], last dimension contiguous, row stride free.
        k: at least 1, may exceed the width.
        row_starts: int32 [rows], row r competes with columns [row_starts[r], row_ends[r]), both clamped to [0, width];
            None means 0.
        row_ends: int32 [rows]; None means width.
        impl: "auto", "reference", "triton", or a kernel's name.

    Returns:
        int32 [rows, k]: columns relative to the row's (clamped) start, ascending, packed to the front, -1 behind.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, strides or devices, or a value out of range.
    """
    if new := _GUARD.new(logits, k, row_starts, row_ends):
        checks.check_dtype("logits", logits, (torch.float32,))
        checks.check_rank("logits", logits, 2)
        checks.check_unit_stride("logits", logits)
        checks.check_at_least("k", k, 1)
        for name, value in (("row_starts", row_starts), ("row_ends", row_ends)):
            if value is not None:
                checks.check_dtype(name, value, (torch.int32,))
                checks.check_shape(name, value, (logits.shape[0],), "[rows]")
        checks.check_same_device(logits=logits, row_starts=row_starts, row_ends=row_ends)
        _GUARD.passed(new)
    return _top_k_per_row(logits, row_starts, row_ends, k, impl)
