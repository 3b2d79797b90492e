"""Cosine and sine tables: plain theta and yarn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparse_attn.framework import checks

BAND = 1 << 14  # positions whose values the host holds at a time


@dataclass(frozen=True)
class Yarn:
    """Yarn frequency scaling: context grown ``factor`` times over ``original_max_position``.

    Attributes:
        factor: how many times the context grew.
        original_max_position: tokens of the unscaled context.
        beta_fast: rotations in it from which a dimension keeps its frequency.
        beta_slow: rotations in it up to which a frequency is divided by the factor.
        attention_factor: multiplies cos and sin. It is 1 for every model here, because their mscale equals
            mscale_all_dim. The rest of mscale belongs to the softmax scale.
        truncate: the ramp's ends are rounded outwards to dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None) -> torch.Tensor:
    """fp32 [dim / 2], on the CPU.

    Under yarn, fast dimensions keep theta's frequency, slow ones are divided by the factor, and a linear ramp joins
    them between the dimensions that turn beta_fast and beta_slow times in the original context.

    Args:
        dim: rotated width, even.
        theta: base of the frequencies.
        yarn: frequency scaling, or None.

    Returns:
        fp32 [dim / 2]: radians a position.
    """
    periods = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if yarn is None:
        return 1.0 / periods

    def dimension_turning(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_turning(yarn.beta_fast), dimension_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (yarn.factor * periods) * (1 - keep) + 1.0 / periods * keep


def rope_table(
    positions_count: int,
    dim: int,
    theta: float,
    *,
    yarn: Yarn | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """cos_sin fp32 [positions_count, dim]: row p holds dim / 2 cosines, then dim / 2 sines, of p times each frequency.

    Computed on the CPU and then moved, so that every device holds the same bits.

    Source: transformers 5.17, default and yarn rope of DeepSeek-V3.2.

    Args:
        positions_count: rows, at least 1.
        dim: rotated width, even.
        theta: base of the frequencies, above 1.
        yarn: frequency scaling, or None.
        device: None: the CPU, whatever torch's default is.

    Returns:
        fp32 [positions_count, dim].

    Raises:
        TypeError: wrong types.
        ValueError: a dim that is odd or below 2, no positions, a theta or yarn out of range.
    """
    checks.check_at_least("positions_count", positions_count, 1)
    checks.check_integer("dim", dim)
    checks.check_number("theta", theta)
    if dim < 2 or dim % 2:
        raise ValueError(f"dim: got {dim}, allowed: even and at least 2")
    if not theta > 1:
        raise ValueError(f"theta: got {theta}, allowed: above 1")
    if yarn is not None and not (
        yarn.factor > 0 and yarn.original_max_position > 0 and yarn.beta_fast >= yarn.beta_slow > 0
    ):
        raise ValueError(f"yarn: got {yarn}, allowed: positive fields with beta_fast at least beta_slow")
    frequencies, factor = inverse_frequencies(dim, theta, yarn), 1.0 if yarn is None else yarn.attention_factor
    table = torch.empty(positions_count, dim, dtype=torch.float32, device="cpu" if device is None else device)
    for start in range(0, positions_count, BAND):
        part = table[start : start + BAND]
        positions = torch.arange(start, start + part.shape[0], dtype=torch.float32, device="cpu")
        angles = positions.unsqueeze(1) * frequencies
        values = torch.cat([angles.cos(), angles.sin()], dim=1)
        part.copy_(values if factor == 1.0 else values * factor)
    return table
