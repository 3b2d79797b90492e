"""Rotary position embedding with everything explicit: slice, pairing, table, position, direction.

An operator of one launch, with the reference's bits. Where x wants a gradient, plain torch takes its place.
"""

from __future__ import annotations

import torch

from sparse_attn.framework import checks
from sparse_attn.framework.debug import look
from sparse_attn.framework.registration import define_op, followed
from sparse_attn.ops.layers.rope import fake, reference
from sparse_attn.ops.layers.rope.table import Yarn, inverse_frequencies, rope_table

__all__ = ["Yarn", "apply_rope", "inverse_frequencies", "rope_table"]

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GUARD = checks.Guard()


def _launchers():
    from sparse_attn.ops.layers.rope import launch

    return launch


_apply_rope = define_op(
    "apply_rope",
    "(Tensor x, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool inverse, str impl) -> Tensor",
    fake=fake.apply_rope,
    reference=reference.apply_rope,
    rules=reference.rules_of_apply_rope,
    launch=lambda: _launchers().apply_rope,
)


def apply_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    start: int,
    interleaved: bool,
    inverse: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """Rotate the slice [start, start + R) of the last dimension by each row's position.

    Args:
        x: bf16, fp16 or fp32 [tokens, heads, dim] or [tokens, dim], any strides.
        positions: int32 or int64 [tokens]; a row whose position lies outside the table comes out 0 in the rotated
            slice.
        cos_sin: fp32 [positions, R] of ``rope_table``, R / 2 cosines then R / 2 sines.
        start: first value of the slice.
        interleaved: pairs (2i, 2i + 1), else (i, i + R / 2) of the slice.
        inverse: rotate by minus the position.
        impl: "auto", "reference" or "triton".

    Returns:
        A new contiguous tensor, rotated in fp32 and cast back to x's dtype; it has a gradient by x.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: wrong shapes, devices or a slice that does not fit.
    """
    if new := _GUARD.new(x, positions, cos_sin, start, interleaved, inverse):
        checks.check_dtype("x", x, VALUE_DTYPES)
        checks.check_rank("x", x, 2, 3)
        reference.check_rope("x", x, positions, cos_sin, start)
        for name, value in (("interleaved", interleaved), ("inverse", inverse)):
            checks.check_flag(name, value)
        _GUARD.passed(new)
    if not followed((x,), (0,)):
        return _apply_rope(x, positions, cos_sin, start, interleaved, inverse, impl)
    look("apply_rope", reference.rules_of_apply_rope, positions, cos_sin)
    return reference.apply_rope(x, positions, cos_sin, start, interleaved, inverse)
