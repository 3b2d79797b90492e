"""Comparison of floats at stated levels, infinities and NaN first."""

from __future__ import annotations

import torch

# FlashMLA's and DeepGEMM's own levels: (absolute, relative, cosine difference).
PREFILL_OUT = (8e-4, 3.01 / 128, 7e-6)
DECODE_OUT = (1e-3, 2.01 / 128, 5e-6)
PREFILL_LSE = (1e-6, 2.01 / 65536, 1.0)
DECODE_LSE = (1e-6, 8.01 / 65536, 1.0)
LOGITS_DIFF = 5e-6


def similarity_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2), in float64; 0 for two zero tensors."""
    x, y = got.double().flatten(), want.double().flatten()
    denominator = (x * x + y * y).sum()
    if denominator == 0:
        return 0.0
    return float(1 - 2 * (x * y).sum() / denominator)


def assert_close(
    got: torch.Tensor, want: torch.Tensor, level: tuple[float, float, float], what: str = "output"
) -> None:
    """Equal shapes, equal non-finite elements, and every finite one within absolute OR relative bound, and cosine."""
    absolute, relative, cosine = level
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} against {tuple(want.shape)}"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(got), kind(want)), (
            f"{what}: {kind.__name__} differs at {(kind(got) != kind(want)).nonzero()[:4]}"
        )
    finite = torch.isfinite(want)
    x, y = got[finite], want[finite]
    error = (x - y).abs()
    bad = (error > absolute) & (error > relative * y.abs())
    assert not bad.any(), f"{what}: {int(bad.sum())} of {bad.numel()} off, worst {float(error[bad].max()):.3e}"
    difference = similarity_difference(x, y)
    assert difference <= cosine, f"{what}: cosine difference {difference:.3e} above {cosine:.0e}"


def assert_same_diff(got: torch.Tensor, want: torch.Tensor, bound: float = LOGITS_DIFF) -> None:
    """DeepGEMM's comparison: identical -inf masks, and similarity difference of the finite part below ``bound``."""
    assert torch.equal(torch.isneginf(got).cpu(), torch.isneginf(want).cpu()), "-inf masks differ"
    finite = ~torch.isneginf(want)
    difference = similarity_difference(got[finite].cpu(), want[finite].cpu())
    assert difference < bound, f"difference {difference:.3e} not below {bound:.0e}"
