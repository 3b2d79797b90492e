"""Launch configuration and scratch of the ragged builders."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target
from sparse_attn.workspace import Scratch

TICKETS = 2  # counters in front of the row states: programs started, programs finished


@dataclass(frozen=True)
class RaggedConfig:
    block: int
    num_warps: int


def config(width: int, target: Target) -> RaggedConfig:
    """One program per row walks it in blocks; wide rows get wide blocks."""
    block = min(2048, max(16, 1 << max(width - 1, 0).bit_length()))
    return RaggedConfig(block, 8 if block >= 1024 else 4)


def scratch(tokens: int, target: Target) -> Scratch:
    """A state per row for the prefix sum across programs, and two tickets."""
    return Scratch((), tokens + TICKETS)
