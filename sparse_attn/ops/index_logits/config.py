"""Launch configurations of the index scores."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_attn.target import Target

# The warp-specialised kernels' shapes: values of a key, heads of a row, columns of a unit at most.
HOPPER_DIM, HOPPER_HEADS, HOPPER_LANES = 128, (32, 64, 128), 256


@dataclass(frozen=True)
class HopperConfig:
    """lanes: columns of a unit, its rows times heads; programs: one to a multiprocessor; tiles: of 64 keys, in flight;
    registers of a thread: the other consumers' and the producer's, the first consumer gets the rest."""

    lanes: int
    programs: int
    tiles: int = 8
    consumer_registers: int = 112
    producer_registers: int = 32


@dataclass(frozen=True)
class LogitsConfig:
    """keys: key tile; rows: query rows a program of the contiguous form takes with one key tile; fp8_dot: whether the
    matrix unit multiplies the codes themselves; splits: programs that share a request's tiles in the paged form;
    hopper: how the warp-specialised kernel is launched, for tensors that it can copy."""

    keys: int
    rows: int
    fp8_dot: bool
    num_warps: int
    num_stages: int
    splits: int = 1
    hopper: HopperConfig | None = None


WIDE = 64 * 128  # values of a row's heads in the published models; of more, fewer keys fit beside them


def mqa_config(rows: int, keys: int, heads: int, dim: int, flavour: str, element: int, target: Target) -> LogitsConfig:
    """element: bytes of one q element."""
    native = flavour == "e4m3fn" and target.fp8_dot
    if element == 4:
        return LogitsConfig(32, 16, False, 4 if target.reads_shared_operands else 8, 1)
    if target.interpreted:
        return LogitsConfig(64, 16, False, 4, 1)
    per_program = 64 if rows * keys >= 1 << 22 else 8
    if native:
        hopper = None
        if _specialised(heads, dim, target):
            hopper = HopperConfig(HOPPER_LANES, target.num_sms)
        return LogitsConfig(128, per_program, True, 4, 3, hopper=hopper)
    tile = 64 if heads * dim > WIDE and not target.reads_shared_operands else 128
    stages = 2 if (heads + tile) * dim * 2 + 2048 <= target.shared_memory else 1  # of bf16; 2048 for sums across warps
    return LogitsConfig(tile, per_program, False, 8, stages)


def paged_config(
    requests: int, next_n: int, heads: int, dim: int, max_context_len: int, flavour: str, element: int, target: Target
) -> LogitsConfig:
    lanes = next_n * heads
    native = flavour == "e4m3fn" and target.fp8_dot
    keys = 64 if native or lanes > 64 else 128  # 64: a usual block; 64 lanes of 128 fp32 sums fill half the registers
    warps = 4
    if element == 4:  # multiplied without a matrix unit: few products in a thread, for its operands are many
        keys, warps = (32 if lanes <= 64 else 16), (4 if lanes <= 32 else 8)
    elif lanes > 64 and not native and target.vendor == "nvidia" and not target.reads_shared_operands:
        warps = 8  # keys are decoded in registers, beside the sums
    stages = 1 if element == 4 else (3 if native else 2)
    tiles = -(-max_context_len // keys)
    splits = max(1, min(tiles, (6 if native else 4) * target.num_sms // max(requests, 1)))
    hopper = None
    if native and _specialised(heads, dim, target):
        rows = min(HOPPER_LANES // heads, 4, 1 << (next_n - 1).bit_length())
        hopper = HopperConfig(rows * heads, target.num_sms)
    return LogitsConfig(keys, 1, native, warps, stages, splits, hopper)


def _specialised(heads: int, dim: int, target: Target) -> bool:
    """Whatever the number of rows: which kernel scores a row may not depend on what else is in the call."""
    return (target.vendor, target.arch) == ("nvidia", 90) and heads in HOPPER_HEADS and dim == HOPPER_DIM
