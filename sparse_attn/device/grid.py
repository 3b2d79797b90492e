"""What a grid has room for: its second and third dimension are 16 bits wide on NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

MOST = 2**16 - 1  # programs along the second or third dimension
ALIGNED = (
    MOST // 16 * 16
)  # so that what a later launch takes starts where the first one's does, as the compiler sees it


def spans(count: int, each: int = 1) -> Iterator[slice]:
    """What launches one after the other take of ``count`` rows, of which a program along such a dimension takes
    ``each``."""
    step = ALIGNED * each
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def check(name: str, size: int, each: int) -> None:
    """ValueError where programs along such a dimension, each for ``each`` of ``size``, would be too many."""
    if size > MOST * each:
        raise ValueError(f"{name}: got {size}, allowed: at most {MOST * each}, for which a launch has room")
