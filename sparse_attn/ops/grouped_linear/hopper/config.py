"""What the Hopper kernel of few rows supports, and how its steps are dealt."""

from __future__ import annotations

import torch

from sparse_attn.dispatch import YES, Support, no, not_on
from sparse_attn.ops.grouped_linear.hopper.constants import BLOCK_K, OUTPUTS
from sparse_attn.ops.grouped_linear.plan import Problem, StreamPlan
from sparse_attn.target import Target
from sparse_attn.workspace import Buffer, Scratch

ROWS = (8, 16)  # of a tile
CONSUMERS = 2  # of a CTA; with four, partials of a tile are more and larger
STAGES = 3
CTAS = 2  # that share an SM
LEAST_STEPS = 4  # of a CTA
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 80, 104, 24  # at launch, for CTAS an SM, and then
MOST_OUTPUTS = 1 << 24  # far above any model's, so that steps and outputs of all tiles are int32


def supports(problem: Problem, target: Target) -> Support:
    if not target.is_hopper:
        return not_on(target, "sm_90")
    if problem.dtype != torch.bfloat16:
        return no(f"rows: got {str(problem.dtype).removeprefix('torch.')}, allowed: bfloat16")
    if problem.codes != "e4m3" or problem.block[1] % BLOCK_K:
        allowed = f"e4m3, a multiple of {BLOCK_K} columns a scale"
        return no(f"codes: got {problem.codes}, {problem.block[1]} columns a scale, allowed: {allowed}")
    if problem.columns % BLOCK_K or not problem.columns:
        return no(f"columns: got {problem.columns}, allowed: multiples of {BLOCK_K}")
    if problem.ends:
        return no("ends: got a tensor, allowed: none")
    if problem.batch_invariant:
        return no("batch_invariant: got True, allowed: False")
    if not (problem.aligned and problem.rows_aligned):
        return no(
            "rows, codes: got any address and strides, allowed: contiguous columns, rows at multiples of 16 bytes"
        )
    if problem.rows > ROWS[-1]:
        return no(f"rows: got {problem.rows}, allowed: at most {ROWS[-1]}")
    if problem.outputs > MOST_OUTPUTS:
        return no(f"outputs: got {problem.outputs}, allowed: at most {MOST_OUTPUTS}")
    return YES


def plan(problem: Problem, target: Target) -> StreamPlan:
    block_m = next(rows for rows in ROWS if problem.rows <= rows)
    block_n = OUTPUTS * CONSUMERS
    tiles = -(-problem.outputs // block_n)
    steps = tiles * (problem.columns // BLOCK_K)
    grid = max(1, min(CTAS * target.num_sms, steps // LEAST_STEPS))
    partials = Buffer("partials", (grid, 2, problem.rows, block_n), torch.float32)
    return StreamPlan(
        1, block_m, block_n, BLOCK_K, False, 4 * CONSUMERS, STAGES, registers=REGISTERS,
        scratch=Scratch((partials,), tiles * CONSUMERS), grid=grid,
    )  # fmt: skip
