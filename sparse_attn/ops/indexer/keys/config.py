"""Launch configuration of the index cache."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target


@dataclass(frozen=True)
class IndexCacheConfig:
    """Tokens per program."""

    write_tokens: int = 4
    gather_rows: int = 32
    num_warps: int = 4


def config(target: Target) -> IndexCacheConfig:
    return IndexCacheConfig()
