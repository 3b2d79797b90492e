"""What the swap-AB product supports, its tiles, and its splits."""

from __future__ import annotations

import torch

from sparse_attn.device import grid
from sparse_attn.dispatch import YES, Support, no, slower
from sparse_attn.ops.grouped_linear.plan import Plan, Problem
from sparse_attn.target import Target

CODES = {"e2m1": ("e8m0", (1, 32)), "e4m3": ("", (0, 128))}  # scale, and block: columns are a multiple of the latter
BLOCK_N = 64  # what a warpgroup multiplies at once
ROWS = (8, 16, 32, 64)  # of a tile
INVARIANT_ROWS = 32  # of a tile, however many rows there are
MOST_ROWS = 128  # in the mean of a group
STAGES_BYTES = 72 << 10  # shared memory of a CTA's tiles in flight
CTAS = 4  # that an SM holds, by their registers
SPLIT_STEPS = 12  # of a split at least: the sum of splits is a launch of its own


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
    groups = problem.tiled_groups
    tiles = groups + (problem.rows - groups) // block_m if problem.ends else -(-problem.rows // block_m)
    fp4 = problem.codes == "e2m1"
    block_k = 256 if fp4 and block_m < 64 else 128
    steps = problem.columns // block_k
    ctas = (problem.groups if problem.batch_invariant else tiles) * -(-problem.outputs // BLOCK_N)
    wanted = max(1, min(steps // SPLIT_STEPS, CTAS * target.num_sms // max(1, ctas)))
    splits = -(-steps // -(-steps // wanted)) if steps else 1  # none of them empty
    stage = 2 * block_m * block_k + BLOCK_N * (block_k // 2 if fp4 else block_k)
    num_stages = 1 if target.interpreted else min(4, STAGES_BYTES // stage)
    return Plan(tiles, block_m, BLOCK_N, block_k, fp4, 4, num_stages, splits)
