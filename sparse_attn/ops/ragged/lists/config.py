"""Launch configuration and scratch of the ragged builders."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch

TICKETS = 2  # counters in front of the row states: programs started, programs finished


@dataclass(frozen=True)
class RaggedConfig:
    block: int
    num_warps: int
    resident: int  # programs that certainly run at once


def config(tokens: int, width: int, target: Target) -> RaggedConfig:
    """One program a row walks it in blocks; wide rows get wide blocks. Few rows have the machine to themselves, so they
    get more warps. Every quarter of a block has a column for every thread."""
    block = min(2048, max(16, 1 << max(width - 1, 0).bit_length()))
    columns = 128 if tokens <= target.num_sms else 256  # of a warp
    return RaggedConfig(block, max(1, block // columns), target.num_sms)


def scratch(tokens: int, target: Target) -> Scratch:
    """A state a row for the prefix sum across programs, and two tickets."""
    return Scratch((), tokens + TICKETS)
