"""Rotary position embedding with everything explicit: slice, pairing, table, position, direction.

Plain torch, not an operator. In eager mode it runs as written. Under torch.compile Inductor fuses it with its
neighbours, and may contract a product and a sum into one fma, which moves a result by at most one fp32 rounding before
the cast.
"""

from __future__ import annotations

import torch

from sparse_attn import checks
from sparse_attn.debug import look
from sparse_attn.ops.rope import reference
from sparse_attn.ops.rope.table import Yarn, inverse_frequencies, rope_table

__all__ = ["Yarn", "apply_rope", "inverse_frequencies", "rope_table"]

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def apply_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    start: int,
    interleaved: bool,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate the slice [start, start + R) of the last dimension by each row's position.

    x: bf16, fp16 or fp32 [tokens, heads, dim] or [tokens, dim], any strides.
    positions: int32 or int64 [tokens]; a row whose position lies outside the table comes out 0 in the rotated slice.
    cos_sin: fp32 [positions, R] of ``rope_table``, R / 2 cosines then R / 2 sines.
    interleaved: pairs (2i, 2i + 1), else (i, i + R / 2) of the slice. inverse: rotate by minus the position.

    Returns a new tensor like x, rotated in fp32 and cast back. TypeError or ValueError for wrong dtypes, shapes,
    devices or a slice that does not fit.
    """
    checks.check_dtype("x", x, VALUE_DTYPES)
    checks.check_rank("x", x, 2, 3)
    reference.check_rope("x", x, positions, cos_sin, start)
    look(__name__, "apply_rope", positions, cos_sin)
    return reference.apply_rope(x, positions, cos_sin, start, interleaved, inverse)
