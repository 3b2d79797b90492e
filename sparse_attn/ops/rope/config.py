"""Launch configuration of the rotation; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class RopeConfig:
    """heads: per program, a power of two; dim: padded to a power of two."""

    heads: int
    dim: int
    num_warps: int


def config(heads: int, dim: int, target: Target) -> RopeConfig:
    """About 2048 elements a CTA: enough loads in flight, and several CTAs a token at decode sizes."""
    padded = 1 << (dim - 1).bit_length()
    block = min(1 << (heads - 1).bit_length(), max(1, 2048 // padded))
    return RopeConfig(block, padded, min(4, max(1, block * padded // 512)))


def scratch(tokens: int, target: Target) -> Scratch:
    return Scratch()
