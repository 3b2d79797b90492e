"""Tiles of the product of fp8 rows and weights."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.ops.grouped_linear.plan import Plan, Problem
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

GROUP = 128  # columns under one scale of a row
BLOCK = 32  # of whose multiples scale blocks have columns
BLOCK_N = 64
TILES = (128, 64, 16)  # rows
INVARIANT_TILE = 64  # rows, however many there are
WARPS = {128: 8, 64: 4, 16: 4}


def plan(problem: Problem, target: Target) -> Plan:
    """The largest tile that the groups' rows fill in the mean. Not tuned yet: nothing has been timed."""
    rows = next((rows for rows in TILES if problem.rows_each >= rows), TILES[-1])
    if problem.batch_invariant:
        rows = INVARIANT_TILE
    if target.interpreted:
        rows = TILES[-1]
    groups = problem.tiled_groups
    tiles = groups + (problem.rows - groups) // rows if problem.ends else -(-problem.rows // rows)
    grid.check("outputs", problem.outputs, BLOCK_N)
    num_stages = 1 if target.interpreted else 3
    block_k = GROUP if problem.block[1] % GROUP == 0 else BLOCK
    row_groups = -(-problem.columns // GROUP)
    scratch = Scratch((
        Buffer("rows", (problem.rows, row_groups * GROUP), torch.uint8),
        Buffer("row_scales", (problem.rows, row_groups), torch.float32),
    ))  # fmt: skip
    return Plan(tiles, rows, BLOCK_N, block_k, False, WARPS[rows], num_stages, scratch=scratch)
