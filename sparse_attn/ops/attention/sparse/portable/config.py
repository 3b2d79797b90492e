"""The portable kernel: what fits into shared memory, how it is launched, and its scratch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparse_attn.framework.dispatch import YES, Support, no
from sparse_attn.framework.target import Target
from sparse_attn.ops.attention.sparse.partials import scratch
from sparse_attn.ops.attention.sparse.problem import Problem
from sparse_attn.ops.attention.sparse.split_kv import Waves
from sparse_attn.workspace import Scratch

MOST_SUMS = 64 * 512  # of a CTA: half of its registers; more do not fit in tensor memory either
WIDE_VALUE = 512  # padded columns; of a wider value one fp8 tile more is in flight


@dataclass(frozen=True)
class Tile:
    """block_m heads by block_n keys. hoist: whether what all tiles share may be computed before the loop and kept."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    hoist: bool = True


@dataclass(frozen=True)
class PortablePlan:
    """waves: one launch of all rows. Others as Tile's."""

    block_m: int
    block_n: int
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
        f"allowed: what fits into {target.shared_memory} bytes of shared memory, {tile.block_m} queries and "
        f"{tile.block_n} keys at a time, d_v and the rest rounded up to powers of two"
    )


def plan(problem: Problem, target: Target) -> PortablePlan:
    tile, _ = fitting(*_shape(problem), target)
    rows, indices = problem.split_as
    ctas = rows * -(-problem.heads // tile.block_m)
    most = max(1, -(-indices // max(rows, 1)) // tile.block_n)
    splits = max(1, min(most, target.num_sms // max(ctas, 1)))
    waves = (Waves(0, problem.tokens, splits),)
    return PortablePlan(
        tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.hoist, waves,
        scratch(waves, problem.heads, problem.d_v, max_logits=problem.max_logits),
    )  # fmt: skip


def reserved(problem: Problem, target: Target) -> Iterator[Scratch]:
    """What rows like these ask for: fewer keys are not split more often."""
    yield plan(problem, target).scratch


def _shape(problem: Problem) -> tuple[int, int, int, int, bool, bool, bool]:
    """What a tile depends on: (heads, d_qk, d_v, bytes of an element, whether every cache is fp8, whether only one of
    two is, whether something lies between the blocks of a plain one)."""
    kinds = {cache.fp8 for cache in problem.caches}
    apart = any(cache.padded and not cache.fp8 for cache in problem.caches)
    sizes = problem.heads, problem.d_qk, problem.d_v, problem.dtype.itemsize
    return *sizes, kinds == {True}, len(kinds) > 1, apart


@functools.lru_cache(maxsize=1024)
def fitting(
    heads: int, d_qk: int, d_v: int, query_bytes: int, fp8: bool, mixed: bool, apart: bool, target: Target
) -> tuple[Tile, bool]:
    """The largest tile up to the preferred one that fits into shared memory, or the smallest, which does not."""
    tile = _tile(min(64, max(16, 1 << (heads - 1).bit_length())), query_bytes, fp8, mixed, apart, target)

    def fits() -> bool:
        forms = (True, False) if mixed else (fp8,)
        return all(shared_bytes(tile, d_qk, d_v, query_bytes, form, target) <= target.shared_memory for form in forms)

    while tile.block_m * padded(d_v) > MOST_SUMS and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2)
    for name, least in (("block_n", 16), ("block_m", 16), ("num_stages", 1)):
        while not fits() and getattr(tile, name) > least:
            tile = replace(tile, **{name: getattr(tile, name) // 2})
    return tile, fits()


def _tile(heads: int, query_bytes: int, fp8: bool, mixed: bool, apart: bool, target: Target) -> Tile:
    """The preferred tile."""
    if query_bytes == 4:
        return Tile(min(heads, 16), 16, 4, 1)
    if target.vendor == "nvidia" and not target.reads_shared_operands and (fp8 or mixed):
        # Matrix operands are registers, and keys are decoded where they are multiplied. 32 heads' sums would spill.
        return Tile(16, 64, 8, 2)
    if target.arch == "gfx950":  # operands are registers here too; each thread of four warps has 512
        return Tile(heads, 16 if fp8 or mixed else 32, 4, 2)
    if target.vendor == "amd":  # a warp takes 16 heads; more warps than that multiply the same keys again
        return Tile(16, 16, 8, 2) if heads == 16 else Tile(32 if fp8 or mixed else heads, 16, 4, 2)
    if heads < 64:
        spills = heads == 32 and fp8 and target.reads_shared_operands and target.arch != 90
        return Tile(16 if spills else heads, 64, 8, 2)
    if target.reads_shared_operands and target.arch != 90:
        # Plain tiles lie in shared memory twice. Sums pass through registers, where hoisted addresses would spill.
        return Tile(64, 64, 8, 3, hoist=False) if fp8 else Tile(64, 32, 8, 2, hoist=False)
    return Tile(64, 64, 8, 3 if fp8 else 2, hoist=not apart or target.arch != 90)  # measured on sm_90 alone


def padded(size: int) -> int:
    """Columns of the kernel's tile for ``size`` of a key's: of its value, or of its rope. 0 for none."""
    return max(16, 1 << (size - 1).bit_length()) if size else 0


def shared_bytes(tile: Tile, d_qk: int, d_v: int, element: int, fp8: bool, target: Target) -> int:
    """At least what the compiler takes: queries, key tiles in flight, and for fp8 one dequantised tile.

    An fp8 record takes an eighth more than a byte per value, for its scales and its bf16 values. Two caches are read
    one after the other and share the memory; where only one of them is fp8, the plain tiles are the larger. On AMD
    queries and dequantised tiles pass through shared memory into registers, queries before there are tiles.
    """
    pad_v, pad_rope = padded(d_v), padded(d_qk - d_v)
    queries, keys = tile.block_m * (pad_v + pad_rope) * element, tile.block_n * (pad_v + pad_rope)
    value = tile.block_n * pad_v
    ragged = fp8 and pad_v > d_v  # then groups fill no tile, and threads exchange fp32 values of [keys, columns]
    in_flight = (tile.num_stages - 1) * keys * (9 / 8 if fp8 else element)
    if target.vendor == "amd":
        passing = max(tile.block_m, tile.block_n) * max(pad_v, pad_rope) * element
        return max(passing, ragged * value * 6, fp8 * keys * element + int(in_flight))
    if fp8:
        more = keys * 9 // 8 if pad_v > WIDE_VALUE else 0  # one more tile in flight
        total = queries + keys * element + int(in_flight) + more
        return max(total, ragged * value * (8 + tile.num_stages)) + 1024
    # Rows that are not copied by 16 bytes pass through registers, and a 16-bit tile is stored from there for each
    # product.
    tiles = keys * element * (tile.num_stages if element == 4 else max(tile.num_stages, 2))
    twice = target.reads_shared_operands and target.arch != 90 and tile.block_m == 64  # tcgen05's operands
    return queries + tiles + twice * value * element + 1024
