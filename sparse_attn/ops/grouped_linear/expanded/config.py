"""What the product of expanded codes supports, its tiles, and how much of a weight is expanded at a time."""

from __future__ import annotations

import torch

from sparse_attn.dispatch import YES, Support, no, not_on, slower
from sparse_attn.ops.grouped_linear.plan import Plan, Problem, Tile
from sparse_attn.ops.grouped_linear.shapes import PLAIN
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

FEW_ROWS = 128  # of a group in the mean, for which codes are decoded in registers
MOST_BYTES = 64 << 20  # of expanded values at a time
ALIGNED = 8  # values: 16 bytes
STEP = 128  # columns, within one scale block or values that are scaled already
CODES = Tile(128, 128, STEP, 8, 3)  # a step's product has a scale, and sums of its own: half of the registers each
SCALED = Tile(128, 256, STEP // 2, 8, 4)
FEW_TILES = Tile(64, 64, STEP, 4, 3)  # where those would leave multiprocessors without work
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
    if problem.block[1] % STEP and not scaled(problem):
        return no(f"scale blocks: got {problem.block[1]} columns of fp32, allowed: multiples of {STEP}")
    if not _most_outputs(problem):
        got = f"{problem.groups} groups of {problem.columns} columns"
        return no(f"weight: got {got}, allowed: {CODES.outputs} outputs of each in {MOST_BYTES} bytes of bf16")
    if problem.rows_each <= FEW_ROWS:
        return slower(f"rows: got {problem.rows_each:.0f} a group, faster from {FEW_ROWS + 1}")
    return YES


def scaled(problem: Problem) -> bool:
    """Whether values are scaled when they are expanded: where a step's columns have several scales, powers of two."""
    return problem.scale == "e8m0" and problem.block[1] % STEP != 0


def plan(problem: Problem, target: Target) -> Plan:
    outputs = _outputs(problem)
    tile = SCALED if scaled(problem) else CODES
    if target.interpreted:
        tile = INTERPRETED
    elif problem.tiles(tile.rows) * -(-outputs // tile.outputs) < target.num_sms:
        tile = FEW_TILES
    expanded = Buffer("expanded", (problem.groups, outputs, problem.columns), torch.bfloat16)
    return Plan(
        problem.tiles(tile.rows), tile.rows, tile.outputs, tile.columns, scaled(problem), tile.num_warps,
        tile.num_stages, scratch=Scratch((expanded,)),
    )  # fmt: skip


def _most_outputs(problem: Problem) -> int:
    return MOST_BYTES // (2 * problem.columns * problem.groups) // CODES.outputs * CODES.outputs


def _outputs(problem: Problem) -> int:
    """Outputs of a group that are expanded at a time: as few times as fit, each as many, in whole tiles."""
    times = -(-problem.outputs // _most_outputs(problem))
    return min(problem.outputs, -(-problem.outputs // times // CODES.outputs) * CODES.outputs)
