"""Launch configuration of the rotation; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.device import grid
from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class RopeConfig:
    """heads: per program, a power of two; dim: padded to a power of two."""

    heads: int
    dim: int
    num_warps: int


def config(heads: int, dim: int, target: Target) -> RopeConfig:
    block, padded = grid.block_of_heads(heads, dim)
    return RopeConfig(block, padded, min(4, max(1, block * padded // 512)))


def scratch(tokens: int, target: Target) -> Scratch:
    return Scratch()
