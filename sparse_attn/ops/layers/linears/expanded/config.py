"""What the product of expanded codes supports, its tiles, and how much of a weight is expanded at a time."""

from __future__ import annotations

import torch

from sparse_attn.framework.dispatch import YES, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.layers.linears.plan import ExpandedPlan, Problem, Tile
from sparse_attn.ops.layers.linears.shapes import PLAIN
from sparse_attn.workspace import Buffer, Scratch

FEW_ROWS = 128  # of a group in the mean, for which codes are decoded in registers
MOST_BYTES = 64 << 20  # of expanded values at a time
ALIGNED = 8  # values: 16 bytes
STEP = 128  # columns, within one scale block or values that are scaled already
TILE = Tile(128, 128, STEP, 8, 3)  # with scales of fp32, sums of a step and of all take half of the registers each
FEW_TILES = Tile(64, 64, STEP, 4, 3)  # where those would leave half of the multiprocessors without work
INTERPRETED = Tile(16, 64, STEP // 2, 4, 1)


def supports(problem: Problem, target: Target) -> Support:
    if not (target.is_hopper or target.interpreted):
        return not_on(target, "sm_90")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes == PLAIN:
        return no("weight: got a plain one, allowed: packed")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False, for few rows have other kernels")
    if not problem.aligned or not problem.rows_aligned:
        allowed = "contiguous columns, rows at multiples of 16 bytes"
        return no(f"rows, codes: got any address and strides, allowed: {allowed}")
    if problem.columns % ALIGNED or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {ALIGNED}")
    if problem.block[1] % STEP and problem.scale != "e8m0":
        return no(f"scale blocks: got {problem.block[1]} columns of fp32, allowed: multiples of {STEP}")
    if not _most_outputs(problem):
        got = f"{problem.groups} groups of {problem.columns} columns"
        return no(f"weight: got {got}, allowed: {TILE.outputs} outputs of each in {MOST_BYTES} bytes of bf16")
    if problem.rows_each <= FEW_ROWS:
        return slower(f"rows: got {problem.rows_each:.0f} a group, faster from {FEW_ROWS + 1}")
    return YES


def plan(problem: Problem, target: Target) -> ExpandedPlan:
    """Scratch has room for as many outputs however many rows there are, so that a step of fewer rows wants no more."""
    most = min(problem.outputs, _most_outputs(problem))
    outputs, tile = _outputs_at_once(problem, most, target.num_sms), TILE
    if target.interpreted:
        tile = INTERPRETED
    elif 2 * problem.tiles(tile.rows) * -(-outputs // tile.outputs) <= target.num_sms:
        tile = FEW_TILES
    expanded = Buffer("expanded", (problem.groups, most, problem.columns), torch.bfloat16)
    return ExpandedPlan(
        problem.tiles(tile.rows), tile.rows, tile.outputs, tile.columns, problem.scale == "e8m0", tile.num_warps,
        tile.num_stages, scratch=Scratch((expanded,)), outputs_at_once=outputs,
    )  # fmt: skip


def _most_outputs(problem: Problem) -> int:
    return MOST_BYTES // (2 * problem.columns * problem.groups) // TILE.outputs * TILE.outputs


def _outputs_at_once(problem: Problem, most: int, num_sms: int) -> int:
    """In whole tiles: those with which products take the fewest waves, and of those the most."""
    rows = problem.tiles(TILE.rows)

    def waves(outputs: int) -> int:
        whole, rest = divmod(problem.outputs, outputs)
        parts = (-(-rows * -(-part // TILE.outputs) // num_sms) for part in (outputs, rest))
        return sum(times * each for times, each in zip((whole, 1), parts, strict=True))

    return min((most, *range(most // TILE.outputs * TILE.outputs, most // 2, -TILE.outputs)), key=waves)
