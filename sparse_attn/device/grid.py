"""Limits of a grid: its second and third dimension are 16 bits wide on NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

MOST = 2**16 - 1  # programs along the second or third dimension
ALIGNED = (
    MOST // 16 * 16
)  # so that what a later launch takes starts where the first one's does, as the compiler sees it


def spans(count: int, each: int = 1) -> Iterator[slice]:
    """Slices of ``count`` rows for launches one after the other. A CTA along such a dimension takes ``each`` rows."""
    step = ALIGNED * each
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def block_of_heads(heads: int, dim: int) -> tuple[int, int]:
    """(heads of a CTA, dim padded), powers of two: about 2048 elements a CTA. These are enough loads in flight, and
    several CTAs a token at decode sizes."""
    padded = 1 << (dim - 1).bit_length()
    return min(1 << (heads - 1).bit_length(), max(1, 2048 // padded)), padded


def check(name: str, size: int, each: int) -> None:
    """ValueError where CTAs along such a dimension, one for ``each`` of ``size``, would be too many."""
    if size > MOST * each:
        raise ValueError(f"{name}: got {size}, allowed: at most {MOST * each}, for which a launch has room")
