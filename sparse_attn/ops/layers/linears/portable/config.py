"""What the portable product supports, and its tiles."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.framework.dispatch import YES, Support, no
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.linears.plan import Plan, Problem, Tile
from sparse_attn.ops.layers.linears.shapes import PLAIN

# Tiles, of as many columns at most, by the rows of a group above which they are taken.
# Up to 16 rows the weight's bytes bound a product: many CTAs read it, some tiles ahead.
TILES = {
    256: Tile(128, 64, 64, 8, 2), 64: Tile(64, 128, 64, 8, 2), 16: Tile(32, 64, 128, 4, 2), 0: Tile(16, 32, 128, 4, 3),
}  # fmt: skip
# fp32 is multiplied without a matrix unit: few products in a thread, for its operands are many.
FP32_TILES = {16: Tile(32, 32, 32, 4, 2), 0: Tile(16, 32, 32, 4, 2)}
INVARIANT_ROWS = 32  # of the tile that is taken, however many rows there are
INTERPRETED_TILES = {0: Tile(16, 64, 128, 4, 1)}


def supports(problem: Problem, target: Target) -> Support:
    tiles = -(-problem.outputs // plan(problem, target).block_n)
    if tiles > grid.MOST:
        most = grid.MOST * plan(problem, target).block_n
        return no(f"outputs: got {problem.outputs}, allowed: at most {most}, for which a launch has room")
    return YES


def plan(problem: Problem, target: Target) -> Plan:
    """The largest tile that the groups' rows fill, or a smaller one that gives every multiprocessor work."""
    tiles = FP32_TILES if problem.dtype == torch.float32 else TILES
    for above, tile in (INTERPRETED_TILES if target.interpreted else tiles).items():
        count = problem.tiles(tile.rows)
        if problem.batch_invariant and tile.rows == INVARIANT_ROWS:
            break
        if (
            not problem.batch_invariant
            and problem.rows_each > above
            and count * -(-problem.outputs // tile.outputs) >= target.num_sms
        ):
            break
    block_k, scaled_values = _columns(problem, tile.columns)
    return Plan(count, tile.rows, tile.outputs, block_k, scaled_values, tile.num_warps, tile.num_stages)


def _columns(problem: Problem, most: int) -> tuple[int, bool]:
    """(columns of a product, whether its values are scaled first). Codes times powers of two are exact in bf16 and in
    fp32, not in fp16, whose exponents are few."""
    if problem.codes == PLAIN:
        return most, False
    width = problem.block[1]
    within = min(width & -width, most)
    exact = problem.scale == "e8m0" and problem.dtype != torch.float16
    return (most, True) if exact and within < most and most % width == 0 else (within, False)
