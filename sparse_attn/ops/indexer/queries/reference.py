"""The oracle: rotate, round, transform, round, quantise, fold."""

from __future__ import annotations

import torch

from sparse_attn.fp8 import fp8_quantise
from sparse_attn.framework import checks, debug
from sparse_attn.layout import INDEX_AMAX_FLOOR, IndexMxfp4Layout, PlainLayout, parse_layout
from sparse_attn.ops.indexer.queries.fake import allocate_query
from sparse_attn.ops.layers.rope.reference import apply_rope

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def indexer_q_rope_quant(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    start: int,
    interleaved: bool,
    hadamard: bool,
    weight_scale: float,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = parse_layout(layout)
    live = ((positions >= 0) & (positions < cos_sin.shape[0])).unsqueeze(1)
    values = apply_rope(q, positions, cos_sin, start, interleaved, False)
    if hadamard:
        values = hadamard_transform(values)
    values = torch.where(live.unsqueeze(2), values, 0.0)
    folded = weights.float() * weight_scale
    if isinstance(form, PlainLayout):
        query = values.to(form.dtype)
    elif isinstance(form, IndexMxfp4Layout):
        query, _ = allocate_query(q, layout)
        form.encode(query, torch.arange(q.shape[0] * q.shape[1], device=q.device), values.flatten(0, 1))
    else:
        query, scales = fp8_quantise(values, form.flavour, form.scale_rule, INDEX_AMAX_FLOOR)
        folded = folded * scales
    return query.contiguous(), torch.where(live, folded, 0.0).contiguous()


def hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Hadamard transform of the last dimension (a power of two), in fp32, cast back. Its own inverse.

    Args:
        x: bf16, fp16 or fp32 [..., dim].

    Returns:
        The same shape and dtype.

    Raises:
        TypeError: another dtype.
        ValueError: a last dimension that is no power of two.
    """
    checks.check_dtype("x", x, FLOATS)
    dim = x.shape[-1] if x.dim() else 0
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"x: got shape {list(x.shape)}, allowed: a last dimension that is a power of two")
    values = x.float()
    half = 1
    while half < dim:
        a, b = torch.unflatten(values, -1, (-1, 2, half)).unbind(-2)
        values = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return (values * dim**-0.5).to(x.dtype)


# --- what debug mode asks of values


def rules_of_indexer_q_rope_quant(positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    debug.places("positions", positions, cos_sin.shape[0], "rows of cos_sin")
