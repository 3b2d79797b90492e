"""Rotation in plain torch, what debug mode asks of its values, and the checks every user of a table shares."""

from __future__ import annotations

import torch

from sparse_attn.framework import checks, debug

POSITION_DTYPES = (torch.int32, torch.int64)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, start: int, interleaved: bool, inverse: bool
) -> torch.Tensor:
    width = cos_sin.shape[1]
    cos, sin, valid = look_up(positions, cos_sin)
    if inverse:
        sin = -sin
    if x.dim() == 3:
        cos, sin, valid = cos.unsqueeze(1), sin.unsqueeze(1), valid.unsqueeze(1)
    rotated = rotate(x[..., start : start + width].float(), cos, sin, interleaved)
    rotated = torch.where(valid, rotated, 0.0).to(x.dtype)
    return torch.cat([x[..., :start], rotated, x[..., start + width :]], dim=-1)


def rules_of_apply_rope(positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    debug.places("positions", positions, cos_sin.shape[0], "rows of cos_sin")


def look_up(positions: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cos [tokens, width / 2], sin likewise, valid [tokens, 1]); positions outside the table are not valid."""
    count = cos_sin.shape[0]
    valid = ((positions >= 0) & (positions < count)).unsqueeze(1)
    cos, sin = cos_sin.index_select(0, positions.clamp(0, count - 1)).chunk(2, dim=1)
    return cos, sin, valid


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """fp32 [..., width] -> fp32 [..., width]; pairs (2i, 2i + 1) when interleaved, (i, i + width / 2) otherwise."""
    if interleaved:
        a, b = torch.unflatten(x, -1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def check_rope(name: str, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, start: int) -> None:
    """TypeError or ValueError unless ``cos_sin`` can rotate the slice from ``start`` of ``x`` at ``positions``."""
    checks.check_dtype("positions", positions, POSITION_DTYPES)
    checks.check_shape("positions", positions, (x.shape[0],), "[tokens]")
    checks.check_dtype("cos_sin", cos_sin, (torch.float32,))
    checks.check_rank("cos_sin", cos_sin, 2)
    width = cos_sin.shape[1]
    if cos_sin.shape[0] < 1 or width < 2 or width % 2:
        raise ValueError(f"cos_sin: got shape {list(cos_sin.shape)}, allowed: [at least 1, even and at least 2]")
    checks.check_integer("start", start)
    if start < 0 or start + width > x.shape[-1]:
        raise ValueError(
            f"start: got {start}, allowed: 0 to {x.shape[-1] - width} ({name} has {x.shape[-1]}, cos_sin {width})"
        )
    checks.check_same_device(**{name: x}, positions=positions, cos_sin=cos_sin)
