"""Launch configurations of the index scores."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target


@dataclass(frozen=True)
class LogitsConfig:
    """keys: key tile; rows: query rows a program of the contiguous form takes with one key tile; fp8_dot: whether the matrix
    unit multiplies the codes themselves; splits: programs that share a request's tiles in the paged form."""

    keys: int
    rows: int
    fp8_dot: bool
    num_warps: int
    num_stages: int
    splits: int = 1


def mqa_config(rows: int, keys: int, flavour: str, element: int, target: Target) -> LogitsConfig:
    """element: bytes of one q element."""
    native = flavour == "e4m3fn" and target.fp8_dot
    if element == 4:
        return LogitsConfig(32, 16, False, 4, 1)
    if target.interpreted:
        return LogitsConfig(64, 16, False, 4, 1)
    per_program = 64 if rows * keys >= 1 << 22 else 8
    if native:
        return LogitsConfig(128, per_program, True, 4, 3)
    return LogitsConfig(128, per_program, False, 8, 2)


def paged_config(
    requests: int, lanes: int, max_context_len: int, flavour: str, element: int, target: Target
) -> LogitsConfig:
    """lanes: query rows of a request times heads."""
    native = flavour == "e4m3fn" and target.fp8_dot
    keys = 32 if element == 4 else (128 if lanes <= 64 else 64)  # 64 lanes of 128 fp32 sums fill half the registers
    stages = 1 if element == 4 else (4 if native else 2)
    tiles = -(-max_context_len // keys)
    splits = max(1, min(tiles, 4 * target.num_sms // max(requests, 1)))
    return LogitsConfig(keys, 1, native, 4, stages, splits)
