"""Launch configurations of sparse attention, and the scratch their split form needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparse_attn.layout import LatentFp8Layout
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch


# The warp-specialised kernels' shape: columns of a value, columns that only score, heads of a program.
HOPPER_VALUE, HOPPER_REST, HOPPER_HEADS = 512, 64, 64
HOPPER_PAIR = 128  # keys it takes at a time


@dataclass(frozen=True)
class AttentionConfig:
    """block_h heads by block_k keys per tile; splits programs share a row's keys, merged afterwards. hoist: what does not
    change from tile to tile may be computed before the first and kept."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    hoist: bool = True


def config(
    tokens: int, heads: int, d_qk: int, capacity: int, query_bytes: int, fp8: bool, target: Target, mixed: bool = False
) -> AttentionConfig:
    """capacity: how many indices the rows may hold in all, of two caches together; query_bytes: bytes of one q element;
    fp8: whether every cache is; mixed: whether only one of two is."""
    tile = _tile(min(64, max(16, 1 << (heads - 1).bit_length())), query_bytes, fp8, mixed, target)
    block_h, block_k, num_stages = tile.block_h, tile.block_k, tile.num_stages
    while _shared_bytes(block_h, block_k, num_stages, d_qk, query_bytes, fp8) > target.shared_memory and block_k > 16:
        block_k //= 2
    while _shared_bytes(block_h, block_k, num_stages, d_qk, query_bytes, fp8) > target.shared_memory and block_h > 16:
        block_h //= 2
    programs = tokens * -(-heads // block_h)
    row = -(-capacity // max(tokens, 1))
    most = max(1, row // block_k)
    splits = max(1, min(most, target.num_sms // max(programs, 1)))
    return replace(tile, block_h=block_h, block_k=block_k, splits=splits)


def _tile(heads: int, query_bytes: int, fp8: bool, mixed: bool, target: Target) -> AttentionConfig:
    """What a program takes at a time where shared memory allows."""
    if query_bytes == 4:
        return AttentionConfig(min(heads, 16), 16, 4, 1)
    if target.vendor == "nvidia" and not target.reads_shared_operands and (fp8 or mixed):
        # Matrix operands are registers here, and keys are decoded where they are multiplied: 32 heads of sums spill.
        return AttentionConfig(16, 64, 8, 2)
    if target.arch == "gfx950":  # here too; four waves have 512 registers each
        return AttentionConfig(heads, 16 if fp8 or mixed else 32, 4, 2)
    if heads < 64:
        return AttentionConfig(heads, 64, 8, 2)
    if target.reads_shared_operands and target.arch != 90:
        # Plain tiles lie in shared memory twice. Hoisted addresses beside the sums, which pass through registers, spill.
        return AttentionConfig(64, 64, 8, 3, hoist=False) if fp8 else AttentionConfig(64, 32, 8, 2, hoist=False)
    return AttentionConfig(64, 64, 8, 3 if fp8 else 2)


def _shared_bytes(block_h: int, block_k: int, num_stages: int, d_qk: int, element: int, fp8: bool) -> int:
    """At least about what the compiler takes: queries, key tiles in flight, and for fp8 one dequantised tile.

    An fp8 record is an eighth longer than one byte per value: its scales and its bf16 values. Two caches are read one
    after the other and share the memory; where only one of them is fp8, the plain tiles are the larger.
    """
    keys = block_k * d_qk
    tiles = keys * element + (num_stages - 1) * keys * 9 // 8 if fp8 else num_stages * keys * element
    return block_h * d_qk * element + tiles + 1024


@dataclass(frozen=True)
class HopperConfig:
    """Registers a thread of the right-hand consumer and of the producer get; the left-hand one gets the rest. splits:
    programs that share a row."""

    consumer_registers: int = 216
    producer_registers: int = 72
    num_warps: int = 4
    splits: int = 1


def hopper(tokens: int, heads: int, d_qk: int, d_v: int, dtype: torch.dtype, target: Target) -> HopperConfig | None:
    """The warp-specialised kernel's configuration where it applies and pays: bf16 rows of its width, whole blocks of
    heads, and a program for every other multiprocessor, since it does not split a row. None: the portable kernel."""
    if (target.vendor, target.arch) != ("nvidia", 90) or dtype != torch.bfloat16:
        return None
    if d_v != HOPPER_VALUE or d_qk - d_v not in (0, HOPPER_REST) or heads % HOPPER_HEADS:
        return None
    return HopperConfig() if 2 * tokens * (heads // HOPPER_HEADS) >= target.num_sms else None


def hopper_latents(
    tokens: int, heads: int, capacity: int, layout: LatentFp8Layout, dtype: torch.dtype, target: Target
) -> HopperConfig | None:
    """The dequantising kernel's configuration where it applies and pays; rows are split so that every multiprocessor has
    work, but its start is long: shares of a few hundred keys are left to the portable kernel."""
    if (target.vendor, target.arch) != ("nvidia", 90) or dtype != torch.bfloat16 or heads % HOPPER_HEADS:
        return None
    if (layout.latent, layout.rope, layout.flavour) != (HOPPER_VALUE, HOPPER_REST, "e4m3fn"):
        return None
    if HOPPER_VALUE // 2 % layout.group or layout.group % 16 or layout.group & (layout.group - 1):
        return None
    programs = tokens * (heads // HOPPER_HEADS)
    if 5 * programs < target.num_sms:
        return None
    pairs = -(-capacity // (max(tokens, 1) * HOPPER_PAIR))
    splits = max(1, min(pairs, target.num_sms // programs))
    return HopperConfig(consumer_registers=200, producer_registers=104, splits=splits)


def scratch(tokens: int, heads: int, d_v: int, splits: int) -> Scratch:
    """fp32 partial outputs and base-2 lse of every split; nothing without splits."""
    if splits == 1:
        return Scratch()
    return Scratch(
        (
            Buffer("partial_out", (splits, tokens, heads, d_v), torch.float32),
            Buffer("partial_lse", (splits, tokens, heads), torch.float32),
        )
    )
