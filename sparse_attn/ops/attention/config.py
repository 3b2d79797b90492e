"""Launch configurations of sparse attention, and the scratch their split form needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparse_attn.layout import LatentFp8Layout, PlanarFp8Layout
from sparse_attn.ops.attention.hopper import constants
from sparse_attn.ops.attention.split_kv import MOST_TURNS, PAIRS, TILES, Part, parts_of
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch, size_of

HOPPER_VALUE, HOPPER_REST = constants.D_V, constants.D_ROPE
HOPPER_HEADS = constants.BLOCK_M
HOPPER_PAIR = 2 * constants.BLOCK_N
HOPPER_UNIT = constants.LOAD_BYTES
HANDED_OUT = Scratch(counters=1)  # how many of their rows the persistent kernel's programs have taken
FEW_HEADS = constants.SWAP_AB_HEADS
FEW_TILE = constants.BLOCK_N
MOST_SUMS = 64 * 512  # of a portable program: half of its registers; more do not fit in tensor memory either

Fp8Layout = LatentFp8Layout | PlanarFp8Layout


@dataclass(frozen=True)
class AttentionConfig:
    """block_h heads by block_k keys per tile; splits programs share a row's keys, merged afterwards. hoist: what does
    not change from tile to tile may be computed before the first and kept."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    hoist: bool = True


