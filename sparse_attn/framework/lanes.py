"""Functions of single values whose results do not depend on where among all values one stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

LANES = 64  # values that a CPU takes at a time, at most


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function`` of each value of x [..., n]. On a CPU torch takes the last few of all values another way than those
    before, which differs in the last bit: rows are widened there so that none of theirs are among these."""
    if x.device.type != "cpu" or x.shape[-1] % LANES == 0:
        return function(x)
    return function(F.pad(x, (0, -x.shape[-1] % LANES)))[..., : x.shape[-1]]
