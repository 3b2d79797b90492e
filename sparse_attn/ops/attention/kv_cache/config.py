"""Launch configuration of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target


@dataclass(frozen=True)
class KvCacheConfig:
    """Rows per gathering program; a writing program takes one token."""

    gather_rows: int = 8
    num_warps: int = 4


def config(target: Target) -> KvCacheConfig:
    return KvCacheConfig()