def config(
    tokens: int,
    heads: int,
    d_qk: int,
    d_v: int,
    capacity: int,
    query_bytes: int,
    fp8: bool,
    target: Target,
    mixed: bool = False,
    apart: bool = False,
) -> AttentionConfig:
    """capacity: how many indices the rows may hold in all, of two caches together; query_bytes: bytes of one q element;
    fp8: whether every cache is; mixed: whether only one of two is; apart: whether blocks of plain rows lie apart."""
    tile = _tile(min(64, max(16, 1 << (heads - 1).bit_length())), query_bytes, fp8, mixed, apart, target)

    def fits() -> bool:
        forms = (True, False) if mixed else (fp8,)
        return all(_shared_bytes(tile, d_qk, d_v, query_bytes, form, target) <= target.shared_memory for form in forms)

    while tile.block_h * padded(d_v) > MOST_SUMS and tile.block_h > 16:
        tile = replace(tile, block_h=tile.block_h // 2)
    for name, least in (("block_k", 16), ("block_h", 16), ("num_stages", 1)):
        while not fits() and getattr(tile, name) > least:
            tile = replace(tile, **{name: getattr(tile, name) // 2})
    if not fits():
        raise ValueError(
            f"d_qk: got {d_qk} values of {query_bytes} bytes, of which {d_v} are a key's value, allowed: what fits into "
            f"{target.shared_memory} bytes of shared memory, {tile.block_h} queries and {tile.block_k} keys at a time, d_v "
            "and the rest rounded up to powers of two"
        )
    programs = tokens * -(-heads // tile.block_h)
    row = -(-capacity // max(tokens, 1))
    most = max(1, row // tile.block_k)
    splits = max(1, min(most, target.num_sms // max(programs, 1)))
    return replace(tile, splits=splits)


def _tile(heads: int, query_bytes: int, fp8: bool, mixed: bool, apart: bool, target: Target) -> AttentionConfig:
    """What a program takes at a time where shared memory allows."""
    if query_bytes == 4:
        return AttentionConfig(min(heads, 16), 16, 4, 1)
    if target.vendor == "nvidia" and not target.reads_shared_operands and (fp8 or mixed):
        # Matrix operands are registers here, and keys are decoded where they are multiplied: 32 heads of sums spill.
        return AttentionConfig(16, 64, 8, 2)
    if target.arch == "gfx950":  # here too; four waves have 512 registers each
        return AttentionConfig(heads, 16 if fp8 or mixed else 32, 4, 2)
    if target.vendor == "amd":  # waves beyond the 16 heads of each multiply the same keys again
        return (
            AttentionConfig(16, 16, 8, 2) if heads == 16 else AttentionConfig(32 if fp8 or mixed else heads, 16, 4, 2)
        )
    if heads < 64:
        spills = heads == 32 and fp8 and target.reads_shared_operands and target.arch != 90
        return AttentionConfig(16 if spills else heads, 64, 8, 2)
    if target.reads_shared_operands and target.arch != 90:
        # Plain tiles lie in shared memory twice. Hoisted addresses beside the sums, which pass through registers,
        # spill.
        return AttentionConfig(64, 64, 8, 3, hoist=False) if fp8 else AttentionConfig(64, 32, 8, 2, hoist=False)
    return AttentionConfig(64, 64, 8, 3 if fp8 else 2, hoist=not apart or target.arch != 90)  # measured there alone


def padded(size: int) -> int:
    """Columns that the kernel has for ``size`` of them, of a value or of what only scores; 0 for none."""
    return max(16, 1 << (size - 1).bit_length()) if size else 0


def _shared_bytes(tile: AttentionConfig, d_qk: int, d_v: int, element: int, fp8: bool, target: Target) -> int:
    """At least what the compiler takes: queries, key tiles in flight, and for fp8 one dequantised tile.

    An fp8 record is an eighth longer than one byte per value: its scales and its bf16 values. Two caches are read one
    after the other and share the memory; where only one of them is fp8, the plain tiles are the larger. On AMD queries
    and dequantised tiles pass through on their way into registers, queries before there are tiles.
    """
    pad_v, pad_rest = padded(d_v), padded(d_qk - d_v)
    queries, keys = tile.block_h * (pad_v + pad_rest) * element, tile.block_k * (pad_v + pad_rest)
    value = tile.block_k * pad_v
    ragged = fp8 and pad_v > d_v  # then groups are no tile, and values of [keys, columns] change hands in fp32
    in_flight = (tile.num_stages - 1) * keys * (9 / 8 if fp8 else element)
    if target.vendor == "amd":
        passing = max(tile.block_h, tile.block_k) * max(pad_v, pad_rest) * element
        return max(passing, ragged * value * 6, fp8 * keys * element + int(in_flight))
    if fp8:
        more = keys * 9 // 8 if pad_v > HOPPER_VALUE else 0  # one more tile in flight
        total = queries + keys * element + int(in_flight) + more
        return max(total, ragged * value * (8 + tile.num_stages)) + 1024
    # Rows that 16-byte copies cannot take pass through registers, from where a 16-bit tile is stored for either
    # product.
    tiles = keys * element * (tile.num_stages if element == 4 else max(tile.num_stages, 2))
    twice = target.reads_shared_operands and target.arch != 90 and tile.block_h == 64  # tcgen05's operands
    return queries + tiles + twice * value * element + 1024


@dataclass(frozen=True)
class HopperConfig:
    """Registers a thread of the right-hand consumer and of a producer get; the left-hand consumer gets the rest. parts:
    of a step, launched one after the other; none for the persistent kernel."""

    consumer_registers: int = 216
    producer_registers: int = 72
    num_warps: int = 4
    parts: tuple[Part, ...] = ()


def hopper(tokens: int, heads: int, d_qk: int, d_v: int, dtype: torch.dtype, target: Target) -> HopperConfig | None:
    """The warp-specialised kernel's configuration where it applies and pays: bf16 rows of its width, whole blocks of
    heads, and a program for every third multiprocessor, since it does not split a row. None: the portable kernel."""
    if (
        not _is_hopper(target, dtype)
        or d_v != HOPPER_VALUE
        or d_qk - d_v not in (0, HOPPER_REST)
        or heads % HOPPER_HEADS
    ):
        return None
    return HopperConfig() if 3 * tokens * (heads // HOPPER_HEADS) >= target.num_sms else None


def hopper_fp8(
    tokens: int,
    heads: int,
    capacity: int,
    layout: Fp8Layout,
    dtype: torch.dtype,
    target: Target,
    invariant: int | None = None,
) -> HopperConfig | None:
    """The configuration of the kernel with two producers where it applies: whole blocks of heads over fp8 latents, or
    one or two planar caches. capacity: as ``config`` has it; invariant: as ``Step`` does."""
    if not _is_hopper(target, dtype) or tokens == 0 or heads % HOPPER_HEADS or not _hopper_reads(layout):
        return None
    pairs = -(-capacity // (tokens * HOPPER_PAIR))
    parts = parts_of(PAIRS, tokens, heads // HOPPER_HEADS, pairs, target.num_sms, invariant)
    return HopperConfig(192, 64, parts=parts)


@dataclass(frozen=True)
class FewHeadsConfig:
    """heads: of a program, padded to what the matrix unit takes. producer_registers: of a thread of two producers;
    asker_registers: of the one that asks for fp8 keys; the consumer gets the rest. parts: of a step, launched one after
    the other."""

    heads: int
    producer_registers: int
    asker_registers: int
    parts: tuple[Part, ...]
    num_warps: int = 4


def hopper_few_heads(
    tokens: int,
    heads: int,
    d_qk: int,
    d_v: int,
    capacity: int,
    layout: Fp8Layout | None,
    dtype: torch.dtype,
    target: Target,
    invariant: int | None = None,
) -> FewHeadsConfig | None:
    """The configuration of the kernel for at most 32 heads where it applies: bf16 queries of its width over plain bf16
    rows (``layout`` None), fp8 latents or one or two planar caches. capacity: as ``config`` has it; invariant: as
    ``Step`` does."""
    if not _is_hopper(target, dtype) or tokens == 0 or heads > FEW_HEADS:
        return None
    if d_v != HOPPER_VALUE or d_qk - d_v not in (0, HOPPER_REST):
        return None
    if layout is not None and (not _hopper_reads(layout) or d_qk != layout.dim):
        return None
    padded = 16 if heads <= 16 else 32
    registers = 136 if layout is None else 112 if padded == 16 else 104
    asker = 96 if padded == 16 else 80
    tiles = max(1, -(-capacity // (tokens * FEW_TILE)))
    return FewHeadsConfig(padded, registers, asker, parts_of(TILES, tokens, 1, tiles, target.num_sms, invariant))


def _is_hopper(target: Target, dtype: torch.dtype) -> bool:
    return (target.vendor, target.arch) == ("nvidia", 90) and dtype == torch.bfloat16


def _hopper_reads(layout: Fp8Layout) -> bool:
    """Whether the Hopper kernels' producers know these records."""
    codes, groups = HOPPER_VALUE, (64, 128)
    if isinstance(layout, PlanarFp8Layout):
        codes, groups = HOPPER_VALUE - HOPPER_REST, (64,)
    return (layout.latent, layout.rope, layout.flavour) == (codes, HOPPER_REST, "e4m3fn") and layout.group in groups


def most_split_rows(target: Target) -> int:
    """Rows of a step beyond which no kernel has several programs share a row, and so none takes scratch."""
    return (MOST_TURNS + 1) * target.num_sms


def largest_special_scratch(
    tokens: int,
    heads: int,
    d_qk: int,
    d_v: int,
    keys: int,
    layout: Fp8Layout | None,
    dtype: torch.dtype,
    target: Target,
    invariant: int | None = None,
) -> Scratch:
    """The most scratch that the kernel that Hopper has for this shape needs: for rows of ``keys`` indices or fewer,
    since fewer keys may be split more often; nothing where there is no such kernel. invariant: as ``Step`` has it."""
    if not _is_hopper(target, dtype) or tokens > most_split_rows(target):
        return Scratch()

    def parts(row: int) -> tuple[Part, ...]:
        chosen = hopper_few_heads(tokens, heads, d_qk, d_v, tokens * row, layout, dtype, target, invariant)
        if chosen is None and layout is not None:
            chosen = hopper_fp8(tokens, heads, tokens * row, layout, dtype, target, invariant)
        return () if chosen is None else chosen.parts

    launches = {parts(row) for row in range(keys, 0, -FEW_TILE)} if layout is not None or heads <= FEW_HEADS else ()
    all_of = (scratch(launch, heads, d_v, scaled=heads > FEW_HEADS) for launch in launches)
    return max(all_of, key=lambda one: size_of(one).nbytes, default=Scratch())


def scratch(parts: tuple[Part, ...], heads: int, d_v: int, scaled: bool = False) -> Scratch:
    """fp32 partial outputs and base-2 lse of every split, for each part of a step that is split; scaled: fp16 outputs,
    and a scale for each half of their columns."""
    return Scratch(
        tuple(buffer for part in parts if part.splits > 1 for buffer in _shares_of(part, heads, d_v, scaled))
    )


def _shares_of(part: Part, heads: int, d_v: int, scaled: bool) -> Iterator[Buffer]:
    sums = part.splits, part.rows, heads
    yield Buffer("partial_out", (*sums, d_v), torch.float16 if scaled else torch.float32)
    yield Buffer("partial_lse", sums, torch.float32)
    if scaled:
        yield Buffer("partial_scale", (*sums, 2), torch.float32)
