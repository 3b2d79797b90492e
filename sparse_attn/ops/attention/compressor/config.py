"""Launch configuration of the compressor; it needs no scratch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.framework.target import Target
from sparse_attn.workspace import Scratch


@dataclass(frozen=True)
class CompressorConfig:
    """rows: tokens pooled at a time; keep_columns: values of a row that a keeping program writes."""

    rows: int
    num_warps: int
    keep_columns: int


def config(dim: int, span: int, target: Target) -> CompressorConfig:
    """span: tokens that an entry pools. A CTA takes 4096 values of kv and as many of gate at a time, 16 of each a
    thread."""
    padded = 1 << (dim - 1).bit_length()
    rows = max(1, min(1 << (span - 1).bit_length(), 4096 // padded))
    return CompressorConfig(rows, max(1, min(8, rows * padded // 512)), 1024)


def scratch(target: Target) -> Scratch:
    return Scratch()
