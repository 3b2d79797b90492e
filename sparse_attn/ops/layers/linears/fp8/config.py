"""Tiles of the product of fp8 rows and weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.device import grid
from sparse_attn.framework.dispatch import YES, Support, no, not_on
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.linears.plan import Plan, Problem, Tile
from sparse_attn.workspace import Buffer, Scratch

GROUP = 128  # columns under one scale of a row
BLOCK = 32  # of whose multiples scale blocks have columns
TILES = (Tile(128, 64, GROUP, 8, 3), Tile(64, 64, GROUP, 4, 3), Tile(16, 64, GROUP, 4, 3))
# Where the matrix unit reads fp8 out of shared memory, instead of the first, and of the others with tiles for all
# multiprocessors: sums of all steps and of one take half of the registers each.
WIDE = Tile(128, 128, GROUP, 8, 4)
WIDE_FEW = Tile(64, 128, GROUP, 4, 4)
INVARIANT_TILE = TILES[1]  # however many rows there are


TORCH_ROWS, TORCH_COLUMNS = 16, 512  # torch's product has multiples of these, so that scales lie as it wants them


def torch_supports(problem: Problem, target: Target) -> Support:
    """torch.nn.functional.scaled_mm with blocks of 1 x 128 and 128 x 128."""
    if not target.is_hopper or not hasattr(F, "scaled_mm"):
        return not_on(target, "sm_90, with a torch that has scaled_mm")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False, for it chooses by rows")
    if problem.ends:
        return no("ends: got some, allowed: none")
    if (problem.codes, problem.block) != ("e4m3", (GROUP, GROUP)):
        return no(f"weight: got {problem.codes} of {problem.block}, allowed: e4m3 of {(GROUP, GROUP)}")
    if not problem.whole:
        return no("weight: got a scale block that was cut, allowed: whole ones")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if not problem.aligned:
        return no("codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes")
    if problem.columns % TORCH_COLUMNS or problem.outputs % GROUP:
        return no(
            f"outputs, columns: got {problem.outputs} and {problem.columns}, allowed: multiples of {GROUP} and "
            f"{TORCH_COLUMNS}"
        )
    return YES


def torch_plan(problem: Problem, target: Target) -> Plan:
    """torch tiles as it likes. Rows that fill up the last TORCH_ROWS hold anything. It takes no bytes for scales of the
    weight, so those are widened."""
    rows, groups = -(-problem.rows // TORCH_ROWS) * TORCH_ROWS, problem.columns // GROUP
    buffers = Buffer("rows", (rows, problem.columns), torch.uint8), Buffer("row_scales", (groups, rows), torch.float32)
    widened = Buffer("scales", (problem.outputs // GROUP, groups), torch.float32)
    scratch = Scratch(buffers if problem.scale == "fp32" else (*buffers, widened))
    return Plan(0, 0, 1, 0, False, 0, 0, scratch=scratch)


def plan(problem: Problem, target: Target) -> Plan:
    """The largest tile that the groups' rows fill in the mean; a larger one where that is faster."""
    tile = next((tile for tile in TILES if problem.rows_each >= tile.rows), TILES[-1])
    if target.fp8_dot and target.reads_shared_operands:
        tile = _wide(tile, problem, target)
    if problem.batch_invariant:
        tile = INVARIANT_TILE
    if target.interpreted:
        tile = TILES[-1]._replace(num_stages=1)
    grid.check("outputs", problem.outputs, tile.outputs)
    block_k = GROUP if problem.block[1] % GROUP == 0 else BLOCK
    row_groups = -(-problem.columns // GROUP)
    scratch = Scratch((
        Buffer("rows", (problem.rows, row_groups * GROUP), torch.uint8),
        Buffer("row_scales", (problem.rows, row_groups), torch.float32),
    ))  # fmt: skip
    return Plan(
        problem.tiles(tile.rows), tile.rows, tile.outputs, block_k, False, tile.num_warps, tile.num_stages,
        scratch=scratch,
    )  # fmt: skip


def _wide(tile: Tile, problem: Problem, target: Target) -> Tile:
    """What is taken instead of ``tile``, one of TILES. Groups of fewer rows than the last tile has keep it."""
    if tile is TILES[0]:
        return WIDE
    ctas = problem.tiles(WIDE_FEW.rows) * -(-problem.outputs // WIDE_FEW.outputs)
    fits = problem.codes == "e4m3" and problem.block[1] % GROUP == 0 and problem.rows_each >= tile.rows
    return WIDE_FEW if fits and ctas >= target.num_sms else tile
