"""Launch configuration of the hyper-connections; they need no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class HyperConfig:
    """Columns of all streams that a program holds at a time: of the mix, which walks a token's, and of the merge, which
    takes one such block."""

    mix_columns: int
    merge_columns: int
    num_warps: int


def config(count: int, hidden: int, target: Target) -> HyperConfig:
    """8192 values of all streams together in a mix, 4096 in a merge."""
    padded = 1 << (count - 1).bit_length()
    widest = 1 << max(hidden - 1, 0).bit_length()
    return HyperConfig(min(widest, 8192 // padded), min(widest, 4096 // padded), 8)


def scratch(target: Target) -> Scratch:
    return Scratch()
