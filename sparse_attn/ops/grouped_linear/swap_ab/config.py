"""What the swap-AB product supports, its tiles, and its splits."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.dispatch import YES, Support, no, slower
from sparse_attn.ops.grouped_linear.plan import Plan, Problem, Tile
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

CODES = {"e2m1": ("e8m0", (1, 32)), "e4m3": ("", (0, 128))}  # scale, and block: columns are a multiple of the latter
BLOCK_N = 64  # what a warpgroup multiplies at once
ROWS = (8, 16, 32, 64)  # of a tile
INVARIANT_ROWS = 32  # of a tile, however many rows there are
MOST_ROWS = 128  # in the mean of a group
STAGES_BYTES = 72 << 10  # shared memory of a CTA's tiles in flight
CTAS = 4  # that an SM holds, by their registers
SPLIT_STEPS = 4  # of a split at least
INVARIANT_MOST = 512  # rows whose batch-invariant partials are there at once
PREFETCH = 512  # bytes of an output: of all CTAs, what the memory gives in a few microseconds


def supports(problem: Problem, target: Target) -> Support:
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes not in CODES:
        return no(f"codes: got {problem.codes}, allowed: {', '.join(CODES)}")
    scale, block = CODES[problem.codes]
    wrong = problem.block != block if scale else problem.block[1] % block[1]
    if wrong or scale not in ("", problem.scale):
        allowed = "1x32 of e8m0" if scale else f"a multiple of {block[1]} columns"
        return no(f"scale blocks: got {problem.block[0]}x{problem.block[1]} of {problem.scale}, allowed: {allowed}")
    block_k = plan(problem, target).block_k
    if problem.columns % block_k or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {block_k}")
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.outputs > grid.MOST * BLOCK_N:
        most = grid.MOST * BLOCK_N
        return no(f"outputs: got {problem.outputs}, allowed: at most {most}, for which a launch has room")
    if problem.rows_each > MOST_ROWS and not problem.batch_invariant:
        return slower(f"rows: got {problem.rows_each:.0f} a group, allowed: at most {MOST_ROWS}")
    if target.vendor == "amd":
        return slower(f"target: got {target.name}, allowed: where it was measured")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    """The smallest tile that holds a group's rows in the mean; columns are split where that fills the machine. With
    batch_invariant neither follows from the number of rows."""
    block_m = next((rows for rows in ROWS if problem.rows_each <= rows), ROWS[-1])
    if problem.batch_invariant:
        block_m = INVARIANT_ROWS
    fp4 = problem.codes == "e2m1"
    block_k = 256 if fp4 and block_m < 64 else 128
    stage = 2 * block_m * block_k + BLOCK_N * (block_k // 2 if fp4 else block_k)
    num_stages = 1 if target.interpreted else min(4, STAGES_BYTES // stage)
    tile = Tile(block_m, BLOCK_N, block_k, 4, num_stages)
    tiles = problem.groups if problem.batch_invariant else _tiles(problem, block_m)
    ctas = tiles * -(-problem.outputs // BLOCK_N)
    return planned(problem, tile, min(problem.columns // block_k // SPLIT_STEPS, CTAS * target.num_sms // max(1, ctas)))


def planned(problem: Problem, tile: Tile, splits: int) -> Plan:
    """With ``splits`` at most, so many that none is empty."""
    steps = problem.columns // tile.columns
    splits = -(-steps // -(-steps // max(1, splits))) if steps else 1
    return Plan(
        _tiles(problem, tile.rows), tile.rows, tile.outputs, tile.columns, problem.codes == "e2m1", tile.num_warps,
        tile.num_stages, splits, 0 if problem.ends else PREFETCH, tile.registers, _scratch(problem, tile, splits),
    )  # fmt: skip


def _tiles(problem: Problem, rows: int) -> int:
    """Of rows, at most."""
    groups = problem.tiled_groups
    return groups + (problem.rows - groups) // rows if problem.ends else -(-problem.rows // rows)


def rows_at_once(problem: Problem, splits: int) -> int:
    """Rows of a launch. Batch-invariant splits do not get fewer with more rows."""
    parted = problem.batch_invariant and splits > 1 and not problem.ends
    return min(problem.rows, INVARIANT_MOST) if parted else problem.rows


def _scratch(problem: Problem, tile: Tile, splits: int) -> Scratch:
    """Rows in the order of the codes; partials, and how many of a tile there are."""
    rows = rows_at_once(problem, splits)
    placed = Buffer("placed", (rows, problem.columns), problem.dtype)
    if splits == 1:
        return Scratch((placed,))
    partials = Buffer("partials", (splits, rows, problem.outputs), torch.float32)
    tiles = _tiles(problem._replace(rows=rows), tile.rows)
    return Scratch((placed, partials), tiles * -(-problem.outputs // tile.outputs))
