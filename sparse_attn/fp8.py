"""fp8 codes and their scales in plain torch: flavours, quantisation, ue8m0 exponents."""

from __future__ import annotations

import torch

# Largest magnitude the writers scale to. e4m3fnuz could hold 240; with 224 = 448 / 2 its bytes equal those of e4m3fn
# and only the scale doubles, which is what vLLM does.
FP8_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}
FP8_DTYPE = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
SCALE_RULES = ("raw", "pow2")
FP8_NAN = {"e4m3fn": 0x7F, "e4m3fnuz": 0x80}  # what writers write; e4m3fn has another


def fp8_encode(values: torch.Tensor, flavour: str) -> torch.Tensor:
    """fp32 values -> uint8 codes, clamped to the flavour's writer maximum, round to nearest even; NaN becomes
    FP8_NAN."""
    limit = FP8_MAX[flavour]
    codes = values.float().clamp(-limit, limit).to(FP8_DTYPE[flavour]).view(torch.uint8)
    return torch.where(values.isnan(), FP8_NAN[flavour], codes)


def fp8_decode(codes: torch.Tensor, flavour: str) -> torch.Tensor:
    """uint8 codes -> fp32 values."""
    return codes.contiguous().view(FP8_DTYPE[flavour]).float()


def fp8_quantise(
    values: torch.Tensor, flavour: str, scale_rule: str, amax_floor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension with one scale: (codes uint8 [..., d], scales fp32 [...]).

    scale = max(amax, amax_floor) / FP8_MAX, rounded up to a power of two under "pow2"; value ~= code * scale. amax is
    that of the finite values. NaN and infinities become NaN and change no other value.
    """
    values = values.float()
    values = torch.where(values.isfinite(), values, torch.nan)
    amax = values.abs().nan_to_num(0.0).amax(-1).clamp_min(amax_floor)
    scales = amax / torch.full_like(
        amax, FP8_MAX[flavour]
    )  # CUDA would turn division by a Python number into a product
    if scale_rule == "pow2":
        scales = ceil_pow2(scales)
    return fp8_encode(values / scales.unsqueeze(-1), flavour), scales


def ceil_pow2(scales: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each positive normal fp32 value, by its exponent bits."""
    bits = scales.float().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def exponent_of(scales: torch.Tensor) -> torch.Tensor:
    """ue8m0 byte of each positive power of two, fp32: its exponent plus 127."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def power_of(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 2^(byte - 127) of each ue8m0 byte; 255 gives inf."""
    bits = exponents.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)  # 2^-127 is subnormal
