"""Launch configuration of the indexer query op; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.device import grid
from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class QueryConfig:
    """heads: index heads per program, a power of two; dim: head dim padded to a power of two."""

    heads: int
    dim: int
    num_warps: int


def config(heads: int, dim: int, target: Target) -> QueryConfig:
    return QueryConfig(*grid.block_of_heads(heads, dim), 4)


def scratch(tokens: int, target: Target) -> Scratch:
    return Scratch()
