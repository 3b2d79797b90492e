"""MXFP4 in plain torch: e2m1 codes of 4 bits, and a power of two as ue8m0 byte for every 32 of them.

Source: OCP Microscaling Formats 1.0; the scale is that of DeepSeek-V4's simulated quantisation of index queries and
keys, 2^ceil(log2(amax / 6)).
"""

from __future__ import annotations

import torch

MXFP4 = "mxfp4"  # what these codes are called where fp8 codes have a flavour
GROUP = 32  # values under a scale
AMAX_FLOOR = 6 * 2.0**-126  # what a group's amax counts as at least: its scale is a normal number
NAN_SCALE = 255  # the ue8m0 byte of a group that holds NaN or an infinity
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by code; bit 3 of a code is the sign


def mxfp4_quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension d, a multiple of 32: (codes uint8 [..., d / 2], scales ue8m0 bytes [..., d / 32]).

    A byte holds two codes, that of the even value in its low bits. scale = 2^ceil(log2(max(amax, AMAX_FLOOR) / 6));
    code: value / scale rounded to the nearest magnitude, ties to the even code; a zero keeps its sign. A group that
    holds NaN or an infinity is NaN in full: codes 0 under NAN_SCALE.
    """
    values = values.float().unflatten(-1, (-1, GROUP))
    finite = values.isfinite().all(-1)
    magnitude = torch.where(finite.unsqueeze(-1), values.abs(), 0.0)
    amax = magnitude.amax(-1).clamp_min(AMAX_FLOOR)
    # 6 is 1.5 * 2^2: the exponent, less 2, and one more where the mantissa is above 1.5.
    exponents = ((amax.view(torch.int32) + 0x3FFFFF) >> 23) - 2
    inverse = ((254 - exponents) << 23).view(torch.float32)
    scaled = magnitude * inverse.unsqueeze(-1)  # exact, or below every magnitude
    codes = (scaled > 0.25).int() + (scaled >= 0.75).int() + (scaled > 1.25).int() + (scaled >= 1.75).int()
    codes += (scaled > 2.5).int() + (scaled >= 3.5).int() + (scaled > 5.0).int()
    codes = torch.where(finite.unsqueeze(-1), codes | (values.signbit().int() << 3), 0).flatten(-2)
    packed = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8), torch.where(finite, exponents, NAN_SCALE).to(torch.uint8)


def mxfp4_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [..., d] from codes uint8 [..., d / 2] and ue8m0 bytes [..., d / 32]; NaN under a byte of 255."""
    table = torch.tensor(VALUES + tuple(-value for value in VALUES), dtype=torch.float32, device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]
    powers = scales.view(torch.float8_e8m0fnu).float()
    return (values.unflatten(-1, (-1, GROUP)) * powers.unsqueeze(-1)).flatten(-2)
