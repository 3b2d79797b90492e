"""The kernel that every GPU has: what fits, how it is launched, and its scratch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparse_attn.dispatch import YES, Support, no
from sparse_attn.ops.attention.partials import scratch
from sparse_attn.ops.attention.problem import Problem
from sparse_attn.ops.attention.split_kv import Waves
from sparse_attn.target import Target
from sparse_attn.workspace import Scratch

MOST_SUMS = 64 * 512  # of a CTA: half of its registers; more do not fit in tensor memory either
WIDE_VALUE = 512  # padded columns of a value behind which an fp8 tile more is in flight


@dataclass(frozen=True)
class Tile:
    """block_h heads by block_k keys. hoist: what does not change from tile to tile may be computed before the first and
    kept."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int
    hoist: bool = True


@dataclass(frozen=True)
class PortablePlan:
    """waves: one launch, of all rows. Else as Tile."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int
    hoist: bool
    waves: tuple[Waves]
    scratch: Scratch

    @property
    def splits(self) -> int:
        return self.waves[0].splits


def supports(problem: Problem, target: Target) -> Support:
    tile, fits = fitting(*_shape(problem), target)
    if fits:
        return YES
    return no(
        f"d_qk: got {problem.d_qk} values of {problem.dtype.itemsize} bytes, of which {problem.d_v} are a key's value, "
        f"allowed: what fits into {target.shared_memory} bytes of shared memory, {tile.block_h} queries and "
        f"{tile.block_k} keys at a time, d_v and the rest rounded up to powers of two"
    )


def plan(problem: Problem, target: Target) -> PortablePlan:
    tile, _ = fitting(*_shape(problem), target)
    rows, indices = problem.split_as
    ctas = rows * -(-problem.heads // tile.block_h)
    most = max(1, -(-indices // max(rows, 1)) // tile.block_k)
    splits = max(1, min(most, target.num_sms // max(ctas, 1)))
    waves = (Waves(0, problem.tokens, splits),)
    return PortablePlan(
        tile.block_h, tile.block_k, tile.num_warps, tile.num_stages, tile.hoist, waves,
        scratch(waves, problem.heads, problem.d_v),
    )  # fmt: skip


def reserved(problem: Problem, target: Target) -> Iterator[Scratch]:
    """What rows like these ask for: fewer keys are not split more often."""
    yield plan(problem, target).scratch


def _shape(problem: Problem) -> tuple[int, int, int, int, bool, bool, bool]:
    """What a tile depends on: heads, columns and bytes of a query; whether every cache is fp8, whether only one of two
    is, and whether something lies between blocks of plain rows."""
    kinds = {cache.fp8 for cache in problem.caches}
    apart = any(cache.padded and not cache.fp8 for cache in problem.caches)
    sizes = problem.heads, problem.d_qk, problem.d_v, problem.dtype.itemsize
    return *sizes, kinds == {True}, len(kinds) > 1, apart


@functools.lru_cache(maxsize=1024)
def fitting(
    heads: int, d_qk: int, d_v: int, query_bytes: int, fp8: bool, mixed: bool, apart: bool, target: Target
) -> tuple[Tile, bool]:
    """The tile that a CTA takes at a time, and whether it fits into shared memory."""
    tile = _tile(min(64, max(16, 1 << (heads - 1).bit_length())), query_bytes, fp8, mixed, apart, target)

    def fits() -> bool:
        forms = (True, False) if mixed else (fp8,)
        return all(shared_bytes(tile, d_qk, d_v, query_bytes, form, target) <= target.shared_memory for form in forms)

    while tile.block_h * padded(d_v) > MOST_SUMS and tile.block_h > 16:
        tile = replace(tile, block_h=tile.block_h // 2)
    for name, least in (("block_k", 16), ("block_h", 16), ("num_stages", 1)):
        while not fits() and getattr(tile, name) > least:
            tile = replace(tile, **{name: getattr(tile, name) // 2})
    return tile, fits()


def _tile(heads: int, query_bytes: int, fp8: bool, mixed: bool, apart: bool, target: Target) -> Tile:
    """What a CTA takes at a time where shared memory allows."""
    if query_bytes == 4:
        return Tile(min(heads, 16), 16, 4, 1)
    if target.vendor == "nvidia" and not target.reads_shared_operands and (fp8 or mixed):
        # Matrix operands are registers here, and keys are decoded where they are multiplied: 32 heads of sums spill.
        return Tile(16, 64, 8, 2)
    if target.arch == "gfx950":  # here too; four waves have 512 registers each
        return Tile(heads, 16 if fp8 or mixed else 32, 4, 2)
    if target.vendor == "amd":  # waves beyond the 16 heads of each multiply the same keys again
        return Tile(16, 16, 8, 2) if heads == 16 else Tile(32 if fp8 or mixed else heads, 16, 4, 2)
    if heads < 64:
        spills = heads == 32 and fp8 and target.reads_shared_operands and target.arch != 90
        return Tile(16 if spills else heads, 64, 8, 2)
    if target.reads_shared_operands and target.arch != 90:
        # Plain tiles lie in shared memory twice. Hoisted addresses beside the sums, which pass through registers,
        # spill.
        return Tile(64, 64, 8, 3, hoist=False) if fp8 else Tile(64, 32, 8, 2, hoist=False)
    return Tile(64, 64, 8, 3 if fp8 else 2, hoist=not apart or target.arch != 90)  # measured there alone


def padded(size: int) -> int:
    """Columns that the kernel has for ``size`` of them, of a value or of what only scores; 0 for none."""
    return max(16, 1 << (size - 1).bit_length()) if size else 0


def shared_bytes(tile: Tile, d_qk: int, d_v: int, element: int, fp8: bool, target: Target) -> int:
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
        more = keys * 9 // 8 if pad_v > WIDE_VALUE else 0  # one more tile in flight
        total = queries + keys * element + int(in_flight) + more
        return max(total, ragged * value * (8 + tile.num_stages)) + 1024
    # Rows that 16-byte copies cannot take pass through registers, from where a 16-bit tile is stored for either
    # product.
    tiles = keys * element * (tile.num_stages if element == 4 else max(tile.num_stages, 2))
    twice = target.reads_shared_operands and target.arch != 90 and tile.block_h == 64  # tcgen05's operands
    return queries + tiles + twice * value * element + 1024
