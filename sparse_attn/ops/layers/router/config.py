"""Launch configuration of the router; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class RouterConfig:
    """rows: tokens per program; groups, group_size: padded to powers of two."""

    rows: int
    groups: int
    group_size: int
    num_warps: int


def config(experts: int, num_groups: int, target: Target) -> RouterConfig:
    """A warp per 512 padded experts. Several rows a CTA would leave SMs idle at decode sizes."""
    groups = next_power(num_groups)
    group_size = next_power(experts // num_groups)
    padded = groups * group_size
    rows = 8 if target.interpreted else max(1, 256 // padded)
    return RouterConfig(rows, groups, group_size, min(4, max(1, rows * padded // 512)))


def next_power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def scratch(tokens: int, target: Target) -> Scratch:
    return Scratch()
